"""What a run says on the terminal: one line where it starts, one for each failure, one where it ends. Where a person
looks, also a line that updates in place, and at the end a table of the attempts.

The console reads facts and writes text. It must never fail a run: a closed terminal is ignored.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

from holdfast.journal import facts as f
from holdfast.observe.goodput import goodput
from holdfast.observe.history import Attempt, History
from holdfast.observe.progress import Progress, print_above, print_attempts
from holdfast.observe.wording import account, brief, describe_root, duration, reports

PATIENCE_S = 1.0
"""A failure is told together with its recovery, or after this long without one."""


class Console:
    """An observer of one run's facts."""

    def __init__(
        self,
        name: str,
        directory: str,
        *,
        history: History,
        limits: dict[str, int],
        later: Callable[[float, Callable[[], None]], Any],
        resume: str = "run the same script again to resume",
        stream: TextIO | None = None,
    ) -> None:
        self._name = name
        self._directory = directory
        self._history = history
        self._limits = limits
        self._later = later
        self._resume = resume
        self._stream = stream
        self._untold: Attempt | None = None
        self._charged = dict(history.charged)
        self._progress = Progress(history)

    def opened(self, engine: str, workers: int) -> None:
        """Say what starts, where, and on what."""
        what = f"run {self._name!r}: {workers} worker{'s' if workers != 1 else ''} on {engine}"
        self._say(f"{what}, storage {self._directory}")
        newest = self._history.newest
        if self._history.attempts and newest is not None:
            self._say(f"resuming after attempt {max(self._history.attempts)}, from {newest.directory}")
        elif self._history.attempts:
            self._say(f"starting over after attempt {max(self._history.attempts)}: it left no checkpoint")
        self._progress.start(self._stream or sys.stdout)

    def close(self) -> None:
        """Let go of the terminal, however the run ended."""
        self._progress.stop()

    def notice(self, text: str) -> None:
        self._say(text)

    def output(self, rank: int, text: str) -> None:
        """Pass on what a worker printed, each line under its rank."""
        lines = text.splitlines()
        if lines:
            _write("".join(f"(rank {rank}) {line}\n" for line in lines), self._stream)

    def observe(self, change: object) -> None:
        """Take in a fact, after the history has."""
        self._progress.observe(change)
        if isinstance(change, f.AttemptEnded) and change.failures:
            self._tell_failure()
            self._charged = dict(self._history.charged)
            attempt = self._untold = self._history.attempts[change.attempt]
            self._later(PATIENCE_S, lambda: self._tell_failure() if self._untold is attempt else None)
        elif isinstance(change, f.AttemptRunning):
            self._tell_failure(recovered_at=change.at)
        elif isinstance(change, f.PreemptionNoticed):
            what = f"{change.node} is" if change.node else "the driver got SIGTERM and is"
            self._say(f"{what} about to be preempted; the workers have {duration(change.deadline - change.at)} to save")
        elif isinstance(change, f.CheckpointDamaged):
            self._say(f"WARNING: {self._history.commits[change.index].directory} is damaged and will not be used again")
        elif isinstance(change, f.RunEnded):
            self._tell_failure(final=True)

    def ended(self, now: float) -> None:
        """Say how the run ended, what came of its time, and where to look."""
        self.close()
        history = self._history
        with contextlib.suppress(OSError, ValueError):
            print_attempts(history, now, self._stream or sys.stdout)
        spent = account(goodput(history, now))
        logs = f"logs in {self._directory}/logs"
        if history.status == "FINISHED":
            newest, last = history.newest, history.last_metrics()
            result = f" with {brief(last)}" if last else ""
            result += f", newest checkpoint {newest.directory}" if newest else ""
            self._say(f"finished{result}; {spent}; {logs}")
        elif history.status == "STOPPED":
            self._say(f"stopped ({history.reason}); {self._resume}; {spent}; {logs}")
        else:
            self._say(f"FAILED: {history.reason}; {spent}; {logs}")

    def _tell_failure(self, recovered_at: float | None = None, *, final: bool = False) -> None:
        attempt, self._untold = self._untold, None
        if attempt is None:
            return
        parts = [f"attempt {attempt.number} failed ({self._price(attempt)}): {describe_root(attempt.failures)}"]
        if not final:
            parts.append(self._redone(attempt))
        if recovered_at is not None and attempt.ended_at is not None:
            parts.append(f"running again after {duration(recovered_at - attempt.ended_at)}")
        self._say("; ".join(parts))

    def _price(self, attempt: Attempt) -> str:
        """Which restart of how many this failure costs."""
        if not attempt.charge:
            return "not charged"
        limit, used = self._limits.get(attempt.charge, -1), self._charged[attempt.charge]
        if limit < 0:
            return f"restart {used}"
        return f"restart {used} of {limit}" if used <= limit else f"no restart left, {limit} allowed"

    def _redone(self, attempt: Attempt) -> str:
        newest = self._history.newest
        made = max(attempt.calls, default=0)
        if newest is None:
            return f"starting over, {reports(made)} redone"
        lost = made - newest.call if newest.attempt == attempt.number else made
        return f"resuming from {newest.directory}, {reports(max(lost, 0))} redone"

    def _say(self, text: str) -> None:
        say(text, self._stream)


def say(text: str, stream: TextIO | None = None) -> None:
    """One line of ours."""
    _write(f"holdfast: {text}\n", stream)


def _write(text: str, stream: TextIO | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        if print_above(text):
            return
        stream = stream or sys.stdout
        stream.write(text)
        stream.flush()
