"""What goes into a machine and what comes out: events in; notes, facts and commands out. All are frozen values.

A *fact* (``journal.facts``) is remembered for ever. A *note* changes the state of an attempt that cannot outlive its
driver (which rank has arrived where), so it is applied like a fact and not journalled: a new driver starts a new
attempt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.journal.facts import Fact, RankFailure
from holdfast.wire.messages import FileEntry, KeptCheckpoint, Manner


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that reached the driver. ``at`` is wall-clock time; machines have no clock of their own."""

    at: float


class GroupEvent(Event, frozen=True, kw_only=True):
    """Something that happened to one attempt of a group."""

    group: str
    attempt: int


class RankEvent(GroupEvent, frozen=True, kw_only=True):
    rank: int


class Settle(Event, frozen=True, kw_only=True):
    """Nothing new: what follows from the state as it is? Asked after every event until the answer is nothing."""


class GroupPlaced(GroupEvent, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    """Each rank's node."""


class GroupNotPlaced(GroupEvent, frozen=True, kw_only=True):
    reason: str


class RankArrived(RankEvent, frozen=True, kw_only=True):
    """The rank is at the first line of the function."""


class RowsArrived(RankEvent, frozen=True, kw_only=True):
    first: int
    count: int
    rows: bytes


class FilesDeclared(RankEvent, frozen=True, kw_only=True):
    call: int
    metrics: bytes
    files: tuple[FileEntry, ...]
    manner: Manner = Manner()


class FilesDigested(RankEvent, frozen=True, kw_only=True):
    call: int
    files: tuple[FileEntry, ...]


class FilesUploaded(RankEvent, frozen=True, kw_only=True):
    index: int
    files: tuple[FileEntry, ...]


class UploadGaveUp(RankEvent, frozen=True, kw_only=True):
    """``unreadable``: not the store refused, but the rank's own file could not be read."""

    index: int
    error: str
    unreadable: bool = False


class ManifestWritten(GroupEvent, frozen=True, kw_only=True):
    index: int


class ManifestGaveUp(GroupEvent, frozen=True, kw_only=True):
    index: int
    error: str


class RankReturned(RankEvent, frozen=True, kw_only=True):
    value: bytes


class RankRaised(RankEvent, frozen=True, kw_only=True):
    error: str
    message: str
    traceback: str
    started: bool


class RankExited(RankEvent, frozen=True, kw_only=True):
    status: int
    ours: bool = False
    oom: bool = False
    lost: bool = False


class RankMet(RankEvent, frozen=True, kw_only=True):
    """The rank is at its ``number``-th meeting."""

    number: int
    what: str
    data: bytes
    late: bool = False


class CheckpointsAsked(RankEvent, frozen=True, kw_only=True):
    """The rank wants to know which checkpoints are kept."""

    number: int


class RankQuiet(RankEvent, frozen=True, kw_only=True):
    """The rank has made no progress for so long."""

    seconds: float


class StacksTold(RankEvent, frozen=True, kw_only=True):
    text: str


class CheckpointFoundDamaged(RankEvent, frozen=True, kw_only=True):
    index: int
    reason: str


class NodeLost(Event, frozen=True, kw_only=True):
    node: str
    reason: str


class DelayPassed(Event, frozen=True, kw_only=True):
    """The delay that a Wait command asked for is over."""

    name: str


class PreemptionSeen(Event, frozen=True, kw_only=True):
    """This node is about to be taken away; an empty name means the driver, and everything with it."""

    node: str


class StopAsked(Event, frozen=True, kw_only=True):
    reason: str


class CheckpointsDeleted(Event, frozen=True, kw_only=True):
    """These directories are gone, or could not be deleted now."""

    directories: tuple[str, ...]


class DirectoriesFound(Event, frozen=True, kw_only=True):
    """These folders lay in the run's directory when it was opened."""

    directories: tuple[str, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A change of state that dies with its attempt."""

    group: str


class Placed(Note, frozen=True, kw_only=True):
    nodes: tuple[str, ...]


class Arrived(Note, frozen=True, kw_only=True):
    rank: int


class CommitDeclared(Note, frozen=True, kw_only=True):
    rank: int
    call: int
    metrics: bytes
    files: tuple[FileEntry, ...]
    manner: Manner = Manner()


class CommitDigesting(Note, frozen=True, kw_only=True):
    call: int
    ranks: tuple[int, ...]


class CommitDigested(Note, frozen=True, kw_only=True):
    call: int
    rank: int
    files: tuple[FileEntry, ...]


class CommitUploading(Note, frozen=True, kw_only=True):
    """The commit of ``call`` has its index; ``brings`` names what each rank uploads."""

    call: int
    index: int
    directory: str
    brings: dict[int, tuple[str, ...]]


class CommitUploaded(Note, frozen=True, kw_only=True):
    call: int
    rank: int
    files: tuple[FileEntry, ...]


class CommitSealing(Note, frozen=True, kw_only=True):
    call: int


class CommitDropped(Note, frozen=True, kw_only=True):
    call: int


class CameToMeeting(Note, frozen=True, kw_only=True):
    rank: int
    number: int
    what: str
    data: bytes


class MeetingOver(Note, frozen=True, kw_only=True):
    number: int


class Failed(Note, frozen=True, kw_only=True):
    failure: RankFailure


class Returned(Note, frozen=True, kw_only=True):
    rank: int
    value: bytes


class Gone(Note, frozen=True, kw_only=True):
    """The rank's process has ended."""

    rank: int


class Ending(Note, frozen=True, kw_only=True):
    """The attempt is being brought to its end."""


class Watched(Note, frozen=True, kw_only=True):
    """The agents have been told to watch for ranks that make no progress for so long."""

    seconds: float


class Hung(Note, frozen=True, kw_only=True):
    rank: int
    seconds: float


class StacksNoted(Note, frozen=True, kw_only=True):
    rank: int
    text: str


class StacksDue(Note, frozen=True, kw_only=True):
    """Stacks that have not been told by now are not waited for."""


class GraceOver(Note, frozen=True, kw_only=True):
    """What was announced to be taken away has had its time."""


class FloorTold(Note, frozen=True, kw_only=True):
    floor: int


class Waiting(Note, frozen=True, kw_only=True):
    """The group waits for a delay before its next attempt."""

    waiting: bool


class Lingering(Note, frozen=True, kw_only=True):
    """Every rank has returned; their processes are given a while to end."""


class Deleting(Note, frozen=True, kw_only=True):
    """What retention gave up last is being deleted."""


class Deleted(Note, frozen=True, kw_only=True):
    """It is deleted."""


class Ranked(Note, frozen=True, kw_only=True):
    """Retention has looked at every checkpoint and keeps them."""


class StopNoted(Note, frozen=True, kw_only=True):
    reason: str


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Something for the loop to do. Commands leave after the facts that were decided with them are durable."""


class StartGroup(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    world_size: int
    resume: int | None
    directory: str


class KillGroup(Command, frozen=True, kw_only=True):
    """End an attempt's workers; uploads of the checkpoints to ``finish`` go on."""

    group: str
    attempt: int
    finish: tuple[int, ...] = ()


class Watch(Command, frozen=True, kw_only=True):
    """Have ranks told of that make no progress for so long."""

    group: str
    attempt: int
    seconds: float


class DumpStacks(Command, frozen=True, kw_only=True):
    group: str
    attempt: int


class TellPreemption(Command, frozen=True, kw_only=True):
    """Tell every rank which nodes are taken away, and when."""

    group: str
    attempt: int
    deadline_ms: int
    nodes: dict[str, tuple[int, ...]]


class DigestFiles(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    rank: int
    call: int
    files: tuple[str, ...]


class UploadFiles(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    rank: int
    call: int
    index: int
    directory: str
    files: tuple[str, ...]


class WriteManifest(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    index: int
    directory: str
    files: tuple[FileEntry, ...]


class Acknowledge(Command, frozen=True, kw_only=True):
    """Tell every rank that ``call`` is committed."""

    group: str
    attempt: int
    call: int
    index: int
    directory: str


class Refuse(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    call: int
    ranks: tuple[int, ...]
    error: str


class TellMeeting(Command, frozen=True, kw_only=True):
    """Tell these ranks that the meeting has taken place, or why it cannot."""

    group: str
    attempt: int
    number: int
    ranks: tuple[int, ...]
    data: bytes = b""
    error: str = ""


class TellCheckpoints(Command, frozen=True, kw_only=True):
    """Tell these ranks which checkpoints are kept."""

    group: str
    attempt: int
    ranks: tuple[int, ...]
    number: int
    kept: tuple[KeptCheckpoint, ...]


class TellFloor(Command, frozen=True, kw_only=True):
    group: str
    attempt: int
    floor: int


class DeleteCheckpoints(Command, frozen=True, kw_only=True):
    """Delete these directories, after confirming that the run is still ours. Waits for every fact before it."""

    directories: tuple[str, ...]


class Wait(Command, frozen=True, kw_only=True):
    name: str
    seconds: float


class Finish(Command, frozen=True, kw_only=True):
    """The run is over; everything that was decided is durable when this arrives."""


Change = Fact | Note


class Decision(msgspec.Struct, frozen=True):
    """What follows from an event: changes to apply in order, and commands to carry out in order."""

    changes: tuple[Any, ...] = ()
    commands: tuple[Command, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes or self.commands)


NOTHING = Decision()
