"""A checkpoint: a directory of files, in storage or on its way there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigurationError, DamagedError, MetricsError, StorageError
from holdfast.wire.messages import CheckpointRef
from holdfast.wire.metrics import decode_metrics, encode_metrics
from holdfast.worker import session

MANIFEST = ".manifest.json"
METADATA = ".metadata.json"
"""What the user notes about a checkpoint; outside of the manifest, for it may be changed at any time."""


class Checkpoint:
    """A directory of files that a report brings, or that a committed checkpoint gives back.

    ``path`` is where the files lie. Inside a worker, reading a committed checkpoint asks the node's agent, which has
    verified the files once for all workers of the node; elsewhere they are verified here.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: None = None) -> None:
        if filesystem is not None:
            raise ConfigurationError(
                f"Checkpoint(filesystem={filesystem!r:.80}): files can only be read by their path so far; leave "
                "filesystem out and give a path that this machine can see"
            )
        self.path = os.fspath(path)
        self.filesystem = None
        self._committed: CheckpointRef | None = None

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """A checkpoint of the files that lie in a local directory."""
        if not os.path.isdir(path):
            raise ConfigurationError(f"Checkpoint.from_directory({os.fspath(path)!r}): there is no such directory")
        return cls(os.path.abspath(path))

    @classmethod
    def _of_commit(cls, committed: CheckpointRef, storage_uri: str) -> Checkpoint:
        checkpoint = cls(f"{storage_uri.rstrip('/')}/{committed.directory}")
        checkpoint._committed = committed
        return checkpoint

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files as a local directory, which must not be changed. A local checkpoint is not copied."""
        yield str(self._local())

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to ``path``, or to a new temporary directory; where they are."""
        source = self._local()
        target = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="checkpoint_"))
        top = os.fspath(source)
        shutil.copytree(
            source, target, dirs_exist_ok=True, ignore=lambda folder, names: {MANIFEST} if folder == top else ()
        )
        return str(target)

    def get_metadata(self) -> dict[str, Any]:
        """What was noted about this checkpoint; empty where nothing was."""
        path = self._folder() / METADATA
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        try:
            found = decode_metrics(text)
        except msgspec.DecodeError as error:
            raise DamagedError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DamagedError(f"{path} holds no JSON object")
        return found

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Note this about the checkpoint, in place of what was noted before: what JSON can hold.

        It may be set on a directory before it is reported, and then travels with it, and on a committed checkpoint at
        any time. A reader sees the old notes or the new ones; of two writers, the last one wins.
        """
        if not isinstance(metadata, Mapping):
            raise MetricsError(f"a checkpoint's metadata must be a dict, not {metadata!r:.80}")
        try:
            text = encode_metrics(metadata)
        except MetricsError as error:
            raise MetricsError(f"a checkpoint's metadata must be what JSON can hold: {error}") from None
        _replace(self._folder() / METADATA, text)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Note this too; keys that were noted before get their new value."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def _folder(self) -> Path:
        """Where the files lie, not verified."""
        path = Path(self.path)
        if "://" in self.path or not path.is_dir():
            raise StorageError(
                f"checkpoint {self.path} is not there, or is no directory of this machine; only such have metadata"
            )
        return path

    def _local(self) -> Path:
        if self._committed is not None and session.in_worker():
            return session.current("Checkpoint.as_directory()").fetch(self._committed)
        return _verified(Path(self.path))

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


def _verified(path: Path) -> Path:
    """The directory itself, once its files match its manifest, if it has one."""
    from holdfast.storage.manifest import read_manifest, verify
    from holdfast.storage.store import open_store

    if not path.is_dir():
        raise DamagedError(f"checkpoint {path} is not there")
    store = open_store(str(path.parent))
    manifest = read_manifest(store, path.name)
    if manifest is not None:
        verify(store, path.name, manifest)
    return path


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or as it was. A worker does this too, so no store is asked."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
