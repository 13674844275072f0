"""The journal on a store that cannot append: numbered segments, each created if absent.

``journal/000000000042.seg`` is written once, whole. Every driver writes the number after the last one that it knows,
so when another driver has taken over, the number is taken, and the fenced one learns it before it acks anything. A
newcomer claims its epoch, folds every segment, and creates the next one with nothing but its opening in it; where the
predecessor got in first, it folds that one too and takes the next number. After the opening the predecessor's next
number is taken for good.

A store may create a segment and lose the answer; a second try then finds it there. The token in its first line tells
whether it is our own.

Where the store ignores create-if-absent nothing but the lease keeps two drivers apart. The epoch is checked before and
after each segment then, which leaves a gap for a driver that is stopped in between and displaced meanwhile.

A journal that began in files and was copied to a bucket goes on in segments: files are read first, then segments.
This module must never overwrite or delete a segment.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from holdfast import faultpoints
from holdfast.errors import JournalError, MissingError
from holdfast.journal.lines import Opening, opening_line, opening_of, record_lines, records_in
from holdfast.journal.log import Log, Replay, Snapshot
from holdfast.journal.parts import last_position, lineage, replay
from holdfast.journal.snapshots import Found, newest_snapshot, snapshot_keys
from holdfast.journal.writer import Writer
from holdfast.storage.store import Store

_KEY = re.compile(r"journal/(\d+)\.seg")


def segment_key(number: int) -> str:
    return f"journal/{number:012d}.seg"


def segment_numbers(keys: list[str]) -> list[int]:
    return sorted(int(match[1]) for key in keys if (match := _KEY.fullmatch(key)))


class ObjectLog(Writer):
    """The end of the journal that the driver of one epoch writes."""

    def __init__(self, store: Store, epoch: int, position: int, segment: int, snapshots: list[str], safe: bool) -> None:
        super().__init__(store, epoch, position, snapshots)
        self.protection = "fence" if safe else "lease"
        self._token = secrets.token_hex(8)
        self._number = segment
        self._ends: list[tuple[int, int]] = [(position, segment)]
        """Where each segment since the last snapshot ends: its last position and its number."""

    def take_up(self) -> None:
        """Create the opening segment, behind whatever the predecessor still got in.

        The epoch is confirmed after the segments were listed and before one is created: whoever was displaced while it
        opened the run would otherwise take the number that its successor writes next.
        """
        self.confirm()
        faultpoints.reach("journal.seal")
        while not self._create(self.durable, b""):
            opening, end = _read(self._store, self._number + 1)
            if opening is not None and opening.epoch > self.epoch:
                raise self._fenced()
            self._number += 1
            self.position = self.durable = max(self.durable, end)
        self._number += 1
        self._ends = [(self.durable, self._number)]

    def _write(self, first: int, records: list[bytes]) -> None:
        last = first + len(records) - 1
        lines = record_lines(first, self.durable, records)
        if self.protection == "lease":
            self._confirm()
        faultpoints.reach("journal.write")
        if not self._create(first - 1, lines):
            raise self._fenced()
        faultpoints.reach("journal.written")
        if self.protection == "lease":
            self._confirm()
        self._number += 1
        self._ends.append((last, self._number))

    def _create(self, after: int, lines: bytes) -> bool:
        """Whether the next segment is ours now."""
        opening = Opening(self.epoch, after=after, previous=self.epoch, token=self._token)
        key = segment_key(self._number + 1)
        data = opening_line(opening) + lines
        return self._store.create(key, data) or self._store.read(key) == data

    def _segment(self, position: int) -> int:
        at = bisect_right(self._ends, (position, float("inf"))) - 1
        return self._ends[at][1] if at >= 0 else 0

    def _kept(self, snapshot: Snapshot) -> None:
        at = bisect_right(self._ends, (snapshot.position, float("inf"))) - 1
        self._ends = self._ends[max(at, 0) :]


def open_object_log(store: Store, epoch: int, *, safe: bool) -> tuple[Log, Replay]:
    """Go on behind the last segment. The epoch is claimed already; ``safe`` when the store honours create-if-absent."""
    keys = store.keys("journal")
    found = newest_snapshot(store, keys)
    start = found.snapshot.position if found else 0
    position, last = _end(store, keys, found)
    log = ObjectLog(store, epoch, position, last, snapshot_keys(keys), safe)
    log.take_up()
    log.confirm()
    records = _replay(store, keys, start, found.segment if found else 0, log._number - 1)
    return log, Replay(found.snapshot if found else None, records)


def read_object_records(store: Store, keys: list[str]) -> Iterator[bytes]:
    return _replay(store, keys, 0, 0, max(segment_numbers(keys), default=0))


def _end(store: Store, keys: list[str], found: Found | None) -> tuple[int, int]:
    """The last position and the last segment, of what lies there and of the snapshot."""
    numbers = segment_numbers(keys)
    start, segment = (found.snapshot.position, found.segment) if found else (0, 0)
    for number in reversed(numbers):
        if number <= segment:
            break
        opening, end = _read(store, number)
        if opening is not None:
            return max(start, end), numbers[-1]
    if not segment:
        start = max(start, last_position(store, lineage(store, keys)))
    return start, max([segment, *numbers])


def _replay(store: Store, keys: list[str], start: int, segment: int, last: int) -> Iterator[bytes]:
    """The records after ``start``, which no segment up to ``segment`` holds, through the segment ``last``."""
    position = start
    if segment == 0:
        spans = lineage(store, keys)
        first = _read(store, 1)[0] if spans and last else None
        if first is not None:
            spans[-1] = spans[-1]._replace(through=first.after)
        for record in replay(store, spans, start):
            position += 1
            yield record
    for number, data in _segments(store, range(segment + 1, last + 1)):
        opening, records = _open(store, number, data)
        if opening is not None and opening.after > position:
            raise JournalError(
                f"the journal in {store.uri} is damaged: records {position + 1} to {opening.after} are missing "
                f"before {segment_key(number)!r}"
            )
        for found, record in records:
            if found > position:
                position = found
                yield record


def _segments(store: Store, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    wanted = list(numbers)
    try:
        yield from zip(wanted, store.read_many([segment_key(number) for number in wanted]), strict=True)
    except MissingError as error:
        raise JournalError(f"a segment of the journal is missing: {error}") from error


def _open(store: Store, number: int, data: bytes) -> tuple[Opening | None, Iterator[tuple[int, bytes]]]:
    """A segment. One that was cut within its first line has no opening and tells nothing."""
    name = f"the journal segment {segment_key(number)!r} in {store.uri}"
    opening = opening_of(data, name)
    return opening, records_in(data, name, opening.after) if opening else iter(())


def _read(store: Store, number: int) -> tuple[Opening | None, int]:
    """The opening of a segment, and the position of its last record."""
    opening, records = _open(store, number, store.read(segment_key(number)))
    return opening, max((position for position, _ in records), default=opening.after if opening else 0)
