"""What the workers of a run printed, read back: one rank or all, one attempt or the newest, once or as it comes.

Reads log files and folders alone, so that following a run costs the same however long its journal is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from holdfast.errors import MissingError
from holdfast.storage.store import Store

LOOK_S = 0.2
_BLOCK = 1 << 16
_ATTEMPT = re.compile(r"attempt_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.log")


class Line(NamedTuple):
    """One line of a worker's log, without its end."""

    attempt: int
    rank: int
    text: str


def attempts_logged(store: Store) -> list[int]:
    """The attempts that left logs, in order."""
    found = (_ATTEMPT.fullmatch(name) for name in store.folders("logs"))
    return sorted(int(match[1]) for match in found if match)


def ranks_logged(store: Store, attempt: int) -> list[int]:
    found = (_RANK.fullmatch(key.rpartition("/")[2]) for key in store.keys(f"logs/attempt_{attempt}"))
    return sorted(int(match[1]) for match in found if match)


class LogFile:
    """One worker's log, read on from where the last look ended."""

    def __init__(self, store: Store, attempt: int, rank: int) -> None:
        self.attempt, self.rank = attempt, rank
        self._store = store
        self._key = f"logs/attempt_{attempt}/rank_{rank}.log"
        self._position = 0
        self._rest = b""

    def skip_to_last(self, lines: int) -> None:
        """Have the next look begin this many lines before the end."""
        start = end = self._size()
        tail = b""
        while start > 0 and (not lines or tail.rstrip(b"\n").count(b"\n") < lines):
            start = max(start - _BLOCK, 0)
            tail = self._read(start, end)
            if not lines:
                break
        kept = tail.splitlines(keepends=True)[-lines:] if lines else []
        self._position = end - sum(map(len, kept))

    def lines(self, *, last: bool) -> Iterator[Line]:
        """What was printed since the last look; with ``last``, an unfinished line too."""
        while block := self._read(self._position, self._position + _BLOCK):
            self._position += len(block)
            *whole, self._rest = (self._rest + block).split(b"\n")
            yield from map(self._line, whole)
        if last and self._rest:
            rest, self._rest = self._rest, b""
            yield self._line(rest)

    def _line(self, data: bytes) -> Line:
        return Line(self.attempt, self.rank, data.decode(errors="replace").rstrip("\r"))

    def _size(self) -> int:
        try:
            return self._store.size(self._key)
        except MissingError:
            return 0

    def _read(self, start: int, end: int) -> bytes:
        path = self._store.local_path(self._key)
        try:
            if path is None:
                return self._store.read(self._key)[start:end]
            with path.open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except (MissingError, FileNotFoundError):
            return b""


def read_logs(store: Store, attempt: int, rank: int | None, last_lines: int | None) -> Iterator[Line]:
    """What an attempt's worker printed, or all of them, one rank after the other."""
    for file in _files(store, attempt, rank, set()):
        if last_lines is not None:
            file.skip_to_last(last_lines)
        yield from file.lines(last=True)


def follow_logs(
    store: Store,
    rank: int | None,
    *,
    attempt: int | None,
    last_lines: int | None,
    over: Callable[[], bool],
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Line]:
    """What is printed, as it comes: from the newest attempt on, or of ``attempt`` alone, until ``over`` says so."""
    files: list[LogFile] = []
    known: set[tuple[int, int]] = set()
    first = attempt if attempt is not None else max(attempts_logged(store), default=1)
    while True:
        ended = over()  # before the look, so that nothing is printed after it
        ended = ended or (attempt is not None and max(attempts_logged(store), default=0) > attempt)
        for number in [attempt] if attempt is not None else [n for n in attempts_logged(store) if n >= first]:
            for file in _files(store, number, rank, known):
                if last_lines is not None and number == first:
                    file.skip_to_last(last_lines)
                files.append(file)
        newest = max((file.attempt for file in files), default=0)
        for file in files:
            yield from file.lines(last=ended or file.attempt < newest)
        files = [file for file in files if file.attempt == newest]
        if ended:
            return
        wait(LOOK_S)


def _files(store: Store, attempt: int, rank: int | None, known: set[tuple[int, int]]) -> list[LogFile]:
    """The logs of an attempt that were not known before."""
    ranks = [number for number in ranks_logged(store, attempt) if rank in (None, number)]
    fresh = [number for number in ranks if (attempt, number) not in known]
    known.update((attempt, number) for number in fresh)
    return [LogFile(store, attempt, number) for number in fresh]
