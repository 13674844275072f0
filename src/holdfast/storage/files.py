"""The store on a file system, local or shared.

``put`` writes beside its target and renames; ``create`` writes beside its target and hard-links, which is atomic on
NFS as well. Nothing becomes visible before its bytes are on the disk. What a killed process leaves behind is a file
whose name begins with ``.tmp-holdfast-``; it is never listed, and goes with the folder around it.

This module must never overwrite a file in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from holdfast.errors import MissingError, StorageError
from holdfast.storage.store import (
    BUFFER,
    MANIFEST,
    SourceError,
    Store,
    checked_key,
    checked_prefix,
    missing,
    name_of,
    open_source,
    open_target,
    reason,
    write_all,
)
from holdfast.wire.messages import FileEntry

_EARLY = 32 << 20
"""How much a copy hands to the disk at a time."""

_MANY = 1000
"""How many folders a store remembers; it forgets them all before it remembers more."""

_TEMPORARY = ".tmp-holdfast-"
_GONE = (FileNotFoundError, NotADirectoryError)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FileStore(Store):
    """Bytes in files below ``root``, which is made by the first write."""

    appends = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)
        self._made: set[str] = set()
        self._anchored: set[str] = set()
        self._remote: dict[str, bool] = {}

    def child(self, name: str) -> FileStore:
        return FileStore(self.root / checked_key(name))

    def read(self, key: str) -> bytes:
        with self._told(key, "read"), open(self._path(key), "rb") as file:
            return file.read()

    def head(self, key: str, length: int) -> bytes:
        with self._told(key, "read"), open(self._path(key), "rb", buffering=0) as file:
            return file.read(length)

    def size(self, key: str) -> int:
        with self._told(key, "read"):
            found = os.stat(self._path(key))
        if not stat.S_ISREG(found.st_mode):
            raise missing(self.uri, key)
        return found.st_size

    def exists(self, key: str) -> bool:
        """Asks the server where there is one: an NFS client remembers for half a minute what was *not* there."""
        path = self._path(key)
        folder = os.path.dirname(path)
        if self._is_remote(folder):
            with suppress(OSError):
                os.utime(folder)
        try:
            self.size(key)
        except MissingError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._told(key, "write"), self._temporary(path) as (descriptor, temporary):
            write_all(descriptor, data)
            os.fdatasync(descriptor)
            os.rename(temporary, path)
            self._anchor(os.path.dirname(path))

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._told(key, "write"), self._temporary(path) as (descriptor, temporary):
            write_all(descriptor, data)
            os.fdatasync(descriptor)
            made = self._link(temporary, path, key)
            os.unlink(temporary)
            self._anchor(os.path.dirname(path))
            return made

    def keys(self, prefix: str) -> list[str]:
        top = self._folder(prefix)
        found: list[str] = []
        with self._told(prefix, "list"):
            for folder, _, names in os.walk(top, onerror=_raise_unless_gone):
                below = os.path.relpath(folder, self.root)
                start = "" if below == "." else below + "/"
                found.extend(start + name for name in names if not name.startswith(_TEMPORARY))
        return sorted(found)

    def folders(self, prefix: str) -> list[str]:
        try:
            with self._told(prefix, "list"), os.scandir(self._folder(prefix)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except MissingError:
            return []

    def delete(self, key: str) -> None:
        with suppress(MissingError), self._told(key, "delete"):
            os.unlink(self._path(key))

    def delete_tree(self, prefix: str) -> None:
        top = self._folder(prefix)
        with suppress(MissingError), self._told(prefix, "delete"):
            for folder, _, names in os.walk(top, onerror=_raise_unless_gone):
                if MANIFEST in names:
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, MANIFEST))
                    _sync_directory(folder)
            _remove(top)
        for known in (self._made, self._anchored):
            known.difference_update([path for path in known if path == top or path.startswith(top + "/")])

    def put_file(self, source: Path, key: str) -> FileEntry:
        path = self._path(key)
        with open_source(source) as (reading, found):
            mode = 0o777 if found.st_mode & 0o111 else 0o666
            with self._told(key, "write"), self._temporary(path, mode) as (descriptor, temporary):
                size, digest = _copy(reading, _Eager(descriptor), found.st_size, source)
                os.fdatasync(descriptor)
                os.rename(temporary, path)
        return FileEntry(name_of(key), size, digest)

    def fetch_file(self, key: str, target: Path) -> FileEntry:
        with self._told(key, "read"), open(self._path(key), "rb", buffering=0) as reading:
            found = os.fstat(reading.fileno())
            with open_target(target, executable=bool(found.st_mode & 0o111)) as write:
                size, digest = _copy(reading.fileno(), write, found.st_size, None)
        return FileEntry(name_of(key), size, digest)

    def settle(self, prefix: str) -> None:
        top = self._folder(prefix)
        with self._told(prefix, "write"):
            for folder, _, _ in os.walk(top):
                _sync_directory(folder)
            if os.path.isdir(top):
                self._anchor_above(top)

    def checksum(self, key: str) -> FileEntry:
        digest = xxhash.xxh3_64()
        size = 0
        with self._told(key, "read"), open(self._path(key), "rb", buffering=0) as file:
            buffer = memoryview(bytearray(BUFFER))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
        return FileEntry(name_of(key), size, digest.hexdigest())

    def flush(self, key: str) -> None:
        with self._told(key, "write"), open(self._path(key), "rb", buffering=0) as file:
            os.fsync(file.fileno())

    def check_writable(self) -> None:
        """As the contract says, without the cost of making it durable."""
        with self._told(_TEMPORARY, "write"), self._temporary(f"{self.uri}/probe") as (descriptor, temporary):
            write_all(descriptor, b"probe")
            os.unlink(temporary)

    def appender(self, key: str) -> FileAppender:
        path = self._path(key)
        with self._told(key, "write"):
            descriptor = self._open_new(path, os.O_APPEND, 0o666)
            try:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._anchor(os.path.dirname(path))
            except BaseException:
                os.close(descriptor)
                raise
        return FileAppender(self, key, descriptor)

    def is_held(self, key: str) -> bool | None:
        """Asks for a shared lock on the file, which the holder's exclusive one refuses."""
        with self._told(key, "read"), open(self._path(key), "rb", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return None
                raise
            return False

    def local_path(self, key: str) -> Path:
        return Path(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self.uri}/{checked_key(key)}"

    def _folder(self, prefix: str) -> str:
        return f"{self.uri}/{checked_prefix(prefix)}" if prefix else self.uri

    @contextmanager
    def _temporary(self, path: str, mode: int = 0o666) -> Iterator[tuple[int, str]]:
        """A new file beside ``path``, which is gone afterwards unless it was renamed."""
        temporary = f"{os.path.dirname(path)}/{_TEMPORARY}{secrets.token_hex(8)}"
        descriptor = self._open_new(temporary, 0, mode)
        try:
            yield descriptor, temporary
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def _open_new(self, path: str, flags: int, mode: int) -> int:
        folder = os.path.dirname(path)
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if folder in self._made:
            try:
                return os.open(path, flags, mode)
            except FileNotFoundError:
                self._made.clear()
                self._anchored.clear()
        self._make(folder)
        return os.open(path, flags, mode)

    def _make(self, folder: str) -> None:
        """Make a folder and what is missing above it, remembering which, so that ``_anchor`` makes them durable."""
        try:
            _mkdir(folder)
        except FileNotFoundError:
            self._make(os.path.dirname(folder))
            _mkdir(folder)
        if len(self._made) >= _MANY:
            self._made.clear()
            self._anchored.clear()
        self._made.add(folder)

    def _is_remote(self, folder: str) -> bool:
        if folder not in self._remote:
            if len(self._remote) >= _MANY:
                self._remote.clear()
            try:
                self._remote[folder] = _file_system(folder).startswith("nfs")
            except OSError:
                return False
        return self._remote[folder]

    def _link(self, temporary: str, path: str, key: str) -> bool:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # A server whose answer was lost links twice, and the second time fails; the link count tells.
            return os.stat(temporary).st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StorageError(
                f"cannot create {key!r}: the file system that holds {self.uri} makes no hard links, without which two "
                "drivers cannot be kept apart; use a folder on another file system, or the bucket's own URI"
            ) from error
        return True

    def _anchor(self, folder: str) -> None:
        """Make the entries of ``folder``, and the way down to it, durable."""
        _sync_directory(folder)
        self._anchor_above(folder)

    def _anchor_above(self, folder: str) -> None:
        """Make the entry of ``folder`` durable, and those of the folders above it, once for each."""
        root = self.uri
        while folder not in self._anchored:
            parent = os.path.dirname(folder)
            _sync_directory(parent)
            self._anchored.add(folder)
            if parent == folder or (len(folder) <= len(root) and parent not in self._made):
                return
            folder = parent

    @contextmanager
    def _told(self, key: str, doing: str) -> Iterator[None]:
        """Turn the system's errors into ours, which name the key."""
        try:
            yield
        except OSError as error:
            if doing != "write" and isinstance(error, (*_GONE, IsADirectoryError)):
                raise missing(self.uri, key) from error
            raise StorageError(f"cannot {doing} {key!r}: {reason(error, self.uri)}") from error


class FileAppender:
    """A journal file, open and locked for as long as its driver lives."""

    def __init__(self, store: FileStore, key: str, descriptor: int) -> None:
        self._store = store
        self._key = key
        self._descriptor = descriptor
        self._length = 0

    def append(self, data: bytes) -> None:
        with self._store._told(self._key, "write"):
            try:
                write_all(self._descriptor, data)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._length)
                raise
        self._length += len(data)

    def sync(self) -> None:
        with self._store._told(self._key, "write"):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def _mkdir(folder: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(folder)


class _Eager:
    """Writes to a descriptor, and has the disk begin while the copy goes on, instead of all at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = self._handed = 0

    def __call__(self, data: memoryview) -> None:
        write_all(self._descriptor, data)
        self._size += len(data)
        if self._size - self._handed >= _EARLY:
            # What is not written yet cannot be dropped: its writing is begun.
            os.posix_fadvise(self._descriptor, self._handed, self._size - self._handed, os.POSIX_FADV_DONTNEED)
            self._handed = self._size


def _copy(reading: int, write: Callable[[memoryview], None], expected: int, source: Path | None) -> tuple[int, str]:
    """Copy all bytes and tell how many and their checksum; errors of ``source`` are told apart from the store's."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(BUFFER, expected + 1)))
    size = 0
    while True:
        try:
            count = os.readv(reading, [buffer])
        except OSError as error:
            if source is None:
                raise
            raise SourceError(f"cannot read {source}: {error.strerror}") from error
        if count == 0:
            return size, digest.hexdigest()
        digest.update(buffer[:count])
        write(buffer[:count])
        size += count


def _sync_directory(folder: str) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _file_system(folder: str) -> str:
    """The type of the file system that holds ``folder``, as mountinfo names it; empty when it is not told."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            place, _, rest = line.partition(" - ")
            if place.split()[2] == wanted:
                return rest.split()[0]
    return ""


def _remove(top: str) -> None:
    """Remove a folder and all in it, though others may be removing it too."""
    for folder, folders, names in os.walk(top, topdown=False, onerror=_raise_unless_gone):
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        for name in folders:
            place = os.path.join(folder, name)
            if os.path.islink(place):
                os.unlink(place)
        with suppress(FileNotFoundError):
            os.rmdir(folder)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, _GONE):
        raise error
