"""The history of a run that is over, read as a whole: attempts, charges, verdicts and metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.control import failures
from holdfast.journal import facts as f
from holdfast.testing.simulation.workers import Plan, metrics_of

STORAGE, DAMAGE, STOP = "storage", "damage", "stop"


class Injected(msgspec.Struct):
    """What was done to a run: per attempt the budgets that may pay for it, and what concerns the whole run."""

    charges: dict[int, set[str]]
    whole: set[str]


def audit(facts: tuple[f.RunFact, ...], limits: Mapping[str, int], injected: Injected, plan: Plan) -> Iterator[str]:
    """Everything in a history that should not be there."""
    yield from _attempts(facts)
    yield from _charges(facts, limits, injected)
    yield from _retirements(facts)
    ended = [fact for fact in facts if isinstance(fact, f.RunEnded)]
    if not ended:
        yield "the run is over and its journal does not say so"
        return
    for fact in ended:
        yield from _verdict(fact, injected)
    if ended[-1].status == "FINISHED":
        yield from _metrics(facts, plan)


def _attempts(facts: tuple[f.RunFact, ...]) -> Iterator[str]:
    live, last = 0, 0
    for fact in facts:
        if isinstance(fact, f.AttemptStarted):
            if live:
                yield f"8 budgets: attempt {fact.attempt} started while attempt {live} had not ended"
            if fact.attempt <= last:
                yield f"8 budgets: attempt {fact.attempt} started after attempt {last}"
            live = last = fact.attempt
        elif isinstance(fact, f.AttemptEnded):
            if fact.attempt != live:
                yield f"8 budgets: attempt {fact.attempt} ended, and the running one was {live or 'none'}"
            live = 0


def _charges(facts: tuple[f.RunFact, ...], limits: Mapping[str, int], injected: Injected) -> Iterator[str]:
    counts: dict[str, int] = {}
    for fact in facts:
        if isinstance(fact, f.RunOpened) and fact.fresh_budget:
            counts = {}
        if isinstance(fact, f.RunEnded):
            yield from _given_up(fact, counts, limits)
        if not isinstance(fact, f.AttemptEnded):
            continue
        allowed = injected.charges.get(fact.attempt, set())
        if fact.charge:
            counts[fact.charge] = counts.get(fact.charge, 0) + 1
            if fact.charge not in allowed:
                yield f"8 budgets: attempt {fact.attempt} was charged to {fact.charge}; injected was {sorted(allowed)}"
            if 0 <= limits.get(fact.charge, -1) < counts[fact.charge] - 1:
                yield f"8 budgets: {counts[fact.charge]} charges to {fact.charge}={limits[fact.charge]}"
        if fact.outcome == "failed":
            yield from _root(fact, injected)


def _given_up(fact: f.RunEnded, counts: Mapping[str, int], limits: Mapping[str, int]) -> Iterator[str]:
    budget = fact.reason.partition("=")[0]
    if budget in limits and counts.get(budget, 0) <= limits[budget]:
        yield f"8 budgets: the run gave up after {counts.get(budget, 0)} charges: {fact.reason}"


def _root(fact: f.AttemptEnded, injected: Injected) -> Iterator[str]:
    if not fact.failures:
        yield f"8 budgets: attempt {fact.attempt} failed without a failure"
        return
    root = fact.failures[0]
    if fact.charge != failures.paid_by(root.kind):
        yield f"8 budgets: attempt {fact.attempt} failed by {root.kind} and was charged to {fact.charge!r}"
    if root.kind == failures.DAMAGED and DAMAGE not in injected.whole:
        yield f"2 manifest: attempt {fact.attempt} found a damaged checkpoint that nobody damaged: {root.message}"
    if root.kind == failures.STORAGE and STORAGE not in injected.whole:
        yield f"attempt {fact.attempt} failed by storage that did not fail: {root.message}"
    others = [failure for failure in fact.failures if not failures.looks_like_peer_loss(failure)]
    if others and failures.looks_like_peer_loss(root):
        yield f"8 budgets: attempt {fact.attempt} blames {root.message!r} and not {others[0].message!r}"


def _retirements(facts: tuple[f.RunFact, ...]) -> Iterator[str]:
    sound: set[int] = set()
    for fact in facts:
        if isinstance(fact, f.CheckpointCommitted):
            if sound and fact.index <= max(sound):
                yield f"3 names: checkpoint {fact.index} was committed after {max(sound)}"
            sound.add(fact.index)
        elif isinstance(fact, f.CheckpointDamaged):
            sound.discard(fact.index)
        elif isinstance(fact, f.CheckpointsRetired):
            if sound and max(sound) in fact.indices:
                yield f"4 delete last: the newest sound checkpoint {max(sound)} was given up"
            sound.difference_update(fact.indices)


def _verdict(fact: f.RunEnded, injected: Injected) -> Iterator[str]:
    charged = set().union(*injected.charges.values()) if injected.charges else set()
    reason = fact.reason
    explained = (
        fact.status == "FINISHED"
        or (fact.status == "STOPPED" and STOP in injected.whole)
        or (reason.startswith("storage failed") and STORAGE in injected.whole)
        or ("damaged" in reason and DAMAGE in injected.whole)
        or ("could not start, twice" in reason and failures.CONTROLLER_LIMIT in charged)
        or any(reason.startswith(f"{budget}=") for budget in charged)
    )
    if not explained:
        yield f"the run ended {fact.status} for a reason that was not injected: {reason}"


def _metrics(facts: tuple[f.RunFact, ...], plan: Plan) -> Iterator[str]:
    """Every rank's rows along the line of attempts that led to the end are those of an undisturbed run."""
    rows: dict[int, dict[int, list[bytes]]] = {}
    resumes: dict[int, int | None] = {}
    commits: dict[int, f.CheckpointCommitted] = {}
    world_size = 0
    for fact in facts:
        if isinstance(fact, f.AttemptStarted):
            resumes[fact.attempt] = fact.resume
            world_size = fact.world_size
        elif isinstance(fact, f.CheckpointCommitted):
            commits[fact.index] = fact
            if [bytes(fact.metrics)] != rows.get(fact.attempt, {}).get(0, [])[fact.call - 1 : fact.call]:
                yield f"metrics: checkpoint {fact.index} does not have rank 0's, but {bytes(fact.metrics)!r}"
        elif isinstance(fact, f.RowsReported):
            mine = rows.setdefault(fact.attempt, {}).setdefault(fact.rank, [])
            if fact.first != len(mine) + 1:
                yield f"metrics: attempt {fact.attempt} rank {fact.rank} has call {fact.first} after {len(mine)}"
            found = [bytes(row) for row in msgspec.json.decode(fact.rows, type=list[msgspec.Raw])]
            if len(found) != fact.count:
                yield f"metrics: {fact.count} rows were counted and {len(found)} are there"
            mine.extend(found)
    for rank in range(world_size):
        kept: list[bytes] = []
        attempt, calls = max(resumes), None
        while True:
            kept = rows.get(attempt, {}).get(rank, [])[:calls] + kept
            index = resumes[attempt]
            if index is None:
                break
            attempt, calls = commits[index].attempt, commits[index].call
        expected = [metrics_of(rank, step) for step in range(1, plan.steps + 1)]
        if kept != expected:
            yield f"metrics: rank {rank} has the rows {kept}, not one for each of {plan.steps} steps"
