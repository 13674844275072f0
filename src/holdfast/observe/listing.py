"""Runs as they lie in storage, seen from another process: which there are, who drives them, how they stand.

Everything is folded from journals and epoch records. This module must never write, and never take a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, MissingError
from holdfast.journal import epochs
from holdfast.journal.fold import read_facts
from holdfast.journal.log import Holder
from holdfast.journal.open import read_records
from holdfast.observe.goodput import goodput
from holdfast.observe.history import Attempt, Commit, History, fold_history
from holdfast.observe.wording import describe_root
from holdfast.storage.store import Store
from holdfast.wire.metrics import decode_metrics

RUNNING, INTERRUPTED, UNKNOWN, UNREADABLE = "RUNNING", "INTERRUPTED", "UNKNOWN", "UNREADABLE"
"""How a run stands that has not ended: driven, left by a dead driver, driven on another machine if at all, damaged."""

_READERS = 8
_STATUS = {True: RUNNING, False: INTERRUPTED, None: UNKNOWN}


class Seen(msgspec.Struct, frozen=True):
    """One run, as it stood when it was looked at."""

    name: str
    path: str
    status: str
    history: History
    now: float
    epoch: int = 0
    holder: Holder | None = None
    """Who drives the run, or drove it last."""
    trouble: str = ""
    """Why it cannot be read."""

    @property
    def until(self) -> float:
        """Up to when the run's time counts."""
        return self.now if self.status in (RUNNING, UNKNOWN) else self.history.last_at

    @property
    def failures(self) -> int:
        return sum(1 for attempt in self.history.attempts.values() if attempt.outcome == "failed")


def runs_below(store: Store, *, wait: bool = False) -> list[Seen]:
    """Every run that lies directly below ``store``, or in it, by name."""
    if is_run(store):
        return [look(store, wait=wait)]
    found = [child for child in map(store.child, _folders(store)) if is_run(child)]
    if not found:
        return []
    with ThreadPoolExecutor(min(_READERS, len(found)), "holdfast-ls") as threads:
        return list(threads.map(lambda child: look(child, wait=wait), found))


def is_run(store: Store) -> bool:
    """Whether a driver has ever taken the run that lies here."""
    return "epochs" in _folders(store) and epochs.newest(store) > 0


def look(store: Store, *, wait: bool = False) -> Seen:
    """The run that lies in ``store``, which must be one. With ``wait``, a lease is watched where nothing else tells
    whether its driver lives.
    """
    name, now = store.uri.rstrip("/").rpartition("/")[2], time.time()
    try:
        epoch, holder = epochs.holder_of(store) or (0, None)
        # Before the journal is read: what a driver wrote before it was seen to be gone is all there then.
        driven = holder is not None and is_driven(store, epoch, holder, wait=wait)
        history = read_history(store)
    except HoldfastError as error:
        return Seen(name, store.uri, UNREADABLE, History(), now, trouble=str(error))
    ended = history.status and epoch <= history.opened[-1].epoch
    status = history.status if ended else _STATUS[driven]
    return Seen(name, store.uri, status, history, now, epoch, holder)


def read_history(store: Store) -> History:
    return fold_history(read_facts(read_records(store)))


def is_driven(store: Store, epoch: int, holder: Holder, *, wait: bool) -> bool | None:
    """Whether the driver of this epoch lives; None where that needs waiting for its lease, unless ``wait``."""
    try:
        return epochs.is_live(store, epoch, holder, time.sleep if wait else _refuse_to_wait)
    except _MustWaitError:
        return None


class _MustWaitError(Exception):
    """Only its lease tells whether a driver lives."""


def _refuse_to_wait(_: float) -> None:
    raise _MustWaitError


def _folders(store: Store) -> list[str]:
    try:
        return store.folders("")
    except MissingError:
        return []


class Price(msgspec.Struct, frozen=True):
    """What an attempt's end cost."""

    charge: str
    """The budget that paid for it."""
    redone: int | None
    """Reports made after the checkpoint that the next attempt started from."""
    away_s: float | None
    """From its end until the next attempt was running."""


def price_of(history: History, attempt: Attempt) -> Price:
    following = history.attempts.get(attempt.number + 1)
    if following is None:
        return Price(attempt.charge, None, None)
    resumed = None if following.resume is None else history.commits.get(following.resume)
    kept = resumed.call if resumed is not None and resumed.attempt == attempt.number else 0
    away = None
    if following.running_at is not None and attempt.ended_at is not None:
        away = max(following.running_at - attempt.ended_at, 0.0)
    return Price(attempt.charge, max(reports_made(history, attempt) - kept, 0), away)


