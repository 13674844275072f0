"""The lines of a journal: numbered, checksummed, and still plain text that ``grep`` and ``jq`` can read.

::

    <checksum> TAB # TAB <opening>                        the first line of every file and segment
    <checksum> TAB <position> TAB <durable> TAB <record>  every other line

The checksum (xxh3, 16 hex digits) covers the rest of its line. ``durable`` is the position up to which everything was
safe when the line was written. It tells an unfinished tail from damage: after a power loss the last, never synced
writes may be there in part, a hole before a sound line included, and nobody was told that they were safe. But where a
sound line says that a broken one before it had been safe, something has destroyed it.

This module must never skip a broken line and go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec
import xxhash

from holdfast.errors import JournalError


class Opening(msgspec.Struct, frozen=True):
    """What stands at the top of a file or segment."""

    epoch: int
    after: int
    """The position of the last record before this file."""
    previous: int
    """The epoch that the records up to ``after`` were read from: the own one, the predecessor, or 0 for none."""
    token: str
    """Drawn by the driver that wrote it, so that it knows its own."""
    version: int = 1


class _Line(NamedTuple):
    position: int
    durable: int
    record: bytes


_openings = msgspec.json.Decoder(Opening)


def opening_line(opening: Opening) -> bytes:
    return _checked(b"#\t" + msgspec.json.encode(opening))


def record_lines(first: int, durable: int, records: Iterable[bytes]) -> bytes:
    """The lines of consecutive records, the first of which has the position ``first``."""
    digest = xxhash.xxh3_64_hexdigest
    lines = []
    for position, record in enumerate(records, first):
        rest = b"%d\t%d\t%b" % (position, durable, record)
        lines.append(b"%b\t%b\n" % (digest(rest).encode(), rest))
    return b"".join(lines)


def opening_of(data: bytes, name: str) -> Opening | None:
    """The opening of a file; None when its writer did not get so far. JournalError when it was there and is lost."""
    first, newline, _ = data.partition(b"\n")
    rest = _rest(first) if newline else None
    if rest is not None and rest.startswith(b"#\t"):
        try:
            return _openings.decode(rest[2:])
        except msgspec.DecodeError as error:
            raise JournalError(f"{name} was written by another version of Holdfast: {error}") from error
    if any(_parsed(line) is not None for line in data.split(b"\n")[1:-1]):
        raise JournalError(f"{name} is damaged: its first line is lost, and records follow it")
    return None


def records_in(data: bytes, name: str, after: int) -> Iterator[tuple[int, bytes]]:
    """The records of a file with their positions, up to its end or to an unfinished tail.

    JournalError when a record that was safe is broken.
    """
    expected = after + 1
    lines = iter(data.split(b"\n")[1:-1])
    for line in lines:
        found = _parsed(line)
        if found is None or found.position != expected:
            _confirm_tail(chain((line,), lines), name, expected)
            return
        yield expected, found.record
        expected += 1


def _confirm_tail(lines: Iterable[bytes], name: str, expected: int) -> None:
    for line in lines:
        found = _parsed(line)
        if found is not None and found.durable >= expected:
            raise JournalError(
                f"{name} is damaged at record {expected}, which was safe when record {found.position} was written"
            )


def _checked(rest: bytes) -> bytes:
    return b"%b\t%b\n" % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def _rest(line: bytes) -> bytes | None:
    """A line without its checksum; None when they do not agree."""
    if line[16:17] != b"\t":
        return None
    rest = line[17:]
    return rest if xxhash.xxh3_64_hexdigest(rest).encode() == line[:16] else None


def _parsed(line: bytes) -> _Line | None:
    rest = _rest(line)
    if rest is None or rest.startswith(b"#"):
        return None
    position, durable, record = rest.split(b"\t", 2)
    return _Line(int(position), int(durable), record)
