"""When a rank stands still: how long that may last, and what is done about it. Pure; a part of every group.

The agents watch their own workers, for they alone know which of them wait inside our calls. They are told the limit;
the first rank that is over it has every rank's stacks told, and then the attempt fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.control import failures
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f

if TYPE_CHECKING:
    from holdfast.control.group import Group

AUTO = "auto"
FEW = 5
"""So many intervals between reports are seen before ``auto`` draws its conclusion."""
TIMES = 20
LEAST_S = 300.0
"""``auto`` allows ``TIMES`` the longest interval between two reports, and never less than this."""
STEP = 1.25
"""A limit that has grown by less is not told again."""
STACKS, STACKS_S = "stacks", 5.0
"""How long the stacks are waited for."""
MOST_STACKS = 20
"""So many different stacks are kept; all are in the workers' logs."""


class Watch(msgspec.Struct):
    """The limit that the agents of this attempt know, who is over it, and what was learned of the run's pace."""

    limit_s: float = 0.0
    quiet: dict[int, float] = {}
    answered: set[int] = set()
    stacks: dict[str, list[int]] = {}
    due: bool = False
    reported_at: float = 0.0
    intervals: int = 0
    longest_s: float = 0.0


def apply(watch: Watch, change: object) -> None:
    """Change the watch by one note or fact; what does not concern it is left alone."""
    if isinstance(change, f.RowsReported):
        if change.rank == 0:
            _learn(watch, change.at)
    elif isinstance(change, f.AttemptRunning):
        watch.reported_at = change.at
    elif isinstance(change, f.AttemptStarted | f.AttemptEnded):
        watch.limit_s = watch.reported_at = 0.0
        watch.quiet, watch.answered, watch.stacks, watch.due = {}, set(), {}, False
    elif isinstance(change, v.Watched):
        watch.limit_s = change.seconds
    elif isinstance(change, v.Hung):
        watch.quiet[change.rank] = change.seconds
    elif isinstance(change, v.StacksNoted):
        watch.answered.add(change.rank)
        if change.text and (change.text in watch.stacks or len(watch.stacks) < MOST_STACKS):
            watch.stacks.setdefault(change.text, []).append(change.rank)
    elif isinstance(change, v.StacksDue):
        watch.due = True


def limit_s(setting: float | str | None, watch: Watch) -> float:
    """How long a rank may make no progress; 0 for any time."""
    if setting == AUTO:
        return max(LEAST_S, TIMES * watch.longest_s) if watch.intervals >= FEW else 0.0
    return float(setting or 0.0)


def observe(group: Group, event: v.RankQuiet | v.StacksTold) -> v.Decision:
    """A rank is over the limit: the first one has the stacks of all told. Or it tells them."""
    if isinstance(event, v.StacksTold):
        return _stacks_told(group, event)
    rank = group.ranks[event.rank]
    if event.rank in group.watch.quiet or rank.returned or rank.failed:
        return v.NOTHING
    hung = v.Hung(group=group.name, rank=event.rank, seconds=event.seconds)
    if group.watch.quiet:
        return v.Decision((hung,))
    return v.Decision(
        (hung,),
        (
            v.DumpStacks(group=group.name, attempt=group.attempt),
            v.Wait(name=f"{STACKS} {group.attempt}", seconds=STACKS_S),
        ),
    )


def _stacks_told(group: Group, event: v.StacksTold) -> v.Decision:
    if event.rank in group.watch.answered:
        return v.NOTHING
    return v.Decision((v.StacksNoted(group=group.name, rank=event.rank, text=event.text),))


def lose_patience(group: Group, name: str) -> v.Decision:
    """A delay has passed; if it was the one that the stacks had, those that are missing are not waited for."""
    if name != f"{STACKS} {group.attempt}" or not group.watch.quiet or group.watch.due:
        return v.NOTHING
    return v.Decision((v.StacksDue(group=group.name),))


def settle(group: Group, setting: float | str | None) -> v.Decision:
    """What follows for a group that runs: a limit to tell, or an end."""
    watch = group.watch
    if watch.quiet and (watch.due or len(watch.answered) >= group.world_size - group.gone):
        return v.Decision(tuple(_failed(group, number) for number in _slowest_first(group)))
    limit = limit_s(setting, watch)
    if limit <= watch.limit_s * STEP or not group.ranks[0].node:
        return v.NOTHING
    return v.Decision(
        (v.Watched(group=group.name, seconds=limit),),
        (v.Watch(group=group.name, attempt=group.attempt, seconds=limit),),
    )


def _learn(watch: Watch, at: float) -> None:
    if watch.reported_at:
        watch.intervals += 1
        watch.longest_s = max(watch.longest_s, at - watch.reported_at)
    watch.reported_at = at


def _slowest_first(group: Group) -> list[int]:
    """Ranks wait for the slowest, so that one is the likeliest cause."""
    return sorted(group.watch.quiet, key=lambda number: group.ranks[number].calls)


def _failed(group: Group, number: int) -> v.Failed:
    return v.Failed(
        group=group.name,
        failure=f.RankFailure(
            rank=number,
            kind=failures.HANG,
            message=f"made no progress for {group.watch.quiet[number]:.3g} s",
            traceback=_stacks(group.watch, number) if number == _slowest_first(group)[0] else "",
            calls=group.ranks[number].calls,
        ),
    )


def _stacks(watch: Watch, first: int) -> str:
    """The stacks of all ranks, equal ones once, those of ``first`` first."""
    told = sorted(watch.stacks.items(), key=lambda entry: (first not in entry[1], min(entry[1])))
    parts = [
        f"Stacks of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}:\n{text.rstrip()}\n"
        for text, ranks in told
    ]
    if not any(first in ranks for ranks in watch.stacks.values()):
        parts.insert(0, f"Rank {first} did not tell its stacks: it may be stopped, or wait for the kernel.\n")
    return "\n".join(parts)
