"""The manifest: the small file, written last, that makes a checkpoint exist.

A directory without a manifest is no checkpoint. A manifest that cannot be read, or that names a file which is missing
or is not what was written, is a damaged one. This module must never take the one for the other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from holdfast.errors import DamagedError, MissingError
from holdfast.storage.envelope import seal, unseal
from holdfast.storage.store import MANIFEST, Store
from holdfast.wire.messages import FileEntry

VERSION = 1
_PARALLEL = 4
_LARGE = 1 << 20
METADATA = ".metadata.json"
"""The user's notes at the top of a checkpoint. They may be changed at any time, so no manifest lists them."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a checkpoint consists of."""

    index: int
    created_at: float
    files: tuple[FileEntry, ...]
    version: int = VERSION


_decoder = msgspec.json.Decoder(Manifest)


def write_manifest(store: Store, directory: str, manifest: Manifest) -> None:
    """Make the files that lie in ``directory`` a checkpoint: from now on, whatever happens, it exists."""
    store.settle(directory)
    files = tuple(entry for entry in manifest.files if entry.name != METADATA)
    store.put(f"{directory}/{MANIFEST}", seal(msgspec.json.encode(msgspec.structs.replace(manifest, files=files))))


def read_manifest(store: Store, directory: str) -> Manifest | None:
    """The manifest of ``directory``; None when there is no checkpoint."""
    key = f"{directory}/{MANIFEST}"
    try:
        data = store.read(key)
    except MissingError:
        return None
    body = unseal(data)
    if body is None:
        raise DamagedError(f"the manifest {key!r} in {store.uri} is cut or was changed")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise DamagedError(f"the manifest {key!r} in {store.uri} was written by something else: {error}") from error


def verify(store: Store, directory: str, manifest: Manifest) -> None:
    """DamagedError, naming the first bad file, unless every file is there and is what was written."""
    for entry in manifest.files:
        try:
            size = store.size(f"{directory}/{entry.name}")
        except MissingError as error:
            raise DamagedError(f"{_place(store, directory, entry)} is missing") from error
        if size != entry.size:
            raise DamagedError(f"{_place(store, directory, entry)} has {size} bytes, not the {entry.size} written")

    def check(entry: FileEntry) -> None:
        found = store.checksum(f"{directory}/{entry.name}")
        confirm_entry(store, directory, entry, found)

    large = [entry for entry in manifest.files if entry.size >= _LARGE]
    for entry in manifest.files:
        if entry.size < _LARGE:
            check(entry)
    if large:
        with ThreadPoolExecutor(min(_PARALLEL, len(large)), "holdfast-verify") as threads:
            list(threads.map(check, large))


def confirm_entry(store: Store, directory: str, entry: FileEntry, found: FileEntry) -> None:
    """DamagedError unless what was found is what the manifest says."""
    if found.size != entry.size:
        raise DamagedError(f"{_place(store, directory, entry)} has {found.size} bytes, not the {entry.size} written")
    if entry.checksum and found.checksum != entry.checksum:
        raise DamagedError(
            f"{_place(store, directory, entry)} was changed: its checksum is {found.checksum}, not {entry.checksum}"
        )


def _place(store: Store, directory: str, entry: FileEntry) -> str:
    return f"the file {entry.name!r} of the checkpoint {directory!r} in {store.uri}"
