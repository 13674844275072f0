"""Stores in memory that keep the contract to the letter and not a byte further.

A ``Disk`` loses with the power whatever the contract does not call durable: appended bytes that were not synced, torn
anywhere; files whose folder was not settled; deletions. A ``Bucket`` loses nothing, cannot append, and may ignore
create-if-absent. Both ask ``Ground`` before and after every step, which may fail the call, end the process that makes
it, or let another process in.

They must never be kinder than a real store: no order, no durability that is not promised.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from pathlib import Path
from typing import Protocol

from holdfast.errors import StorageError
from holdfast.storage.store import MANIFEST, Appender, SourceError, Store, entry_of, missing
from holdfast.wire.messages import FileEntry

LOCAL = "read local"
"""The operation of reading a worker's own file, as ``Ground`` hears of it."""


class Ground(Protocol):
    """What lies under a store: chance, and somebody who watches."""

    files: dict[str, bytes]
    """Local files of workers, by their path."""

    def reached(self, operation: str, key: str) -> None:
        """A call is about to take effect, or a step of it. May raise StorageError, or end the caller."""

    def left(self, operation: str, key: str) -> None:
        """It has taken effect. May end the caller, or raise where an answer can be lost."""

    def wrote(self, key: str) -> None:
        """There are new bytes under ``key``."""

    def deletes(self, key: str) -> None:
        """``key`` goes away now."""


class MemoryStore(Store):
    """What a disk and a bucket have in common."""

    def __init__(self, ground: Ground, uri: str) -> None:
        self.uri = uri
        self._ground = ground

    @abstractmethod
    def visible(self, key: str) -> bytes | None:
        """What a reader sees, without asking anybody."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every key, without asking anybody."""

    @abstractmethod
    def durable(self, key: str) -> bytes | None:
        """What is left under ``key`` when the power goes now."""

    @abstractmethod
    def _write(self, key: str, data: bytes, *, settled: bool) -> None: ...

    @abstractmethod
    def _remove(self, key: str, *, settled: bool) -> None: ...

    def child(self, name: str) -> Store:
        raise StorageError("a simulated store has no children")

    def read(self, key: str) -> bytes:
        self._ground.reached("read", key)
        data = self.visible(key)
        if data is None:
            raise missing(self.uri, key)
        return data

    def put(self, key: str, data: bytes) -> None:
        self._ground.reached("put", key)
        self._write(key, data, settled=True)
        self._ground.wrote(key)
        self._ground.left("put", key)

    def create(self, key: str, data: bytes) -> bool:
        self._ground.reached("create", key)
        free = self.visible(key) is None
        if free:
            self._write(key, data, settled=True)
            self._ground.wrote(key)
        self._ground.left("create", key)
        return free

    def exists(self, key: str) -> bool:
        self._ground.reached("exists", key)
        return self.visible(key) is not None

    def keys(self, prefix: str) -> list[str]:
        self._ground.reached("keys", prefix)
        return [name for name in sorted(self.names()) if not prefix or name.startswith(prefix + "/")]

    def folders(self, prefix: str) -> list[str]:
        start = len(prefix) + 1 if prefix else 0
        return sorted({name[start:].partition("/")[0] for name in self.keys(prefix) if "/" in name[start:]})

    def delete(self, key: str) -> None:
        self._ground.reached("delete", key)
        if self.visible(key) is not None:
            self._ground.deletes(key)
            self._remove(key, settled=False)
        self._ground.left("delete", key)

    def delete_tree(self, prefix: str) -> None:
        self._ground.reached("delete_tree", prefix)
        below = [name for name in sorted(self.names()) if name.startswith(prefix + "/")]
        below.sort(key=lambda name: not name.endswith("/" + MANIFEST))
        for key in below:
            if self.visible(key) is not None:
                self._ground.deletes(key)
                self._remove(key, settled=key.endswith("/" + MANIFEST))
                self._ground.left("delete_tree", key)

    def put_file(self, source: Path, key: str) -> FileEntry:
        self._ground.reached("put_file", key)
        data = self._ground.files.get(str(source))
        if data is None:
            raise SourceError(f"cannot read {source}: it is gone")
        self._write(key, data, settled=False)
        self._ground.wrote(key)
        self._ground.left("put_file", key)
        return entry_of(key, data)

    def settle(self, prefix: str) -> None:
        self._ground.reached("settle", prefix)

    def checksum(self, key: str) -> FileEntry:
        return entry_of(key, self.read(key))


