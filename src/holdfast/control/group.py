"""The lifecycle of a gang of ranks that start, report and fail together. Pure; train, tune and workflow compose it.

``observe`` turns an event into changes, ``settle`` tells what follows from the state, ``apply`` is the only place that
changes it. Who starts the next attempt, and whether there is one, is the owner's decision.
"""

from __future__ import annotations

import msgspec

from holdfast.control import commit, failures, hang, meeting, preemption
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f

IDLE, STARTING, RUNNING, ENDING, ORPHANED = "idle", "starting", "running", "ending", "orphaned"

UPLOADS, UPLOADS_S = "uploads", 30.0
"""How long uploads in the background have to finish when their attempt ends."""

FLOOR_STEP = 100
"""The slowest rank's progress is told to the others in steps of this many calls."""


class Rank(msgspec.Struct):
    """What is known of one rank of the running attempt."""

    node: str = ""
    started: bool = False
    returned: bool = False
    gone: bool = False
    failed: bool = False
    calls: int = 0
    value: bytes = b"null"


class Group(msgspec.Struct):
    """One gang. ``attempt`` is the number of the running attempt, or of the last one."""

    name: str
    world_size: int
    attempt: int = 0
    phase: str = IDLE
    ranks: list[Rank] = []
    failures: list[f.RankFailure] = []
    commits: commit.Commits = msgspec.field(default_factory=commit.Commits)
    watch: hang.Watch = msgspec.field(default_factory=hang.Watch)
    notice: preemption.Notice = msgspec.field(default_factory=preemption.Notice)
    meetings: dict[int, meeting.Meeting] = {}
    started: int = 0
    returned: int = 0
    gone: int = 0
    floor: int = 0
    """The fewest calls of any rank that may still report."""
    at_floor: int = 0
    floor_told: int = 0
    most_calls: int = 0
    least_returned: int = 0
    """The fewest calls of any rank that has returned."""

    @property
    def live(self) -> bool:
        return self.phase in (STARTING, RUNNING, ENDING)


def apply(group: Group, change: object) -> None:
    """Change the group by one note or fact."""
    commit.apply(group.commits, change)
    hang.apply(group.watch, change)
    preemption.apply(group.notice, change)
    if isinstance(change, v.Note):
        _apply_note(group, change)
    elif isinstance(change, f.RowsReported):
        _count_calls(group, change.rank, change.first + change.count - 1)
    elif isinstance(change, f.AttemptStarted):
        _begin_attempt(group, change)
    elif isinstance(change, f.AttemptRunning):
        group.phase = RUNNING
    elif isinstance(change, f.AttemptEnded):
        group.phase = IDLE
        group.ranks, group.failures = [], []
        commit.clear(group.commits)
    elif isinstance(change, f.RunOpened):
        group.commits.next_index = group.commits.reserved
        commit.clear(group.commits)
        group.phase = IDLE if group.phase == IDLE else ORPHANED


def _apply_note(group: Group, note: v.Note) -> None:
    meeting.apply(group.meetings, note)
    if isinstance(note, v.Arrived):
        group.ranks[note.rank].started = True
        group.started += 1
    elif isinstance(note, v.Failed):
        group.failures.append(note.failure)
        group.ranks[note.failure.rank].failed = True
    elif isinstance(note, v.Returned):
        rank = group.ranks[note.rank]
        rank.returned, rank.value = True, note.value
        group.least_returned = min(group.least_returned, rank.calls) if group.returned else rank.calls
        group.returned += 1
        if rank.calls == group.floor:
            group.at_floor -= 1
            _raise_floor(group)
    elif isinstance(note, v.Gone):
        group.ranks[note.rank].gone = True
        group.gone += 1
    elif isinstance(note, v.Placed):
        for rank, node in zip(group.ranks, note.nodes, strict=True):
            rank.node = node
    elif isinstance(note, v.Ending):
        group.phase = ENDING
        commit.wind_up(group.commits)
    elif isinstance(note, v.FloorTold):
        group.floor_told = note.floor


