"""Directories into a store and out of it, while storage fails."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import faultpoints
from holdfast.errors import DamagedError, StorageError
from holdfast.storage.files import FileStore
from holdfast.storage.manifest import Manifest, verify, write_manifest
from holdfast.storage.store import MANIFEST, SourceError, Store, open_store
from holdfast.storage.transfer import download, upload
from holdfast.wire.messages import FileEntry

NAMES = ("model.pt", "optim/rank_0.pt", "optim/rank_1.pt", "empty", "x", "y", "z")


@pytest.fixture(params=["files", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FileStore(tmp_path / "run") if request.param == "files" else open_store(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    for number, name in enumerate(NAMES):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(secrets.token_bytes(0 if name == "empty" else 100_000 * number + 17))
    return place


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faultpoints.disarm()


class Failing(FileStore):
    """Refuses to copy a file as long as somebody says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refusals: dict[str, int] = {}
        self.calls: list[str] = []

    def put_file(self, source: Path, key: str) -> FileEntry:
        self.calls.append(key)
        if self.refusals.get(key, 0) > 0:
            self.refusals[key] -= 1
            raise StorageError(f"cannot write {key!r}: not now")
        return super().put_file(source, key)


def test_a_directory_goes_up_and_comes_down_again(store: Store, source: Path, tmp_path: Path) -> None:
    entries = asyncio.run(upload(source, NAMES, store, "checkpoint_000001", run=asyncio.to_thread))
    assert [(entry.name, entry.size) for entry in entries] == [(n, (source / n).stat().st_size) for n in NAMES]
    manifest = Manifest(1, 0.0, entries)
    write_manifest(store, "checkpoint_000001", manifest)
    verify(store, "checkpoint_000001", manifest)
    target = tmp_path / "cache" / "checkpoint_000001"
    download(store, "checkpoint_000001", manifest, target)
    download(store, "checkpoint_000001", manifest, target)
    assert {name: (target / name).read_bytes() for name in NAMES} == {n: (source / n).read_bytes() for n in NAMES}
    assert os.listdir(target.parent) == ["checkpoint_000001"]


def test_an_empty_directory_is_fine(store: Store, source: Path, tmp_path: Path) -> None:
    assert asyncio.run(upload(source, (), store, "checkpoint_000001", run=asyncio.to_thread)) == ()
    write_manifest(store, "checkpoint_000001", Manifest(1, 0.0, ()))
    download(store, "checkpoint_000001", Manifest(1, 0.0, ()), tmp_path / "target")
    assert os.listdir(tmp_path / "target") == []


def test_no_more_files_move_at_once_than_allowed(source: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "run")
    running = most = 0

    async def run(call: object, *arguments: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await asyncio.to_thread(call, *arguments)  # type: ignore[arg-type]
        finally:
            running -= 1

    asyncio.run(upload(source, NAMES, store, "c", run=run, parallel=3))
    assert most == 3


def test_a_failing_file_is_tried_again_and_trouble_told_once(source: Path, tmp_path: Path) -> None:
    store = Failing(tmp_path / "run")
    store.refusals["c/model.pt"] = 3
    heard: list[Exception] = []
    entries = asyncio.run(
        upload(source, NAMES[:1], store, "c", run=asyncio.to_thread, patience_s=60, on_trouble=heard.append)
    )
    assert [entry.name for entry in entries] == ["model.pt"]
    assert store.calls == ["c/model.pt"] * 4
    assert [str(error) for error in heard] == ["cannot write 'c/model.pt': not now"]


def test_when_patience_ends_what_was_written_is_removed(source: Path, tmp_path: Path) -> None:
    store = Failing(tmp_path / "run")
    store.refusals["c/x"] = 1_000_000
    store.put("c/of another rank", b"stays")
    with pytest.raises(StorageError, match=r"gave up 'x' after 0\.3 s: cannot write 'c/x': not now"):
        asyncio.run(upload(source, NAMES, store, "c", run=asyncio.to_thread, patience_s=0.3))
    assert store.keys("c") == ["c/of another rank"]


def test_an_injected_fault_is_trouble_like_any_other(store: Store, source: Path) -> None:
    faultpoints.arm("upload.file", "raise", file="x", times=2)
    heard: list[Exception] = []
    asyncio.run(upload(source, NAMES, store, "c", run=asyncio.to_thread, on_trouble=heard.append))
    assert store.keys("c") == sorted(f"c/{name}" for name in NAMES)
    assert heard


def test_a_full_disk_is_waited_for(small_disk: Path, source: Path) -> None:
    store = FileStore(small_disk / "run")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (1900 << 10))
    heard: list[str] = []

    def free(error: Exception) -> None:
        heard.append(str(error))
        ballast.unlink()

    (source / "z").write_bytes(b"z" * 500_000)
    entries = asyncio.run(upload(source, ("z",), store, "c", run=asyncio.to_thread, on_trouble=free))
    assert entries[0].size == 500_000
    assert len(heard) == 1
    assert "is full" in heard[0]


def test_a_local_file_that_is_gone_ends_it_at_once(store: Store, source: Path) -> None:
    heard: list[Exception] = []
    with pytest.raises(SourceError, match="nowhere"):
        asyncio.run(upload(source, (*NAMES, "nowhere"), store, "c", run=asyncio.to_thread, on_trouble=heard.append))
    assert heard == []
    assert store.keys("c") == []


def test_a_manifest_never_travels_as_a_file(store: Store, source: Path) -> None:
    (source / MANIFEST).write_bytes(b"{}")
    with pytest.raises(SourceError, match="before it is one"):
        asyncio.run(upload(source, (*NAMES, MANIFEST), store, "c", run=asyncio.to_thread))
    assert store.keys("c") == []


def test_a_damaged_checkpoint_never_arrives(store: Store, source: Path, tmp_path: Path) -> None:
    manifest = Manifest(1, 0.0, asyncio.run(upload(source, NAMES, store, "c", run=asyncio.to_thread)))
    target = tmp_path / "cache" / "c"
    whole = store.read("c/z")
    for damage in (lambda: store.put("c/z", whole[:-1] + b"?"), lambda: store.delete("c/z")):
        damage()
        with pytest.raises(DamagedError, match="'z'"):
            download(store, "c", manifest, target)
        assert os.listdir(target.parent) == []


def test_a_download_to_a_full_disk_leaves_nothing(small_disk: Path, store: Store, source: Path) -> None:
    (source / "x").write_bytes(b"x" * (3 << 20))
    manifest = Manifest(1, 0.0, asyncio.run(upload(source, ("x",), store, "c", run=asyncio.to_thread)))
    with pytest.raises(StorageError, match=r"cannot write .*/x: the disk that holds .* is full"):
        download(store, "c", manifest, small_disk / "c")
    assert os.listdir(small_disk) == []


def test_patience_lasts_as_long_as_it_says(source: Path, tmp_path: Path) -> None:
    store = Failing(tmp_path / "run")
    store.refusals["c/x"] = 1_000_000
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"gave up 'x' after 0\.6 s"):
        asyncio.run(upload(source, ("x",), store, "c", run=asyncio.to_thread, patience_s=0.6))
    assert 0.6 <= time.monotonic() - began < 1.0
