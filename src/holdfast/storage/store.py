"""The contract of a store, and the way from a URI to one.

A store holds bytes under keys (relative, ``/``-separated, never starting with ``/`` or holding ``..``) below one root.
Every call blocks and may be made from any thread; callers on an event loop hand it to a thread. A store holds no
decision: it never retries, renames on its own account or guesses.

What every store promises, and ``holdfast.testing.contracts`` proves:

- ``put`` and ``create`` are atomic and durable when they return: a reader, and a machine that lost its power, sees the
  old bytes or the new ones.
- ``create`` writes only where nothing lies and tells whether it did; of two callers exactly one gets True. Stores that
  ignore the condition are found by ``honours_create``.
- ``put_file`` copies a file and tells its size and checksum as read. It is atomic too: a reader sees all of it or
  nothing. On a file store its bytes are durable when it returns, and its directory entry after ``settle``.
- ``keys`` lists recursively, sorted; what a half finished ``put`` left behind is never listed.
- ``read`` of nothing raises MissingError; ``delete`` of nothing is no error. Any other refusal is a StorageError that
  names the key, with the cause kept.

This module must never import obstore: the way to a bucket is loaded when a bucket is named.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import xxhash

from holdfast.errors import ConfigurationError, MissingError, StorageError
from holdfast.wire.messages import FileEntry

MANIFEST = ".manifest.json"
"""The name of the file that makes the directory around it a checkpoint: written last, deleted first."""

BUFFER = 1 << 20
"""Bytes per step of a copy: xxhash lets other threads run, and the data is still in the processor's cache."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = ("s3", "gs", "az", "memory")


class SourceError(StorageError):
    """The local file that is to be copied into a store cannot be read; trying again is no use."""


class Appender(Protocol):
    """An open journal file: bytes go to its end, and are safe after ``sync``."""

    def append(self, data: bytes) -> None:
        """Write at the end. StorageError when it cannot, and then nothing of ``data`` is left, where possible."""

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Store(ABC):
    """Bytes under keys below one root. See the module's docstring for the promises."""

    uri: str
    appends: bool = False
    """Whether ``appender`` gives one."""

    @abstractmethod
    def child(self, name: str) -> Store:
        """The store of the folder ``name`` (which may hold ``/``) below this one's root."""

    @abstractmethod
    def read(self, key: str) -> bytes: ...

    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Every key below the folder ``prefix`` (empty: all), sorted."""

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly below the folder ``prefix``, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None: ...

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete every key below the folder ``prefix``, manifests first, and the folder."""

    @abstractmethod
    def put_file(self, source: Path, key: str) -> FileEntry:
        """Copy a local file to ``key``; the entry's name is ``key``'s last part. SourceError when it cannot be read."""

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Make the directory entries below the folder ``prefix``, and its own, durable."""

    @abstractmethod
    def checksum(self, key: str) -> FileEntry:
        """Read the whole of ``key`` and tell its size and checksum; the entry's name is ``key``'s last part."""

    def size(self, key: str) -> int:
        """How many bytes lie under ``key``; MissingError where nothing does."""
        return len(self.read(key))

    def head(self, key: str, length: int) -> bytes:
        """The first ``length`` bytes of ``key``, or all of it where it is shorter."""
        return self.read(key)[:length]

    def read_many(self, keys: list[str]) -> Iterator[bytes]:
        """What lies under these keys, in their order; a store that is far away reads several at a time."""
        return map(self.read, keys)

    def fetch_file(self, key: str, target: Path) -> FileEntry:
        """Copy ``key`` to a new local file and tell its size and checksum as read."""
        data = self.read(key)
        with open_target(target) as write:
            write(data)
        return entry_of(key, data)

    def flush(self, key: str) -> None:
        """Make what lies under ``key`` durable, whoever wrote it. Buckets have nothing to do."""
        return

    def check_writable(self) -> None:
        """StorageError when nothing can be written here. Leaves nothing behind."""
        probe = f"probe-{secrets.token_hex(8)}"
        self.put(probe, b"")
        self.delete(probe)

    def appender(self, key: str) -> Appender | None:
        """Open a new file for appending, which must not exist; None where the store has no such thing (buckets)."""
        return None

    def is_held(self, key: str) -> bool | None:
        """Whether a process of this machine has the appender of ``key`` open; None where that cannot be told."""
        return None

    def local_path(self, key: str) -> Path | None:
        """Where ``key`` lies on this machine's file system, where it does."""
        return None