def observe(group: Group, event: v.GroupEvent) -> v.Decision:
    """What an event of this group changes. Events of dead attempts, and repeated ones, change nothing."""
    if not group.live or event.attempt != group.attempt:
        return v.NOTHING
    if isinstance(event, v.RankEvent):
        return _observe_rank(group, event, group.ranks[event.rank])
    if isinstance(event, v.GroupPlaced):
        return v.Decision((v.Placed(group=group.name, nodes=event.nodes),))
    if isinstance(event, v.GroupNotPlaced):
        return _not_placed(group, event)
    if isinstance(event, v.ManifestWritten):
        return _commit(group, event)
    if isinstance(event, v.ManifestGaveUp):
        pending = commit.by_index(group.commits, event.index)
        if pending is None:
            return v.NOTHING
        return v.Decision(
            (
                v.CommitDropped(group=group.name, call=pending.call),
                _failed(group, 0, failures.STORAGE, f"could not commit {pending.directory}: {event.error}"),
            )
        )
    return v.NOTHING


def lose_node(group: Group, event: v.NodeLost) -> v.Decision:
    """Every rank on that node that is still there has gone with it."""
    if not group.live:
        return v.NOTHING
    changes: list[v.Note] = []
    for number, rank in enumerate(group.ranks):
        if rank.node == event.node and not rank.gone:
            if not (rank.failed or rank.returned):
                changes.append(
                    _failed(group, number, failures.NODE_LOST, f"was lost with node {event.node}: {event.reason}")
                )
            changes.append(v.Gone(group=group.name, rank=number))
    for call, pending in group.commits.pending.items():
        left = pending.brings.keys() - pending.uploaded.keys() if pending.phase == commit.UPLOADING else set()
        if any(group.ranks[number].node == event.node for number in left):
            changes.append(v.CommitDropped(group=group.name, call=call))
    return v.Decision(tuple(changes))


def settle(group: Group, at: float, floor_step: int = FLOOR_STEP) -> v.Decision:
    """What follows from the state of a live group, short of ending the attempt."""
    if group.phase == STARTING and group.started == group.world_size:
        return v.Decision((f.AttemptRunning(at=at, group=group.name, attempt=group.attempt),))
    if group.phase != ENDING and group.failures:
        return bring_to_end(group)
    if group.phase == ENDING:
        return commit.settle(group.commits, group.name, group.attempt, 0, at) if group.commits.pending else v.NOTHING
    if group.phase not in (STARTING, RUNNING):
        return v.NOTHING
    if group.returned and group.most_calls > group.least_returned:
        return v.Decision((_missing_ranks(group),))
    if group.meetings:
        gathered = meeting.settle(group)
        if gathered:
            return gathered
    if group.commits.pending:
        step = commit.settle(group.commits, group.name, group.attempt, group.floor, at)
        if step:
            return step
    if group.floor >= group.floor_told + floor_step:
        return v.Decision(
            (v.FloorTold(group=group.name, floor=group.floor),),
            (v.TellFloor(group=group.name, attempt=group.attempt, floor=group.floor),),
        )
    return v.NOTHING


def bring_to_end(group: Group) -> v.Decision:
    """Kill what is left of the attempt. Uploads in the background have a while to become a checkpoint."""
    finish = commit.finishing(group.commits)
    kill = v.KillGroup(group=group.name, attempt=group.attempt, finish=finish)
    patience = (v.Wait(name=f"{UPLOADS} {group.attempt}", seconds=UPLOADS_S),) if finish else ()
    return v.Decision((v.Ending(group=group.name),), (kill, *patience))


def lose_patience(group: Group, name: str) -> v.Decision:
    """A delay has passed; if it was the one that uploads in the background had, give up what is not uploaded."""
    if group.phase != ENDING or name != f"{UPLOADS} {group.attempt}":
        return v.NOTHING
    return v.Decision(
        tuple(
            v.CommitDropped(group=group.name, call=call)
            for call, pending in group.commits.pending.items()
            if pending.phase == commit.UPLOADING
        )
    )


def over(group: Group) -> bool:
    """Has every rank ended, with nothing of theirs still becoming a checkpoint?"""
    if not group.live or group.gone < group.world_size:
        return False
    return not group.commits.pending


def finished(group: Group) -> bool:
    """Did every rank return?"""
    return not group.failures and all(rank.returned for rank in group.ranks)


def ended(group: Group, at: float, outcome: str, roots: tuple[f.RankFailure, ...] = (), charge: str = "") -> f.Fact:
    """The fact that ends the attempt."""
    return f.AttemptEnded(
        at=at,
        group=group.name,
        attempt=group.attempt,
        outcome=outcome,
        charge=charge,
        failures=roots,
        calls=tuple(rank.calls for rank in group.ranks),
    )


