"""When a node, or the driver itself, is about to be taken away: what the ranks are told, and how long they have. Pure;
a part of every group.

A notice costs nothing by itself: the ranks go on, and may save. When the grace is over, or every rank has returned, the
attempt ends. A function that returned after the notice may have left early, so that is no finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.control import failures
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f

if TYPE_CHECKING:
    from holdfast.control.group import Group

GRACE = "grace"
DRIVER = ""
"""The name of no node: the driver, and all that is below it."""

_TAKEN = (failures.KILLED, failures.EXITED, failures.NODE_LOST)


class Notice(msgspec.Struct):
    """What is known to be taken away from this attempt, and when."""

    nodes: list[str] = []
    deadline: float = 0.0
    over: bool = False


def apply(notice: Notice, change: object) -> None:
    if isinstance(change, f.PreemptionNoticed):
        if change.node not in notice.nodes:
            notice.nodes.append(change.node)
        notice.deadline = change.deadline
    elif isinstance(change, v.GraceOver):
        notice.over = True
    elif isinstance(change, f.AttemptStarted | f.AttemptEnded | f.RunOpened):
        notice.nodes, notice.deadline, notice.over = [], 0.0, False


def observe(group: Group, event: v.PreemptionSeen, grace_s: float) -> v.Decision:
    """A node of this group, or the driver, has got its notice: tell every rank. The first notice sets the deadline."""
    ranks = _ranks_by_node(group, event.node)
    if not group.live or not ranks or event.node in group.notice.nodes or group.returned == group.world_size:
        return v.NOTHING
    deadline = group.notice.deadline or event.at + grace_s
    noticed = f.PreemptionNoticed(
        at=event.at, group=group.name, attempt=group.attempt, node=event.node, deadline=deadline
    )
    known = dict(entry for node in group.notice.nodes for entry in _ranks_by_node(group, node).items())
    tell = v.TellPreemption(
        group=group.name, attempt=group.attempt, deadline_ms=int(deadline * 1000), nodes={**known, **ranks}
    )
    wait = v.Wait(name=f"{GRACE} {group.attempt}", seconds=grace_s)
    return v.Decision((noticed,), (tell,) if group.notice.nodes else (tell, wait))


def lose_patience(group: Group, name: str) -> v.Decision:
    """A delay has passed; if it was the ranks' grace, it is over."""
    if name != f"{GRACE} {group.attempt}" or not group.notice.nodes or group.notice.over:
        return v.NOTHING
    return v.Decision((v.GraceOver(group=group.name),))


def due(group: Group) -> bool:
    """Is it time to end the attempt for what is taken away?"""
    return bool(group.notice.nodes) and (group.notice.over or group.returned == group.world_size)


def settle(group: Group) -> v.Decision:
    """End the attempt when it is time to."""
    if not due(group):
        return v.NOTHING
    return v.Decision(
        tuple(
            v.Failed(group=group.name, failure=_preempted(number, node, group.ranks[number].calls))
            for node in group.notice.nodes
            for number in _ranks_by_node(group, node).get(node, ())
        )
    )


def explained(group: Group) -> tuple[f.RankFailure, ...]:
    """The attempt's failures; what happened to ranks on nodes that were being taken away is preemption."""
    return tuple(
        msgspec.structs.replace(failure, kind=failures.PREEMPTION)
        if failure.kind in _TAKEN and group.ranks[failure.rank].node in group.notice.nodes
        else failure
        for failure in group.failures
    )


def _ranks_by_node(group: Group, node: str) -> dict[str, tuple[int, ...]]:
    """The ranks on this node, or on every node."""
    found: dict[str, list[int]] = {}
    for number, rank in enumerate(group.ranks):
        if rank.node and node in (rank.node, DRIVER):
            found.setdefault(rank.node, []).append(number)
    return {name: tuple(numbers) for name, numbers in found.items()}


def _preempted(rank: int, node: str, calls: int) -> f.RankFailure:
    message = f"was preempted with its node {node}"
    return f.RankFailure(rank=rank, kind=failures.PREEMPTION, message=message, calls=calls)