def open_store(uri: str | Path) -> Store:
    """The store at a local path, ``file://``, ``s3://``, ``gs://`` or ``az://`` URI. Creates nothing."""
    text = os.fspath(uri)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _file_store(Path(text).expanduser(), text)
    if scheme[1] == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigurationError(f"{text!r} names the host {parts.netloc!r}; write file:///absolute/path")
        return _file_store(Path(unquote(parts.path)), text)
    if scheme[1] in _BUCKETS:
        from holdfast.storage.objects import open_objects

        return open_objects(text)
    raise ConfigurationError(
        f"cannot store in {text!r}: {scheme[1]}:// is not known. "
        "Use a local path, file:///path, s3://bucket/path, gs://bucket/path or az://container/path"
    )


def honours_create(store: Store, prefix: str) -> bool:
    """Whether the store refuses to create what exists already. Leaves nothing behind."""
    key = f"{prefix}/probe-{secrets.token_hex(8)}" if prefix else f"probe-{secrets.token_hex(8)}"
    try:
        return store.create(key, b"1") and not store.create(key, b"2")
    finally:
        store.delete(key)


def checked_key(key: str) -> str:
    """``key``, when it is one: relative, without empty parts, ``.`` or ``..``."""
    if not key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StorageError(f"{key!r} is not a key: it must be relative, without empty parts, '.' or '..'")
    return key


def checked_prefix(prefix: str) -> str:
    """``prefix``, when it is empty or a key; one slash at its end is dropped."""
    return checked_key(prefix.removesuffix("/")) if prefix else prefix


def name_of(key: str) -> str:
    """The last part of a key."""
    return key.rpartition("/")[2]


def entry_of(key: str, data: bytes) -> FileEntry:
    """The entry of bytes that lie in memory."""
    return FileEntry(name_of(key), len(data), xxhash.xxh3_64_hexdigest(data))


def missing(uri: str, key: str) -> MissingError:
    return MissingError(f"nothing lies under {key!r} in {uri}")


@contextmanager
def open_source(source: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A local file to copy from, by descriptor, and what the system says of it. SourceError when it cannot be read."""
    try:
        # A pipe without a writer must not block before it is seen to be one.
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"cannot read {source}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"cannot read {source}: it is not a regular file")
        yield descriptor, found
    finally:
        os.close(descriptor)


@contextmanager
def open_target(target: Path, *, executable: bool = False) -> Iterator[Callable[[bytes | memoryview], None]]:
    """A new local file to copy into, by the call that writes to it. StorageError when it cannot be written."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(target, flags, 0o777 if executable else 0o666)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {reason(error, target.parent)}") from error

    def write(data: bytes | memoryview) -> None:
        try:
            write_all(descriptor, data)
        except OSError as error:
            raise StorageError(f"cannot write {target}: {reason(error, target.parent)}") from error

    try:
        yield write
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while len(left):
        left = left[os.write(descriptor, left) :]


def reason(error: OSError, place: object) -> str:
    """Why the system refused, and what to do about it."""
    if error.errno == errno.ENOSPC:
        return f"the disk that holds {place} is full; free some space on it"
    if error.errno == errno.EDQUOT:
        return f"your quota on the disk that holds {place} is used up; delete something or ask for more"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror} in {place}; the folder must be writable for this user"
    return f"{error.strerror or error} in {place}"


def _file_store(root: Path, text: str) -> Store:
    from holdfast.storage.files import FileStore

    if not text.strip():
        raise ConfigurationError("the storage path is empty; name a folder or a bucket")
    root = Path(os.path.abspath(root))
    nearest = next((place for place in (root, *root.parents) if place.exists()), root)
    if nearest.exists() and not nearest.is_dir():
        raise ConfigurationError(f"cannot store in {text!r}: {nearest} is a file, not a folder")
    return FileStore(root)
