"""What the journals on files and on buckets have in common: the buffer, the lease, the snapshots, and failing for good.

This module must never let a call succeed after one that may have lost a record.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from holdfast.errors import FencedError, HoldfastError, JournalError, StorageError
from holdfast.journal.epochs import closed_key, lease_key, record_key
from holdfast.journal.log import Log, Snapshot
from holdfast.journal.snapshots import write_snapshot
from holdfast.storage.store import Store

_SNAPSHOTS_KEPT = 2


class Writer(Log):
    """A driver's end of a journal, without the way in which records reach the store."""

    def __init__(self, store: Store, epoch: int, position: int, snapshots: list[str]) -> None:
        self.epoch = epoch
        self.position = position
        self.durable = position
        self._store = store
        self._snapshots = snapshots
        self._records: list[bytes] = []
        self._lock = threading.Lock()
        self._renewals = 0
        self._failure: JournalError | None = None
        self._closed = False

    @abstractmethod
    def _write(self, first: int, records: list[bytes]) -> None:
        """Make these records durable, then raise FencedError if another driver has taken over."""

    @abstractmethod
    def _kept(self, snapshot: Snapshot) -> None:
        """A snapshot was kept."""

    def _segment(self, position: int) -> int:
        """The last segment whose records all lie at or before ``position``; files have none."""
        return 0

    def append(self, record: bytes) -> int:
        if b"\n" in record:
            raise ValueError("a record is one line of JSON")
        with self._lock:
            self._records.append(record)
            self.position += 1
            return self.position

    def sync(self) -> int:
        with self._lock:
            records, self._records = self._records, []
            last = self.position
        with self._for_good():
            if records:
                self._write(last - len(records) + 1, records)
            else:
                self._confirm()
        self.durable = last
        return last

    def confirm(self) -> None:
        with self._told():
            self._confirm()

    def renew(self) -> None:
        with self._told():
            self._confirm()
            self._renewals += 1
            self._store.put(lease_key(self.epoch), b"%d" % self._renewals)

    def snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.position > self.durable:
            raise ValueError(f"position {snapshot.position} is not durable yet; sync first")
        with self._told():
            self._confirm()
            key = write_snapshot(self._store, snapshot, self._segment(snapshot.position))
            if key not in self._snapshots:
                self._snapshots.append(key)
            while len(self._snapshots) > _SNAPSHOTS_KEPT:
                self._store.delete(self._snapshots[0])
                del self._snapshots[0]
        with self._for_good():
            self._kept(snapshot)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not isinstance(self._failure, FencedError):
            with suppress(HoldfastError):
                self._store.put(closed_key(self.epoch), msgspec.json.encode({"position": self.durable}))
        self._failure = JournalError(f"the journal in {self._store.uri} was closed")

    def _confirm(self) -> None:
        if self._store.exists(record_key(self.epoch + 1)):
            raise self._fenced()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"another driver has taken over the run in {self._store.uri} (epoch {self.epoch + 1} or later); "
            "this one has stopped, and nothing that it had not confirmed is part of the run"
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Name what fails; being fenced is for good, a store that refuses may recover."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        try:
            yield
        except FencedError as error:
            self._failure = error
            raise
        except StorageError as error:
            raise JournalError(f"cannot keep the journal: {error}") from error

    @contextmanager
    def _for_good(self) -> Iterator[None]:
        """After any failure the file's end is unknown: what follows must not be written behind it."""
        try:
            with self._told():
                yield
        except JournalError as error:
            self._failure = self._failure or error
            raise
