"""Where a run's time went: the share that was useful, and what became of the rest."""

from __future__ import annotations

import msgspec

from holdfast.observe.history import Attempt, History, Span


class Goodput(msgspec.Struct, frozen=True):
    """Seconds of wall time by what they were used for; they add up to ``wall``."""

    wall: float
    useful: float
    redone: float
    starting: float
    down: float

    @property
    def share(self) -> float:
        return self.useful / self.wall if self.wall > 0 else 1.0


def goodput(history: History, now: float) -> Goodput:
    """The account of a run up to ``now``. *redone* is work after the checkpoint that a restart went back to, *starting*
    is from an attempt's start to every rank's first line, *down* is everything else: no attempt, or no driver.
    """
    if not history.opened:
        return Goodput(0.0, 0.0, 0.0, 0.0, 0.0)
    wall = max(now - history.opened[0].at, 0.0)
    spans = history.lineage()
    useful = redone = starting = 0.0
    for attempt in history.attempts.values():
        ended = attempt.ended_at if attempt.ended_at is not None else now
        running = attempt.running_at if attempt.running_at is not None else ended
        starting += max(running - attempt.started_at, 0.0)
        kept = _kept_until(history, attempt, spans.get(attempt.number), ended)
        useful += max(min(kept, ended) - running, 0.0)
        redone += max(ended - max(kept, running), 0.0)
    return Goodput(wall, useful, redone, starting, max(wall - useful - redone - starting, 0.0))


def _kept_until(history: History, attempt: Attempt, span: Span | None, ended: float) -> float:
    """Up to when the attempt's work counts."""
    if span is None:
        return attempt.started_at
    if span.until is not None:
        return span.until
    if attempt.outcome in ("", "finished"):
        return ended
    last = [commit.at for commit in history.commits.values() if commit.attempt == attempt.number]
    return max(last, default=attempt.started_at)