class Bucket(MemoryStore):
    """Objects. ``honours`` create-if-absent, or does not."""

    appends = False

    def __init__(self, ground: Ground, uri: str, *, honours: bool) -> None:
        super().__init__(ground, uri)
        self._honours = honours
        self._objects: dict[str, bytes] = {}

    def create(self, key: str, data: bytes) -> bool:
        if self._honours:
            return super().create(key, data)
        self.put(key, data)
        return True

    def visible(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def durable(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def names(self) -> list[str]:
        return list(self._objects)

    def spoil(self, key: str, data: bytes | None) -> None:
        """Change or remove what lies under ``key``, as nobody should."""
        if data is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = data

    def lose_power(self, chance: random.Random) -> None:
        """Nothing happens to a bucket."""

    def _write(self, key: str, data: bytes, *, settled: bool) -> None:
        self._objects[key] = data

    def _remove(self, key: str, *, settled: bool) -> None:
        del self._objects[key]


class _File:
    __slots__ = ("data", "held", "settled", "synced")

    def __init__(self, data: bytes, *, settled: bool) -> None:
        self.data = data
        self.synced = len(data)
        self.settled = settled
        self.held = False


class Disk(MemoryStore):
    """A file system below one folder."""

    appends = True

    def __init__(self, ground: Ground, uri: str) -> None:
        super().__init__(ground, uri)
        self._files: dict[str, _File] = {}
        self._removed: dict[str, bytes] = {}

    def visible(self, key: str) -> bytes | None:
        file = self._files.get(key)
        return None if file is None else file.data

    def durable(self, key: str) -> bytes | None:
        file = self._files.get(key)
        return file.data[: file.synced] if file is not None and file.settled else None

    def names(self) -> list[str]:
        return list(self._files)

    def settle(self, prefix: str) -> None:
        super().settle(prefix)
        for key, file in self._files.items():
            if key.startswith(prefix + "/"):
                file.settled = True
        for key in [key for key in self._removed if key.startswith(prefix + "/")]:
            del self._removed[key]

    def flush(self, key: str) -> None:
        self._ground.reached("flush", key)
        file = self._files.get(key)
        if file is not None:
            file.synced = len(file.data)
            self._ground.wrote(key)

    def appender(self, key: str) -> Appender:
        self._ground.reached("appender", key)
        if key in self._files:
            raise StorageError(f"cannot write {key!r}: it exists")
        self._files[key] = file = _File(b"", settled=True)
        file.held = True
        self._ground.left("appender", key)
        return _DiskAppender(self._ground, key, file)

    def is_held(self, key: str) -> bool | None:
        self._ground.reached("is_held", key)
        file = self._files.get(key)
        return file is not None and file.held

    def spoil(self, key: str, data: bytes | None) -> None:
        """Change or remove what lies under ``key``, as nobody should."""
        if data is None:
            self._files.pop(key, None)
        elif key in self._files:
            self._files[key] = _File(data, settled=True)

    def lose_power(self, chance: random.Random) -> None:
        """Keep what is durable, and of the rest whatever chance leaves."""
        for key, file in list(self._files.items()):
            file.held = False
            if not file.settled and chance.random() < 0.5:
                del self._files[key]
                continue
            file.settled = True
            if file.synced < len(file.data):
                file.data = file.data[: file.synced] + _torn(file.data[file.synced :], chance)
                file.synced = len(file.data)
        for key, data in self._removed.items():
            if key not in self._files and chance.random() < 0.3:
                self._files[key] = _File(data, settled=True)
        self._removed.clear()

    def _write(self, key: str, data: bytes, *, settled: bool) -> None:
        self._files[key] = _File(data, settled=settled)
        self._removed.pop(key, None)

    def _remove(self, key: str, *, settled: bool) -> None:
        file = self._files.pop(key)
        if file.settled and not settled:
            self._removed[key] = file.data


class _DiskAppender:
    def __init__(self, ground: Ground, key: str, file: _File) -> None:
        self._ground = ground
        self._key = key
        self._file = file

    def append(self, data: bytes) -> None:
        self._ground.reached("append", self._key)
        self._file.data += data
        self._ground.left("append", self._key)

    def sync(self) -> None:
        self._ground.reached("sync", self._key)
        self._file.synced = len(self._file.data)
        self._ground.wrote(self._key)
        self._ground.left("sync", self._key)

    def close(self) -> None:
        self._file.held = False


class Scratch(MemoryStore):
    """A worker's own folder, seen as a store."""

    appends = False

    def read(self, key: str) -> bytes:
        self._ground.reached(LOCAL, f"{self.uri}/{key}")
        data = self.visible(key)
        if data is None:
            raise missing(self.uri, key)
        return data

    def visible(self, key: str) -> bytes | None:
        return self._ground.files.get(f"{self.uri}/{key}")

    def names(self) -> list[str]:
        start = self.uri + "/"
        return [path[len(start) :] for path in self._ground.files if path.startswith(start)]

    def durable(self, key: str) -> bytes | None:
        return self.visible(key)

    def _write(self, key: str, data: bytes, *, settled: bool) -> None:
        raise StorageError(f"{self.uri} is a worker's own folder; {key} is not ours to write")

    def _remove(self, key: str, *, settled: bool) -> None:
        raise StorageError(f"{self.uri} is a worker's own folder; {key} is not ours to remove")


def _torn(tail: bytes, chance: random.Random) -> bytes:
    """What a disk may hold of bytes that were never synced: a part, perhaps with a hole before the rest."""
    cut = chance.randrange(len(tail) + 1)
    if chance.random() < 0.3:
        return bytes(cut) + tail[cut:]
    return tail[:cut]
