"""The store on a bucket: S3, Google Cloud Storage, Azure, or memory for tests. The only place that knows obstore.

obstore brings the protocols, multipart and the retries of single requests. It is not fork-safe and costs 16 ms to
import, so it is loaded inside the calls. This module must never be imported by a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import xxhash

from holdfast.errors import ConfigurationError, MissingError, StorageError
from holdfast.storage.store import (
    MANIFEST,
    Store,
    checked_key,
    checked_prefix,
    missing,
    name_of,
    open_source,
    open_target,
)
from holdfast.wire.messages import FileEntry

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

_CHUNK = 5 << 20
"""Bytes per part of a multipart upload: the smallest that S3 takes."""

_READERS = 32
"""How many small objects are read at a time: each takes a round trip, and a long journal has thousands."""

_memories: dict[str, Any] = {}


def open_objects(uri: str) -> ObjectStore:
    """The store at an ``s3://``, ``gs://``, ``az://`` or ``memory://`` URI."""
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore, from_url

    parts = urlsplit(uri)
    if not parts.netloc:
        raise ConfigurationError(f"{uri!r} names no bucket; write {parts.scheme}://bucket/path")
    prefix = parts.path.strip("/")
    base = f"{parts.scheme}://{parts.netloc}"
    if parts.scheme == "memory":
        return ObjectStore(_memories.setdefault(parts.netloc, MemoryStore()), base, prefix)
    try:
        return ObjectStore(from_url(base), base, prefix)
    except (BaseError, ValueError) as error:
        raise ConfigurationError(f"cannot store in {uri!r}: {_first_line(error)}") from error


class ObjectStore(Store):
    """Bytes in objects below ``prefix`` in a bucket."""

    def __init__(self, bucket: Bucket, base: str = "memory://unnamed", prefix: str = "") -> None:
        self._bucket = bucket
        self._base = base
        self._prefix = checked_prefix(prefix)
        self.uri = f"{base}/{self._prefix}" if self._prefix else base

    def child(self, name: str) -> ObjectStore:
        return ObjectStore(self._bucket, self._base, self._path(name))

    def read(self, key: str) -> bytes:
        import obstore

        with self._told(key, "read"):
            return obstore.get(self._bucket, self._path(key)).bytes().to_bytes()

    def read_many(self, keys: list[str]) -> Iterator[bytes]:
        if len(keys) <= 1:
            yield from map(self.read, keys)
            return
        with ThreadPoolExecutor(min(_READERS, len(keys)), "holdfast-read") as threads:
            for at in range(0, len(keys), _READERS):
                yield from threads.map(self.read, keys[at : at + _READERS])

    def head(self, key: str, length: int) -> bytes:
        import obstore

        size = self.size(key)
        if size == 0:
            return b""
        with self._told(key, "read"):
            return obstore.get_range(self._bucket, self._path(key), start=0, length=min(length, size)).to_bytes()

    def size(self, key: str) -> int:
        import obstore

        with self._told(key, "read"):
            return obstore.head(self._bucket, self._path(key))["size"]

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except MissingError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        import obstore

        with self._told(key, "write"):
            obstore.put(self._bucket, self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._told(key, "write"):
            try:
                obstore.put(self._bucket, self._path(key), data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def keys(self, prefix: str) -> list[str]:
        import obstore

        folder = self._folder(prefix)
        skip = len(self._prefix) + 1 if self._prefix else 0
        with self._told(prefix, "list"):
            found = [entry["path"] for batch in obstore.list(self._bucket, folder or None) for entry in batch]
        return sorted(path[skip:] for path in found)

    def folders(self, prefix: str) -> list[str]:
        import obstore

        with self._told(prefix, "list"):
            found = obstore.list_with_delimiter(self._bucket, self._folder(prefix) or None)
        return sorted(name_of(path) for path in found["common_prefixes"])

    def delete(self, key: str) -> None:
        import obstore

        with suppress(MissingError), self._told(key, "delete"):
            obstore.delete(self._bucket, self._path(key))

    def delete_tree(self, prefix: str) -> None:
        import obstore

        keys = self.keys(prefix)
        manifests = [key for key in keys if name_of(key) == MANIFEST]
        for some in (manifests, sorted(set(keys).difference(manifests))):
            if some:
                with suppress(MissingError), self._told(prefix, "delete"):
                    obstore.delete(self._bucket, [self._path(key) for key in some])

    def put_file(self, source: Path, key: str) -> FileEntry:
        import obstore

        reading = _Reading(source)
        with self._told(key, "write"):
            obstore.put(self._bucket, self._path(key), reading.chunks(), chunk_size=_CHUNK)
        return FileEntry(name_of(key), reading.size, reading.digest.hexdigest())

    def fetch_file(self, key: str, target: Path) -> FileEntry:
        digest = xxhash.xxh3_64()
        size = 0
        with open_target(target) as write:
            for chunk in self._stream(key):
                digest.update(chunk)
                write(chunk)
                size += len(chunk)
        return FileEntry(name_of(key), size, digest.hexdigest())

    def settle(self, prefix: str) -> None:
        """Checks the prefix alone: an object is durable once it was put."""
        checked_prefix(prefix)

    def checksum(self, key: str) -> FileEntry:
        digest = xxhash.xxh3_64()
        size = 0
        for chunk in self._stream(key):
            digest.update(chunk)
            size += len(chunk)
        return FileEntry(name_of(key), size, digest.hexdigest())

    def _stream(self, key: str) -> Iterator[memoryview]:
        import obstore

        with self._told(key, "read"):
            for chunk in obstore.get(self._bucket, self._path(key)):
                yield memoryview(chunk)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{checked_key(key)}" if self._prefix else checked_key(key)

    def _folder(self, prefix: str) -> str:
        return self._path(checked_prefix(prefix)) if prefix else self._prefix

    @contextmanager
    def _told(self, key: str, doing: str) -> Iterator[None]:
        """Turn obstore's errors into ours, which name the key."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:
            raise missing(self.uri, key) from error
        except (BaseError, ValueError, OSError) as error:
            raise StorageError(f"cannot {doing} {key!r} in {self.uri}: {_first_line(error)}") from error


class _Reading:
    """A local file as chunks, and what was read of it."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.digest = xxhash.xxh3_64()
        self.size = 0

    def chunks(self) -> Iterator[bytes]:
        with open_source(self.source) as (descriptor, _):
            while chunk := os.read(descriptor, _CHUNK):
                self.digest.update(chunk)
                self.size += len(chunk)
                yield chunk


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
