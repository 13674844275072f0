"""What a worker says about the files that it brings."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError
from holdfast.storage.store import MANIFEST
from holdfast.wire.messages import FileEntry
from holdfast.worker.files import RESERVED, scan


def test_every_file_is_told_by_its_relative_name(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "b" / "deep" / "x").write_bytes(b"12345")
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"1")
    (tmp_path / "a link").symlink_to(tmp_path / "b" / "deep" / "x")
    names = [FileEntry(".hidden", 0), FileEntry("a link", 5), FileEntry("b.txt", 1), FileEntry("b/deep/x", 5)]
    assert list(scan(tmp_path)) == names


def test_the_manifest_of_a_copied_checkpoint_is_left_out(tmp_path: Path) -> None:
    assert RESERVED == MANIFEST
    (tmp_path / "sub").mkdir()
    for name in (MANIFEST, f"sub/{MANIFEST}", "model"):
        (tmp_path / name).write_bytes(b"x")
    assert [entry.name for entry in scan(tmp_path)] == ["model", f"sub/{MANIFEST}"]


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="is a file"):
        scan(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="does not exist"):
        scan(tmp_path / "gone")


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    def pipe(place: Path) -> None:
        os.mkfifo(place)

    def bound(place: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))

    def nowhere(place: Path) -> None:
        place.symlink_to("nowhere")

    def folder(place: Path) -> None:
        place.symlink_to(tmp_path)

    for make in (pipe, bound, nowhere, folder):
        place = tmp_path / make.__name__
        place.mkdir()
        make(place / "odd")
        with pytest.raises(ConfigurationError, match="odd"):
            scan(place)


def test_a_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        scan(tmp_path)
