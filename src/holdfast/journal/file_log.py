"""The journal on a file system: one writer per file, ``fdatasync``, and a check that nobody has taken over.

The order of ``sync`` is write, fdatasync, then look for a newer epoch, and it is what makes fencing right. A newcomer
first creates its epoch's record and only then reads the predecessor's files. So when the look finds no newer epoch, the
records were in the file before any newcomer began to read, and every newcomer folds them. When it finds one, the
newcomer may have read before the records came; nobody is told that they are safe, and the newcomer's seal says whether
they count. Looking first and writing afterwards would leave a gap in which a stopped driver sleeps, is displaced, wakes
up, writes, and believes itself.

A newcomer flushes the file that it seals before it seals it: a record that its predecessor had written but not synced
would otherwise be part of the history, and then be lost with the power.

This module must never write to a file of another epoch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from holdfast import faultpoints
from holdfast.errors import JournalError
from holdfast.journal.lines import Opening, opening_line, record_lines
from holdfast.journal.log import Log, Replay, Snapshot
from holdfast.journal.parts import last_position, lineage, part_key, replay
from holdfast.journal.snapshots import newest_snapshot, snapshot_keys
from holdfast.journal.writer import Writer
from holdfast.storage.store import Appender, Store

PART_BYTES = 64 << 20
"""A new file is begun at this size, so that a reader never holds more than that in memory."""


class FileLog(Writer):
    """The end of the journal that the driver of one epoch writes."""

    def __init__(self, store: Store, epoch: int, previous: int, position: int, snapshots: list[str]) -> None:
        super().__init__(store, epoch, position, snapshots)
        self._token = secrets.token_hex(8)
        self._length = 0
        self._written = position
        self._first = self._begin(previous)
        """Kept open, and so locked, until the run is let go."""
        self._current = self._first

    def close(self) -> None:
        super().close()
        self._current.close()
        self._first.close()

    def _write(self, first: int, records: list[bytes]) -> None:
        lines = record_lines(first, self.durable, records)
        faultpoints.reach("journal.write")
        self._current.append(lines)
        self._current.sync()
        faultpoints.reach("journal.written")
        self._confirm()
        self._written = first + len(records) - 1
        self._length += len(lines)
        if self._length >= PART_BYTES:
            self._rotate()

    def _kept(self, snapshot: Snapshot) -> None:
        self._rotate()

    def _rotate(self) -> None:
        if self._length == 0:
            return
        before, self._current = self._current, self._begin(self.epoch)
        if before is not self._first:
            before.close()

    def _begin(self, previous: int) -> Appender:
        """A new file behind what was written. Its first line is durable before any record follows."""
        appender = self._store.appender(part_key(self.epoch, self._written))
        if appender is None:
            raise JournalError(f"{self._store.uri} holds no files that can be appended to")
        opening = Opening(self.epoch, after=self._written, previous=previous, token=self._token)
        try:
            appender.append(opening_line(opening))
            appender.sync()
        except BaseException:
            appender.close()
            raise
        self._length = 0
        return appender


def open_file_log(store: Store, epoch: int) -> tuple[Log, Replay]:
    """Seal what earlier epochs wrote and go on behind it. The epoch is claimed already."""
    keys = store.keys("journal")
    found = newest_snapshot(store, keys)
    snapshot = found.snapshot if found else None
    start = snapshot.position if snapshot else 0
    spans = lineage(store, keys)
    position = last_position(store, spans)
    previous = 0
    if spans:
        newest = spans[-1].part
        store.flush(newest.key)
        spans[-1] = spans[-1]._replace(through=position)
        previous = newest.epoch
    faultpoints.reach("journal.seal")
    log = FileLog(store, epoch, previous, max(position, start), snapshot_keys(keys))
    try:
        log.confirm()
    except BaseException:
        log.close()
        raise
    return log, Replay(snapshot, replay(store, spans, start))


def read_file_records(store: Store, keys: list[str]) -> Iterator[bytes]:
    return replay(store, lineage(store, keys), 0)