def reports_made(history: History, attempt: Attempt) -> int:
    """How many reports the attempt's furthest rank had made, as far as the journal tells."""
    if attempt.calls:
        return max(attempt.calls)
    last = history.last_rows.get(attempt.number)
    return last.first + last.count - 1 if last is not None else 0


def summary(seen: Seen) -> dict[str, Any]:
    """One run in a list of runs, as JSON can hold it."""
    history, newest = seen.history, seen.history.newest
    opened = history.opened[0].at if history.opened else None
    return {
        "name": seen.name,
        "path": seen.path,
        "status": seen.status,
        "reason": seen.trouble or history.reason,
        "driver": _driver(seen),
        "attempts": len(history.attempts),
        "failures": seen.failures,
        "checkpoint": newest.directory if newest else None,
        "metrics": plain(history.last_metrics()),
        "opened_at": opened,
        "last_fact_at": history.last_at or None,
        "age_s": seen.now - opened if opened is not None else None,
    }


def description(seen: Seen, *, tracebacks: bool = False) -> dict[str, Any]:
    """One run with its attempts and checkpoints, as JSON can hold it."""
    history = seen.history
    spent = goodput(history, seen.until)
    last = history.opened[-1] if history.opened else None
    return summary(seen) | {
        "function": last.function if last else None,
        "drivers": len(history.opened),
        "charged": history.charged,
        "return_value": plain(decode_metrics(history.return_value)),
        "goodput": {"share": spent.share} | msgspec.to_builtins(spent),
        "attempt_list": [_attempt(seen, attempt, tracebacks=tracebacks) for attempt in history.attempts.values()],
        "checkpoints": [_checkpoint(commit) for _, commit in sorted(history.commits.items())],
    }


def _driver(seen: Seen) -> dict[str, Any] | None:
    if seen.holder is None:
        return None
    return {
        "host": seen.holder.host,
        "pid": seen.holder.pid,
        "since": seen.holder.started_at,
        "live": {RUNNING: True, UNKNOWN: None}.get(seen.status, False),
    }


def _attempt(seen: Seen, attempt: Attempt, *, tracebacks: bool) -> dict[str, Any]:
    price = price_of(seen.history, attempt)
    return {
        "attempt": attempt.number,
        "workers": attempt.world_size,
        "resumed_from": attempt.resume,
        "started_at": attempt.started_at,
        "running_at": attempt.running_at,
        "ended_at": attempt.ended_at,
        "duration_s": (attempt.ended_at if attempt.ended_at is not None else seen.until) - attempt.started_at,
        "reports": reports_made(seen.history, attempt),
        "outcome": outcome_of(seen, attempt),
        "cause": describe_root(attempt.failures) if attempt.failures else "",
        "charge": price.charge,
        "reports_redone": price.redone,
        "away_s": price.away_s,
        "failures": list(_failures(attempt, tracebacks=tracebacks)),
    }


def outcome_of(seen: Seen, attempt: Attempt) -> str:
    if attempt.outcome:
        return attempt.outcome
    if seen.status in (RUNNING, UNKNOWN):
        return "running" if attempt.running_at is not None else "starting"
    return "driver_lost"


def _failures(attempt: Attempt, *, tracebacks: bool) -> Iterator[dict[str, Any]]:
    for failure in attempt.failures:
        told = {
            "rank": failure.rank,
            "kind": failure.kind,
            "error": failure.error,
            "message": failure.message,
            "reports": failure.calls,
            "consequence": failure.consequence,
        }
        yield told | {"traceback": failure.traceback} if tracebacks else told


def _checkpoint(commit: Commit) -> dict[str, Any]:
    return {
        "index": commit.index,
        "directory": commit.directory,
        "attempt": commit.attempt,
        "report": commit.call,
        "committed_at": commit.at,
        "bytes": commit.size,
        "state": state_of(commit),
        "metrics": plain(decode_metrics(commit.metrics)),
    }


def state_of(commit: Commit) -> str:
    if commit.retired:
        return "retired"
    return "damaged" if commit.damaged else "kept"


def plain(value: Any) -> Any:
    """The value with every number that JSON has no word for as text: nan, inf, -inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
