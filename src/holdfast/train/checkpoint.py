"""A checkpoint: a directory of files, in storage or on its way there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigurationError, DamagedError
from holdfast.wire.messages import CheckpointRef
from holdfast.worker import session

MANIFEST = ".manifest.json"


class Checkpoint:
    """A directory of files that a report brings, or that a committed checkpoint gives back.

    ``path`` is where the files lie. Inside a worker, reading a committed checkpoint asks the node's agent, which has
    verified the files once for all workers of the node; elsewhere they are verified here.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
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
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        return str(target)

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
