"""A run as people look back on it: its attempts, its checkpoints, and which of its rows still count.

Folded from facts alone, so that the console, a result and a later process tell the same story.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from holdfast.journal import facts as f
from holdfast.wire.metrics import decode_metrics


class Attempt(msgspec.Struct):
    """One life of the group."""

    number: int
    world_size: int
    resume: int | None
    started_at: float
    running_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    charge: str = ""
    failures: tuple[f.RankFailure, ...] = ()
    calls: tuple[int, ...] = ()


class Commit(msgspec.Struct):
    """A checkpoint that was committed, whatever became of it."""

    index: int
    directory: str
    attempt: int
    call: int
    at: float
    size: int
    metrics: msgspec.Raw
    damaged: bool = False
    retired: bool = False


class Span(msgspec.Struct, frozen=True):
    """The part of an attempt whose work was kept: calls up to ``last_call`` (None: all), time up to ``until``."""

    last_call: int | None
    until: float | None


class History:
    """Everything that the facts say, short of the metrics themselves.

    A ``forgetful`` one, for a driver that may commit for months, lets go of checkpoints that were retired, unless an
    attempt began from them or they were the last of their attempt.
    """

    def __init__(self) -> None:
        self.forgetful = False
        self.seen = 0
        """How many facts went into it."""
        self.opened: list[f.RunOpened] = []
        self.attempts: dict[int, Attempt] = {}
        self.commits: dict[int, Commit] = {}
        self.charged: dict[str, int] = {}
        """What each budget has paid for since it was last fresh."""
        self.status = ""
        self.reason = ""
        self.return_value: msgspec.Raw = f.NOTHING
        self.last_rows: dict[int, f.RowsReported] = {}
        """Rank 0's last rows of each attempt."""
        self.last_at = 0.0
        self.gaps: list[tuple[float, float]] = []
        """Times without a driver."""

    def apply(self, fact: object) -> None:
        """Take in one fact."""
        if not isinstance(fact, f.Fact):
            return
        self.seen += 1
        if isinstance(fact, f.RunOpened):
            if self.opened:
                self.gaps.append((self.last_at, fact.at))
            self.opened.append(fact)
            if fact.fresh_budget:
                self._start_afresh()
            self.status = self.reason = ""
        self.last_at = max(self.last_at, fact.at)
        if isinstance(fact, f.RowsReported):
            if fact.rank == 0:
                self.last_rows[fact.attempt] = fact
        elif isinstance(fact, f.AttemptStarted):
            self.attempts[fact.attempt] = Attempt(fact.attempt, fact.world_size, fact.resume, fact.at)
        elif isinstance(fact, f.AttemptRunning):
            self.attempts[fact.attempt].running_at = fact.at
        elif isinstance(fact, f.AttemptEnded):
            self._end(self.attempts[fact.attempt], fact)
        elif isinstance(fact, f.CheckpointCommitted):
            self.commits[fact.index] = Commit(
                fact.index, fact.directory, fact.attempt, fact.call, fact.at, fact.size, fact.metrics
            )
        elif isinstance(fact, f.CheckpointDamaged):
            self.commits[fact.index].damaged = True
        elif isinstance(fact, f.CheckpointsRetired):
            self._retire(fact.indices)
        elif isinstance(fact, f.RunEnded):
            self.status, self.reason, self.return_value = fact.status, fact.reason, fact.return_value

    def _retire(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self.commits[index].retired = True
        if not self.forgetful:
            return
        needed = {attempt.resume for attempt in self.attempts.values()}
        needed |= {commit.index for commit in {commit.attempt: commit for commit in self.commits.values()}.values()}
        for index in [index for index, commit in self.commits.items() if commit.retired and index not in needed]:
            del self.commits[index]

    def _start_afresh(self) -> None:
        self.charged = {}
        if self.newest is None:  # every checkpoint is looked at again
            for commit in self.commits.values():
                commit.damaged = False

    def _end(self, attempt: Attempt, fact: f.AttemptEnded) -> None:
        lost_at = self.gaps[-1][0] if fact.outcome == "driver_lost" and self.gaps else fact.at
        attempt.ended_at, attempt.outcome, attempt.charge = lost_at, fact.outcome, fact.charge
        attempt.failures = fact.failures
        if fact.charge:
            self.charged[fact.charge] = self.charged.get(fact.charge, 0) + 1
        if fact.calls and fact.outcome != "driver_lost":
            attempt.calls = fact.calls

    @property
    def newest(self) -> Commit | None:
        """The checkpoint that a restart would use."""
        sound = [commit for commit in self.commits.values() if not commit.damaged and not commit.retired]
        return max(sound, key=lambda commit: commit.index, default=None)

    def kept_checkpoints(self) -> list[Commit]:
        return [commit for _, commit in sorted(self.commits.items()) if not commit.retired and not commit.damaged]

    def last_metrics(self) -> dict[str, Any] | None:
        """What rank 0 reported last, of the rows that still count."""
        for number, span in self.lineage().items():
            last = self.last_rows.get(number)
            if last is None:
                continue
            if span.last_call is not None and last.first + last.count - 1 > span.last_call:
                return self._metrics_of_commit(number, span.last_call)
            found: list[dict[str, Any]] = decode_metrics(last.rows)
            return found[-1]
        return None

    def _metrics_of_commit(self, attempt: int, call: int) -> dict[str, Any] | None:
        for commit in self.commits.values():
            if (commit.attempt, commit.call) == (attempt, call):
                found: dict[str, Any] | None = decode_metrics(commit.metrics)
                return found
        return None

    def lineage(self) -> dict[int, Span]:
        """The attempts whose work is part of the run as it stands, and how much of each.

        The last attempt counts whole; the one whose checkpoint it started from counts up to that checkpoint; and so on.
        """
        spans: dict[int, Span] = {}
        number = max(self.attempts, default=0)
        span = Span(None, None)
        while number in self.attempts and number not in spans:
            spans[number] = span
            resume = self.attempts[number].resume
            commit = None if resume is None else self.commits.get(resume)
            if commit is None:
                break
            number, span = commit.attempt, Span(commit.call, commit.at)
        return spans


def fold_history(facts: Iterable[f.RunFact]) -> History:
    history = History()
    for fact in facts:
        history.apply(fact)
    return history


def rows(facts: Iterable[f.RunFact], history: History, rank: int = 0) -> Iterator[dict[str, Any]]:
    """The metrics of one rank, in order, without what was superseded by a restart."""
    spans = history.lineage()
    for fact in facts:
        if not isinstance(fact, f.RowsReported) or fact.rank != rank or fact.attempt not in spans:
            continue
        last = spans[fact.attempt].last_call
        for number, row in enumerate(decode_metrics(fact.rows)):
            if last is None or fact.first + number <= last:
                yield row
