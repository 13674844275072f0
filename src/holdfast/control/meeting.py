"""Meetings of all ranks of a group: barriers, and what rank 0 tells the others there. Pure; a part of every group.

The n-th meeting of all ranks belongs together. It takes place when the last rank has come; a rank that has ended, or
that is at a meeting of another kind, makes it impossible, and the ranks that came are told who.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.control import vocabulary as v
from holdfast.control.failures import name_ranks

if TYPE_CHECKING:
    from holdfast.control.group import Group


class Meeting(msgspec.Struct):
    """One meeting that has not taken place yet: who has come, for what, and what rank 0 brought."""

    came: dict[int, str] = {}
    data: bytes = b""


def apply(meetings: dict[int, Meeting], note: v.Note) -> None:
    if isinstance(note, v.CameToMeeting):
        meeting = meetings.setdefault(note.number, Meeting())
        meeting.came[note.rank] = note.what
        if note.rank == 0:
            meeting.data = note.data
    elif isinstance(note, v.MeetingOver):
        meetings.pop(note.number, None)


def met(group: Group, event: v.RankMet) -> v.Decision:
    """A rank has come, or has waited long enough."""
    meeting = group.meetings.get(event.number)
    if meeting is not None and event.rank in meeting.came:
        return _tell_missing(group, event, meeting) if event.late else v.NOTHING
    came = v.CameToMeeting(group=group.name, rank=event.rank, number=event.number, what=event.what, data=event.data)
    return v.NOTHING if event.late else v.Decision((came,))


def settle(group: Group) -> v.Decision:
    """The next meeting that takes place, or never can."""
    for number, meeting in group.meetings.items():
        error = _obstacle(group, number, meeting)
        if error or len(meeting.came) == group.world_size:
            return v.Decision(
                (v.MeetingOver(group=group.name, number=number),),
                (_tell(group, number, tuple(sorted(meeting.came)), b"" if error else meeting.data, error),),
            )
    return v.NOTHING


def _obstacle(group: Group, number: int, meeting: Meeting) -> str:
    """Why a meeting can never take place; empty when it may."""
    kinds = {what: rank for rank, what in sorted(meeting.came.items(), reverse=True)}
    if len(kinds) > 1:
        said = " and ".join(f"rank {rank} is at a {what}" for what, rank in sorted(kinds.items()))
        return f"the ranks do not meet for the same: {said}, as collective call {number} of each"
    if not group.returned:
        return ""
    ended = [number for number, rank in enumerate(group.ranks) if rank.returned and number not in meeting.came]
    what = next(iter(kinds))
    return f"{name_ranks(ended)} ended before collective call {number}, a {what} that all must make" if ended else ""


def _tell_missing(group: Group, event: v.RankMet, meeting: Meeting) -> v.Decision:
    missing = [rank for rank in range(group.world_size) if rank not in meeting.came]
    error = f"{name_ranks(missing)} did not come to the {event.what} (collective call {event.number}) in time"
    return v.Decision((), (_tell(group, event.number, (event.rank,), b"", error),))


def _tell(group: Group, number: int, ranks: tuple[int, ...], data: bytes, error: str) -> v.TellMeeting:
    return v.TellMeeting(group=group.name, attempt=group.attempt, number=number, ranks=ranks, data=data, error=error)
