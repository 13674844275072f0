"""What the store on files adds to the contract: crashes, full disks, modes, and folders that vanish."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage.files import FileStore, _file_system
from holdfast.storage.store import MANIFEST

WRITER = """
import sys
from pathlib import Path
from holdfast.storage.files import FileStore
store = FileStore(Path(sys.argv[1]))
versions = [b"A" * 3_000_000, b"B" * 3_000_000]
Path(sys.argv[2]).write_bytes(versions[1])
store.put("key", versions[0])
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    store.put("key", versions[turn % 2])
    store.put_file(Path(sys.argv[2]), "file")
    store.create(f"created-{turn}", versions[0])
"""


def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = FileStore(root)
    chance = random.Random(7)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(tmp_path / "source")], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        with writer, writer.stdout as lines:
            assert lines.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        for key in store.keys(""):
            assert key in ("key", "file") or key.startswith("created-")
            assert store.read(key) in (b"A" * 3_000_000, b"B" * 3_000_000)
        store.delete_tree("")
        assert not root.exists()


def test_a_full_disk_is_named_and_nothing_is_left(small_disk: Path, tmp_path: Path) -> None:
    store = FileStore(small_disk / "run")
    store.put("before", b"x" * 1000)
    source = tmp_path / "big"
    source.write_bytes(b"y" * (5 << 20))
    for call in (
        lambda: store.put("big", source.read_bytes()),
        lambda: store.create("big", source.read_bytes()),
        lambda: store.put_file(source, "big"),
    ):
        with pytest.raises(StorageError, match=r"cannot write 'big': the disk that holds .*/run is full") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
        assert os.listdir(store.root) == ["before"]
    assert store.read("before") == b"x" * 1000
    store.put("after", b"z" * 1000)


def test_an_appender_on_a_full_disk_keeps_what_was_whole(small_disk: Path) -> None:
    store = FileStore(small_disk)
    appender = store.appender("log")
    appender.append(b"a" * 1000)
    with pytest.raises(StorageError, match="is full"):
        appender.append(b"b" * (5 << 20))
    assert store.read("log") == b"a" * 1000
    appender.append(b"c")
    appender.close()
    assert store.read("log") == b"a" * 1000 + b"c"


def test_a_checkpoint_whose_deletion_stops_half_way_is_none_any_more(small_disk: Path) -> None:
    # A mount point cannot be removed, whoever asks: the deletion stops there.
    store = FileStore(small_disk.parent)
    for name in (MANIFEST, "a", "z"):
        (small_disk.parent / name).write_bytes(b"x")
    with pytest.raises(StorageError, match="cannot delete"):
        store.delete_tree("")
    assert not store.exists(MANIFEST)


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "run")
    store.put("deep/key", b"1")
    shutil.rmtree(tmp_path / "run")
    store.put("deep/key", b"2")
    store.create("deep/other", b"3")
    assert store.keys("") == ["deep/key", "deep/other"]


def test_an_executable_stays_one_and_links_are_followed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "run")
    script = tmp_path / "script"
    script.write_bytes(b"#!/bin/sh\n")
    (tmp_path / "link").symlink_to(script)
    store.put_file(tmp_path / "link", "plain")
    script.chmod(0o755)
    store.put_file(tmp_path / "link", "script")
    modes = [(tmp_path / "run" / name).lstat().st_mode for name in ("plain", "script")]
    assert [bool(mode & 0o100) for mode in modes] == [False, True]
    store.fetch_file("script", tmp_path / "back")
    assert os.access(tmp_path / "back", os.X_OK)


def test_a_key_below_a_file_is_refused_as_a_place_to_write(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("file", b"x")
    with pytest.raises(StorageError, match="cannot write 'file/below': Not a directory"):
        store.put("file/below", b"y")


def test_a_folder_of_another_user_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        with pytest.raises(StorageError, match=r"Permission denied .* must be writable"):
            FileStore(tmp_path).put("key", b"x")
    finally:
        os.seteuid(me)


def test_the_file_system_below_a_folder_is_known_by_its_name(small_disk: Path) -> None:
    assert _file_system(str(small_disk)) == "tmpfs"
    assert _file_system("/proc") == "proc"