def abandoned_directories(group: Group) -> tuple[str, ...]:
    """Directories that uploads of this attempt began and will never finish."""
    return tuple(group.commits.abandoned)


def _begin_attempt(group: Group, change: f.AttemptStarted) -> None:
    group.attempt = change.attempt
    group.world_size = change.world_size
    group.phase = STARTING
    group.ranks = [Rank() for _ in range(change.world_size)]
    group.failures = []
    group.meetings = {}
    commit.clear(group.commits)
    group.started = group.returned = group.gone = group.floor = group.floor_told = group.most_calls = 0
    group.at_floor = change.world_size


def _count_calls(group: Group, number: int, calls: int) -> None:
    rank = group.ranks[number]
    if rank.calls == group.floor and calls > rank.calls:
        group.at_floor -= 1
    rank.calls = max(rank.calls, calls)
    group.most_calls = max(group.most_calls, calls)
    _raise_floor(group)


def _raise_floor(group: Group) -> None:
    """Find the slowest of the ranks that may still report, once none is left where it was."""
    if group.at_floor > 0 or group.returned == group.world_size:
        return
    group.floor = min(rank.calls for rank in group.ranks if not rank.returned)
    group.at_floor = sum(rank.calls == group.floor and not rank.returned for rank in group.ranks)
    commit.pass_by(group.commits, group.floor - 1)  # the call that has just raised the floor may bring files


def _observe_rank(group: Group, event: v.RankEvent, rank: Rank) -> v.Decision:
    if isinstance(event, v.FilesUploaded):
        return _uploaded(group, event)
    if isinstance(event, v.UploadGaveUp):
        return _upload_gave_up(group, event, rank)
    if rank.gone:
        return v.NOTHING
    if isinstance(event, v.RowsArrived):
        return _rows(group, event, rank)
    if isinstance(event, v.RankArrived):
        return v.NOTHING if rank.started else v.Decision((v.Arrived(group=group.name, rank=event.rank),))
    if isinstance(event, v.FilesDeclared):
        return _declared(group, event, rank)
    if isinstance(event, v.FilesDigested):
        return _digested(group, event)
    if isinstance(event, v.RankReturned):
        if rank.returned or rank.failed:
            return v.NOTHING
        return v.Decision((v.Returned(group=group.name, rank=event.rank, value=event.value),))
    if isinstance(event, v.RankRaised):
        return _raised(group, event, rank)
    if isinstance(event, v.RankMet):
        return meeting.met(group, event)
    if isinstance(event, v.RankQuiet | v.StacksTold):
        return hang.observe(group, event)
    if isinstance(event, v.RankExited):
        return _exited(group, event, rank)
    if isinstance(event, v.CheckpointFoundDamaged):
        return _found_damaged(group, event, rank)
    return v.NOTHING


def _rows(group: Group, event: v.RowsArrived, rank: Rank) -> v.Decision:
    if event.first != rank.calls + 1:
        return v.NOTHING
    return v.Decision((_row_fact(group, event, event.first, event.count, event.rows),))


def _declared(group: Group, event: v.FilesDeclared, rank: Rank) -> v.Decision:
    if event.call != rank.calls + 1:
        return v.NOTHING
    row = _row_fact(group, event, event.call, 1, event.metrics)
    if group.phase == ENDING:
        return v.Decision((row,))
    declared = v.CommitDeclared(
        group=group.name,
        rank=event.rank,
        call=event.call,
        metrics=event.metrics,
        files=event.files,
        manner=event.manner,
    )
    # In this order: the row may be the last that is missing, and rank 0's metrics of this call are let go then.
    return v.Decision((declared, row))


def _row_fact(group: Group, event: v.RankEvent, first: int, count: int, rows: bytes) -> f.RowsReported:
    return f.RowsReported(
        at=event.at,
        group=group.name,
        attempt=event.attempt,
        rank=event.rank,
        first=first,
        count=count,
        rows=msgspec.Raw(b"[" + rows + b"]"),
    )


def _digested(group: Group, event: v.FilesDigested) -> v.Decision:
    pending = group.commits.pending.get(event.call)
    if pending is None or event.rank in pending.digests or event.rank not in pending.digesting:
        return v.NOTHING
    return v.Decision(
        (v.CommitDigested(group=group.name, call=event.call, rank=event.rank, files=event.files),),
    )


