"""A checkpoint exists only if its manifest does, and is what its manifest says."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from holdfast.errors import DamagedError
from holdfast.storage.files import FileStore
from holdfast.storage.manifest import Manifest, read_manifest, verify, write_manifest
from holdfast.storage.store import MANIFEST, Store, open_store
from holdfast.wire.messages import FileEntry


@pytest.fixture(params=["files", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FileStore(tmp_path / "run") if request.param == "files" else open_store(f"memory://{secrets.token_hex(8)}")


def checkpoint(store: Store, tmp_path: Path) -> Manifest:
    entries = []
    for name, size in (("model.pt", 3 << 20), ("optim/rank_0.pt", 5000), ("optim/rank_1.pt", 0)):
        source = tmp_path / "source"
        source.write_bytes(secrets.token_bytes(size))
        entry = store.put_file(source, f"checkpoint_000007/{name}")
        entries.append(FileEntry(name, entry.size, entry.checksum))
    manifest = Manifest(7, 1700000000.25, tuple(entries))
    write_manifest(store, "checkpoint_000007", manifest)
    return manifest


def test_what_was_written_is_read_and_verified(store: Store, tmp_path: Path) -> None:
    manifest = checkpoint(store, tmp_path)
    found = read_manifest(store, "checkpoint_000007")
    assert found == manifest
    assert found is not None
    verify(store, "checkpoint_000007", found)


def test_the_files_are_settled_before_the_manifest_is_written(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watched(FileStore):
        def settle(self, prefix: str) -> None:
            calls.append("settle")
            super().settle(prefix)

        def put(self, key: str, data: bytes) -> None:
            calls.append("put")
            super().put(key, data)

    checkpoint(Watched(tmp_path / "run"), tmp_path)
    assert calls == ["settle", "put"]


def test_without_a_manifest_there_is_no_checkpoint(store: Store, tmp_path: Path) -> None:
    checkpoint(store, tmp_path)
    store.delete(f"checkpoint_000007/{MANIFEST}")
    assert read_manifest(store, "checkpoint_000007") is None
    assert read_manifest(store, "checkpoint_000008") is None


def test_a_manifest_cut_anywhere_or_changed_is_damaged(store: Store, tmp_path: Path) -> None:
    checkpoint(store, tmp_path)
    key = f"checkpoint_000007/{MANIFEST}"
    whole = store.read(key)
    body = whole.rstrip(b"\n")
    changed = [body[:at] for at in range(len(body))]
    changed += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(body), 3)]
    changed += [b"\0" * len(whole), b'{"version":1}', whole + whole]
    bare = open_store(f"memory://{secrets.token_hex(8)}")
    for data in changed:
        bare.put(key, data)
        with pytest.raises(DamagedError, match="manifest"):
            read_manifest(bare, "checkpoint_000007")


@pytest.mark.parametrize("name", ["model.pt", "optim/rank_0.pt"])
def test_a_bad_file_is_named(store: Store, tmp_path: Path, name: str) -> None:
    manifest = checkpoint(store, tmp_path)
    key = f"checkpoint_000007/{name}"
    whole = store.read(key)
    for data, reason in (
        (whole[:-1], "bytes, not the"),
        (whole + b"x", "bytes, not the"),
        (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "was changed"),
    ):
        store.put(key, data)
        with pytest.raises(DamagedError, match=f"'{name}' of the checkpoint 'checkpoint_000007'.*{reason}"):
            verify(store, "checkpoint_000007", manifest)
    store.delete(key)
    with pytest.raises(DamagedError, match=f"'{name}'.*is missing"):
        verify(store, "checkpoint_000007", manifest)


def test_a_newer_manifest_with_more_in_it_is_still_read(store: Store, tmp_path: Path) -> None:
    from holdfast.storage.envelope import seal

    store.put(f"next/{MANIFEST}", seal(b'{"index":1,"created_at":2.0,"files":[["a",1,"x","more"]],"news":{"a":1}}'))
    found = read_manifest(store, "next")
    assert found is not None
    assert found.files == (FileEntry("a", 1, "x"),)
