"""Reading a journal that lies in files: which of them tell the run's history, and what they say.

``journal/000003-000000001234.log`` holds records of epoch 3 after position 1234. A driver writes only files of its own
epoch, and begins a new one after each snapshot. The first line of an epoch's first file names the epoch before and the
position up to which that was folded: its seal. So history is a chain, walked from the newest epoch back. What a fenced
driver appends behind its seal is not in it, nor is an epoch that a later driver did not see when it sealed.

Reading needs no epoch and no lock, and is right while a driver writes: it ends at the last whole record. This module
must never write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.errors import JournalError
from holdfast.journal.lines import Opening, opening_of, records_in
from holdfast.storage.store import Store

_KEY = re.compile(r"journal/(\d+)-(\d+)\.log")
_HEAD = 4096


class Part(NamedTuple):
    """One file, by its name."""

    epoch: int
    after: int
    key: str


class Span(NamedTuple):
    """The records of one file that belong to the history: those after ``after``, up to ``through``."""

    part: Part
    through: int | None
    """None for the newest file: up to its last whole record."""


def part_key(epoch: int, after: int) -> str:
    return f"journal/{epoch:06d}-{after:012d}.log"


def lineage(store: Store, keys: list[str]) -> list[Span]:
    """The files that tell the history, the oldest first. A gap between them shows when they are read."""
    epochs = _by_epoch(keys)
    epoch = _newest_opened(store, epochs)
    through: int | None = None
    spans: list[Span] = []
    while epoch:
        parts = epochs.get(epoch, [])
        opening = _opening(store, parts[0]) if parts else None
        if opening is None:
            break
        if through is None:
            while _opening(store, parts[-1]) is None:
                parts.pop()
        told = [part for part in parts if through is None or part.after < through]
        bounds: list[int | None] = [part.after for part in told[1:]]
        spans[:0] = [Span(part, bound) for part, bound in zip(told, [*bounds, through], strict=False)]
        if opening.previous >= epoch:
            break
        epoch, through = opening.previous, opening.after
    return spans


def last_position(store: Store, spans: list[Span]) -> int:
    """The position of the last whole record; 0 for none."""
    if not spans:
        return 0
    part = spans[-1].part
    records = records_in(store.read(part.key), _name(store, part), part.after)
    return max((position for position, _ in records), default=part.after)


def replay(store: Store, spans: list[Span], start: int) -> Iterator[bytes]:
    """The records after ``start``. Files that lie wholly before it are not read."""
    position = start
    for part, through in spans:
        if through is not None and through <= start:
            continue
        if part.after > position:
            raise JournalError(f"records {position + 1} to {part.after} are missing from the journal in {store.uri}")
        data = store.read(part.key)
        name = _name(store, part)
        if opening_of(data, name) is None:
            raise JournalError(f"{name} is damaged: its first line is lost")
        for found, record in records_in(data, name, part.after):
            if found > position:
                position = found
                yield record
            if position == through:
                break
        if through is not None and position < through:
            raise JournalError(f"{name} is damaged: records {position + 1} to {through} are missing")


def _by_epoch(keys: list[str]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for key in sorted(keys):
        if match := _KEY.fullmatch(key):
            part = Part(int(match[1]), int(match[2]), key)
            found.setdefault(part.epoch, []).append(part)
    return found


def _newest_opened(store: Store, epochs: dict[int, list[Part]]) -> int:
    """The newest epoch whose driver got as far as sealing the one before; 0 for none."""
    for epoch in sorted(epochs, reverse=True):
        if _opening(store, epochs[epoch][0]) is not None:
            return epoch
    return 0


def _opening(store: Store, part: Part) -> Opening | None:
    name = _name(store, part)
    opening = opening_of(store.head(part.key, _HEAD), name) or opening_of(store.read(part.key), name)
    if opening is not None and (opening.epoch, opening.after) != (part.epoch, part.after):
        raise JournalError(f"{name} is damaged: it was written as {part_key(opening.epoch, opening.after)}")
    return opening


def _name(store: Store, part: Part) -> str:
    return f"the journal file {part.key!r} in {store.uri}"