def _uploaded(group: Group, event: v.FilesUploaded) -> v.Decision:
    pending = commit.by_index(group.commits, event.index)
    if pending is None or event.rank in pending.uploaded or event.rank not in pending.brings:
        return v.NOTHING
    return v.Decision(
        (v.CommitUploaded(group=group.name, call=pending.call, rank=event.rank, files=event.files),),
    )


def _commit(group: Group, event: v.ManifestWritten) -> v.Decision:
    pending = commit.by_index(group.commits, event.index)
    if pending is None or pending.phase != commit.SEALING:
        return v.NOTHING
    return v.Decision(
        (commit.committed(pending, group.name, group.attempt, event.at),),
        (
            v.Acknowledge(
                group=group.name,
                attempt=group.attempt,
                call=pending.call,
                index=pending.index,
                directory=pending.directory,
            ),
        ),
    )


def _upload_gave_up(group: Group, event: v.UploadGaveUp, rank: Rank) -> v.Decision:
    if group.phase == ENDING:
        pending = commit.by_index(group.commits, event.index)
        return v.Decision((v.CommitDropped(group=group.name, call=pending.call),) if pending else ())
    if event.unreadable and rank.failed:
        return v.NOTHING
    kind = failures.FILES if event.unreadable else failures.STORAGE
    return v.Decision((_failed(group, event.rank, kind, f"could not upload its files: {event.error}"),))


def _raised(group: Group, event: v.RankRaised, rank: Rank) -> v.Decision:
    if rank.returned or (rank.failed and not _lost_files(group, event.rank)):
        return v.NOTHING
    failure = f.RankFailure(
        rank=event.rank,
        kind=failures.EXCEPTION if event.started else failures.STARTUP,
        message=event.message,
        error=event.error,
        traceback=event.traceback,
        calls=rank.calls,
    )
    return v.Decision((v.Failed(group=group.name, failure=failure),))


def _found_damaged(group: Group, event: v.CheckpointFoundDamaged, rank: Rank) -> v.Decision:
    failure = f.RankFailure(
        rank=event.rank,
        kind=failures.DAMAGED,
        message=f"found {commit.directory_of(event.index)} damaged: {event.reason}",
        calls=rank.calls,
        checkpoint=event.index,
    )
    return v.Decision((v.Failed(group=group.name, failure=failure),))


def _exited(group: Group, event: v.RankExited, rank: Rank) -> v.Decision:
    gone = v.Gone(group=group.name, rank=event.rank)
    if event.ours or rank.failed or rank.returned:
        return v.Decision((gone,))
    failure = failures.exit_failure(
        event.rank, event.status, started=rank.started, oom=event.oom, lost=event.lost, calls=rank.calls
    )
    return v.Decision((v.Failed(group=group.name, failure=failure), gone))


def _not_placed(group: Group, event: v.GroupNotPlaced) -> v.Decision:
    """Nothing was started, so every rank has gone as it came. An attempt that was called off has not failed."""
    gone = tuple(v.Gone(group=group.name, rank=rank) for rank in range(group.world_size))
    if group.phase == ENDING:
        return v.Decision(gone)
    return v.Decision((_failed(group, 0, failures.STARTUP, event.reason), *gone))


def _missing_ranks(group: Group) -> v.Failed:
    """A rank that has ended will never make the calls that others have made."""
    missing = [n for n, rank in enumerate(group.ranks) if rank.returned and rank.calls == group.least_returned]
    others = [n for n, rank in enumerate(group.ranks) if rank.calls > group.least_returned]
    message = (
        f"ended after {_reports(group.least_returned)} while {failures.name_ranks(others)} went on to report "
        f"{group.least_returned + 1}; every rank must call report the same number of times"
    )
    if len(missing) > 1:
        message += f" ({failures.name_ranks(missing[1:])} ended there too)"
    return _failed(group, missing[0], failures.MISMATCH, message)


def _reports(count: int) -> str:
    return f"{count} report{'' if count == 1 else 's'}"


def _failed(group: Group, rank: int, kind: str, message: str) -> v.Failed:
    calls = group.ranks[rank].calls if group.ranks else 0
    return v.Failed(group=group.name, failure=f.RankFailure(rank=rank, kind=kind, message=message, calls=calls))


def _lost_files(group: Group, rank: int) -> bool:
    """Is all that is known of this rank's failure that its files have gone? Then it has more to say."""
    return all(failure.kind == failures.FILES for failure in group.failures if failure.rank == rank)
