"""What the journal says, read from the bytes that would survive a power loss, by code that is not the journal's own.

It must never ask the code under test what lies there.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import xxhash

from holdfast.journal import facts as f
from holdfast.testing.simulation.stores import MemoryStore

_FILE = re.compile(r"journal/(\d+)-(\d+)\.log")
_SEGMENT = re.compile(r"journal/(\d+)\.seg")


class _Part:
    """One file or segment, parsed as far as it was durable."""

    def __init__(self) -> None:
        self.length = 0
        self.epoch = self.after = self.previous = -1
        self.records: list[tuple[int, f.RunFact]] = []
        self.broken = False

    def grow(self, data: bytes) -> None:
        if len(data) == self.length or self.broken:
            return
        end = data.rfind(b"\n") + 1
        for line in data[self.length : end].split(b"\n")[:-1]:
            self._take(line)
        self.length = max(end, self.length)

    def _take(self, line: bytes) -> None:
        rest = line[17:]
        if self.broken or line[:16] != xxhash.xxh3_64_hexdigest(rest).encode():
            self.broken = True
            return
        if rest.startswith(b"#\t"):
            opening = json.loads(rest[2:])
            self.epoch, self.after, self.previous = opening["epoch"], opening["after"], opening["previous"]
            return
        position, _, record = rest.split(b"\t", 2)
        self.records.append((int(position), f.decode(record)))


class History(NamedTuple):
    """The facts that count, in order, and what they come to."""

    facts: tuple[f.RunFact, ...]
    epoch: int
    """The newest epoch that has sealed the one before."""
    committed: dict[int, f.CheckpointCommitted]
    places: dict[int, int]
    """Each commit's place in ``facts``."""
    retired: frozenset[int]
    damaged: dict[int, int]
    """The place of the fact that rules a checkpoint out, until a launch after a failure looks at it again."""
    started: dict[int, tuple[int, f.AttemptStarted]]
    """Each attempt's place in ``facts``, and its start."""


class Reader:
    """Reads a store's journal again when it has changed."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._parts: dict[str, _Part] = {}
        self._known: History | None = None

    def changed(self) -> None:
        self._known = None

    def history(self) -> History:
        if self._known is None:
            self._known = self._read()
        return self._known

    def _read(self) -> History:
        files: dict[int, list[_Part]] = {}
        segments: list[_Part] = []
        for key in sorted(self._store.names()):
            file, segment = _FILE.fullmatch(key), _SEGMENT.fullmatch(key)
            if file is None and segment is None:
                continue
            part = self._parts.setdefault(key, _Part())
            part.grow(self._store.durable(key) or b"")
            if part.epoch < 0:
                continue
            if file is not None:
                files.setdefault(part.epoch, []).append(part)
            else:
                segments.append(part)
        if segments:
            return _history(_of_segments(segments), max(part.epoch for part in segments))
        return _history(_of_files(files), max(files, default=0))


def _of_segments(segments: list[_Part]) -> list[f.RunFact]:
    facts: list[f.RunFact] = []
    for part in segments:
        facts.extend(fact for position, fact in part.records if position > len(facts))
    return facts


def _of_files(files: dict[int, list[_Part]]) -> list[f.RunFact]:
    epoch, through = max(files, default=0), float("inf")
    found: dict[int, f.RunFact] = {}
    while epoch in files:
        for part in files[epoch]:
            found.update((position, fact) for position, fact in part.records if position <= through)
        through, epoch = files[epoch][0].after, files[epoch][0].previous
    if list(found) != sorted(found):
        found = dict(sorted(found.items()))
    if found and max(found) != len(found):
        raise AssertionError(f"the durable journal has holes: {sorted(found)}")
    return list(found.values())


def _history(facts: list[f.RunFact], epoch: int) -> History:
    committed: dict[int, f.CheckpointCommitted] = {}
    places: dict[int, int] = {}
    retired: set[int] = set()
    damaged: dict[int, int] = {}
    started: dict[int, tuple[int, f.AttemptStarted]] = {}
    for place, fact in enumerate(facts):
        if isinstance(fact, f.CheckpointCommitted):
            committed[fact.index] = fact
            places[fact.index] = place
        elif isinstance(fact, f.CheckpointsRetired):
            retired.update(fact.indices)
        elif isinstance(fact, f.CheckpointDamaged):
            damaged[fact.index] = place
        elif isinstance(fact, f.RunOpened) and fact.fresh_budget:
            damaged.clear()
        elif isinstance(fact, f.AttemptStarted):
            started.setdefault(fact.attempt, (place, fact))
    return History(tuple(facts), epoch, committed, places, frozenset(retired), damaged, started)
