"""Every decision of a training run, and every change of its state. Pure: clock and outcomes arrive inside events.

One group of workers runs attempt after attempt, each from the newest sound checkpoint, until every rank has returned, a
budget is used up, or somebody asks it to stop.
"""

from __future__ import annotations

import msgspec

from holdfast.control import commit, failures, group, hang, preemption, retention
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.wire.messages import CheckpointRef, KeptCheckpoint

GROUP = "train"
FINISHED, FAILED, STOPPED, LIVE = "FINISHED", "FAILED", "STOPPED", ""
PREEMPTED = "preempted by SIGTERM"
RETRY, LINGER = "retry", "linger"
LINGER_S = 10.0
"""How long processes may take to end after every rank's function has returned."""


class Settings(msgspec.Struct, frozen=True):
    """What the user asked for, as far as decisions depend on it."""

    world_size: int
    limits: dict[str, int]
    retention: retention.Policy = retention.Policy()
    floor_step: int = group.FLOOR_STEP
    """In steps of how many calls the slowest rank's progress is told to the others."""
    stop_on_repeat: bool = False
    hang_timeout_s: float | str | None = None
    preemption_grace_s: float = 0.0


class Checkpoint(msgspec.Struct):
    """A committed checkpoint that has not been given up."""

    index: int
    directory: str
    attempt: int
    call: int
    metrics: msgspec.Raw
    damaged: bool = False
    position: int = 0
    """How many calls of the run's line lead up to it, those of earlier attempts included."""


class TrainState(msgspec.Struct):
    """A run, folded from its facts."""

    group: group.Group
    status: str = LIVE
    reason: str = ""
    epoch: int = 0
    function: str = ""
    fingerprint: str = ""
    checkpoints: dict[int, Checkpoint] = {}
    charged: dict[str, int] = {}
    startup_failures: int = 0
    startup_error: str = ""
    position: int = 0
    """How many calls of the run's line were made before this attempt."""
    raised: tuple[str, ...] = ()
    """The signatures of what the ranks of the last failed attempt raised."""
    waiting: bool = False
    lingering: bool = False
    unranked: bool = False
    """There are checkpoints that retention has not looked at."""
    doomed: tuple[str, ...] = ()
    """What retention gave up last. A rank may be about to read it, so it is deleted when the next ones are given up."""
    deleting: bool = False
    stop_reason: str = ""
    return_value: msgspec.Raw = f.NOTHING


def new_state() -> TrainState:
    return TrainState(group.Group(GROUP, world_size=0))


def newest(state: TrainState) -> Checkpoint | None:
    """The checkpoint that the next attempt starts from."""
    sound = [index for index, checkpoint in state.checkpoints.items() if not checkpoint.damaged]
    return state.checkpoints[max(sound)] if sound else None


class TrainMachine:
    """``decide`` and ``apply`` for one run's settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def apply(self, state: TrainState, change: object) -> None:
        """The only way a run's state changes."""
        group.apply(state.group, change)
        if isinstance(change, f.CheckpointCommitted):
            state.checkpoints[change.index] = Checkpoint(
                change.index,
                change.directory,
                change.attempt,
                change.call,
                change.metrics,
                position=state.position + change.call,
            )
            state.unranked = True
        elif isinstance(change, f.CheckpointDamaged):
            state.checkpoints[change.index].damaged = True
        elif isinstance(change, f.CheckpointsRetired):
            gone = [state.checkpoints.pop(index) for index in change.indices if index in state.checkpoints]
            state.doomed = tuple(checkpoint.directory for checkpoint in gone)
            state.unranked = False
        elif isinstance(change, f.AttemptRunning):
            state.startup_failures, state.startup_error = 0, ""
        elif isinstance(change, f.AttemptEnded):
            _end_attempt(state, change)
        elif isinstance(change, f.RunOpened):
            _open(state, change)
        elif isinstance(change, f.RunEnded):
            state.status, state.reason, state.return_value = change.status, change.reason, change.return_value
        elif isinstance(change, v.Waiting):
            state.waiting = change.waiting
        elif isinstance(change, f.AttemptStarted):
            state.lingering = False
            resumed = None if change.resume is None else state.checkpoints.get(change.resume)
            state.position = resumed.position if resumed is not None else 0
        elif isinstance(change, v.Lingering):
            state.lingering = True
        elif isinstance(change, v.Ranked):
            state.unranked = False
        elif isinstance(change, v.Deleting):
            state.deleting = True
        elif isinstance(change, v.Deleted):
            state.doomed, state.deleting = (), False
        elif isinstance(change, v.StopNoted):
            state.stop_reason = change.reason

    def decide(self, state: TrainState, event: v.Event) -> v.Decision:
        """What follows from ``event``. Changes nothing."""
        if isinstance(event, v.Settle):
            return self._settle(state, event.at)
        if isinstance(event, v.CheckpointFoundDamaged) and not _is_sound(state, event.index):
            return v.NOTHING
        if isinstance(event, v.CheckpointsAsked):
            return _tell_checkpoints(state, event)
        if isinstance(event, v.GroupEvent):
            return group.observe(state.group, event)
        if isinstance(event, v.NodeLost):
            return group.lose_node(state.group, event)
        if isinstance(event, v.DelayPassed):
            return self._delay_passed(state, event)
        if isinstance(event, v.PreemptionSeen):
            return self._preempted(state, event)
        if isinstance(event, v.StopAsked) and not state.stop_reason:
            return v.Decision((v.StopNoted(group=GROUP, reason=event.reason),))
        if isinstance(event, v.CheckpointsDeleted):
            gone = state.deleting and event.directories == state.doomed
            return v.Decision((v.Deleted(group=GROUP),) if gone else ())
        if isinstance(event, v.DirectoriesFound):
            return v.Decision((), _sweep(_left_behind(state, event.directories)))
        return v.NOTHING

    def _preempted(self, state: TrainState, event: v.PreemptionSeen) -> v.Decision:
        """The ranks are told. When it is the driver that goes, and nobody can be told, or it is said twice, the run
        stops at once; one that has come to its end ends as if nothing were."""
        told = preemption.observe(state.group, event, self.settings.preemption_grace_s)
        at_its_end = state.group.live and group.finished(state.group)
        if told or event.node != preemption.DRIVER or state.stop_reason or at_its_end:
            return told
        return v.Decision((v.StopNoted(group=GROUP, reason=PREEMPTED),))

    def _delay_passed(self, state: TrainState, event: v.DelayPassed) -> v.Decision:
        if event.name == RETRY and state.waiting:
            return v.Decision((v.Waiting(group=GROUP, waiting=False),))
        if event.name == f"{LINGER} {state.group.attempt}" and state.group.phase == group.RUNNING:
            return group.bring_to_end(state.group)
        return (
            hang.lose_patience(state.group, event.name)
            or preemption.lose_patience(state.group, event.name)
            or group.lose_patience(state.group, event.name)
        )

    def _settle(self, state: TrainState, at: float) -> v.Decision:
        if state.status != LIVE:
            return v.NOTHING
        if state.group.phase == group.ORPHANED:
            return v.Decision((group.ended(state.group, at, "driver_lost"),))
        if state.group.phase == group.IDLE:
            return self._next_attempt(state, at)
        if _leaves_with_driver(state):
            return v.Decision((v.StopNoted(group=GROUP, reason=PREEMPTED),))
        if state.stop_reason and state.group.phase != group.ENDING:
            return group.bring_to_end(state.group)
        working = state.group.phase in (group.STARTING, group.RUNNING) and not state.group.failures
        if working and preemption.due(state.group):
            return preemption.settle(state.group)
        if group.over(state.group):
            return self._tidy_up(state) if state.doomed and group.finished(state.group) else self._end(state, at)
        if state.group.returned == state.group.world_size and not state.lingering:
            patience = v.Wait(name=f"{LINGER} {state.group.attempt}", seconds=LINGER_S)
            return v.Decision((v.Lingering(group=GROUP),), (patience,))
        if state.unranked:
            return self._retire(state, at)
        watching = hang.settle(state.group, self.settings.hang_timeout_s) if working else v.NOTHING
        return watching or group.settle(state.group, at, self.settings.floor_step)

    def _next_attempt(self, state: TrainState, at: float) -> v.Decision:
        if state.stop_reason:
            return _finish(state, f.RunEnded(at=at, status=STOPPED, reason=state.stop_reason))
        if state.waiting:
            return v.NOTHING
        resume = newest(state)
        if resume is None and state.checkpoints:
            return _finish(
                state,
                f.RunEnded(
                    at=at,
                    status=FAILED,
                    reason="every checkpoint of this run is damaged, so there is nothing to resume from; restore one "
                    "from a backup, or start a new run under another name",
                ),
            )
        attempt = state.group.attempt + 1
        started = f.AttemptStarted(
            at=at,
            group=GROUP,
            attempt=attempt,
            world_size=self.settings.world_size,
            resume=resume.index if resume else None,
        )
        start = v.StartGroup(
            group=GROUP,
            attempt=attempt,
            world_size=self.settings.world_size,
            resume=resume.index if resume else None,
            directory=resume.directory if resume else "",
        )
        return v.Decision((started,), (start,))

    def _tidy_up(self, state: TrainState) -> v.Decision:
        """Before a run ends well, delete what was given up last: nobody opens it again to sweep."""
        return v.NOTHING if state.deleting else v.Decision((v.Deleting(group=GROUP),), _sweep(state.doomed))

    def _end(self, state: TrainState, at: float) -> v.Decision:
        """Every rank has ended: the attempt ends, and with it perhaps the run."""
        gang = state.group
        if group.finished(gang) and not gang.notice.nodes:
            value = msgspec.Raw(gang.ranks[0].value)
            return _finish(
                state, group.ended(gang, at, "finished"), f.RunEnded(at=at, status=FINISHED, return_value=value)
            )
        sweep = _sweep(group.abandoned_directories(gang))
        roots = failures.attribute(preemption.explained(gang))
        damaged = _damage(state, roots, at)
        if not roots or state.stop_reason:
            return v.Decision((group.ended(gang, at, "stopped", roots), *damaged), sweep)
        root = roots[0]
        charge = failures.paid_by(root.kind)
        ended = group.ended(gang, at, "failed", roots, charge)
        give_up = self._gives_up(state, roots, charge)
        if give_up:
            return _finish(state, ended, *damaged, f.RunEnded(at=at, status=FAILED, reason=give_up), before=sweep)
        if charge == failures.CONTROLLER_LIMIT:
            pause = v.Wait(name=RETRY, seconds=failures.backoff_s(state.startup_failures + 1))
            return v.Decision((ended, *damaged, v.Waiting(group=GROUP, waiting=True)), (*sweep, pause))
        return v.Decision((ended, *damaged), sweep)

    def _gives_up(self, state: TrainState, roots: tuple[f.RankFailure, ...], charge: str) -> str:
        """Why there is no further attempt; empty when there is one."""
        root = roots[0]
        if root.kind == failures.STORAGE:
            return f"storage failed: rank {root.rank} {root.message}"
        if root.kind == failures.STARTUP and root.error and _startup_error(root) == state.startup_error:
            return "a worker could not start, twice with the same error"
        if self.settings.stop_on_repeat and set(_raised(state, roots)) & set(state.raised):
            return "stop_on_repeat: the same exception was raised at the same step in two attempts in a row"
        charged = {**state.charged, charge: state.charged.get(charge, 0) + 1}
        if charge and failures.exhausted(charge, charged, self.settings.limits):
            limit = self.settings.limits[charge]
            return f"{charge}={limit} allows no further restart"
        return ""

    def _retire(self, state: TrainState, at: float) -> v.Decision:
        policy = self.settings.retention
        if policy.num_to_keep is None:
            return v.Decision((v.Ranked(group=GROUP),))
        kept = [retention.Kept(c.index, not c.damaged, c.metrics) for c in state.checkpoints.values()]
        indices = retention.retire(kept, policy)
        if not indices:
            return v.Decision((v.Ranked(group=GROUP),))
        return v.Decision((f.CheckpointsRetired(at=at, group=GROUP, indices=indices),), _sweep(state.doomed))


def _end_attempt(state: TrainState, change: f.AttemptEnded) -> None:
    if change.charge:
        state.charged[change.charge] = state.charged.get(change.charge, 0) + 1
    if change.outcome == "failed":
        state.raised = _raised(state, change.failures)
    if change.failures and change.failures[0].kind == failures.STARTUP:
        state.startup_failures += 1
        state.startup_error = _startup_error(change.failures[0])


def _open(state: TrainState, change: f.RunOpened) -> None:
    state.epoch = change.epoch
    state.function, state.fingerprint = change.function, change.fingerprint
    state.waiting, state.stop_reason, state.doomed, state.deleting = False, "", (), False
    state.startup_failures, state.startup_error = 0, ""
    if change.restarted:
        state.status, state.reason, state.raised = LIVE, "", ()
    if change.fresh_budget:
        state.charged = {}
        if newest(state) is None:  # somebody may have restored one: each is looked at again
            for checkpoint in state.checkpoints.values():
                checkpoint.damaged = False


def _damage(state: TrainState, roots: tuple[f.RankFailure, ...], at: float) -> tuple[f.Fact, ...]:
    """The facts that rule out the checkpoint that this attempt found damaged."""
    index = roots[0].checkpoint if roots else None
    if index is None or not _is_sound(state, index):
        return ()
    return (f.CheckpointDamaged(at=at, group=GROUP, index=index, reason=roots[0].message),)


def _is_sound(state: TrainState, index: int) -> bool:
    return index in state.checkpoints and not state.checkpoints[index].damaged


def _leaves_with_driver(state: TrainState) -> bool:
    """Is the driver about to be taken away, and nothing more to be had of this attempt?"""
    gang = state.group
    told = preemption.DRIVER in gang.notice.nodes and not state.stop_reason
    return told and (preemption.due(gang) or bool(gang.failures))


def _raised(state: TrainState, roots: tuple[f.RankFailure, ...]) -> tuple[str, ...]:
    found = (failures.signature(failure, state.position) for failure in roots if not failure.consequence)
    return tuple(signature for signature in found if signature)


def _startup_error(failure: f.RankFailure) -> str:
    return f"{failure.error}: {failure.message}" if failure.error else ""


def _tell_checkpoints(state: TrainState, event: v.CheckpointsAsked) -> v.Decision:
    kept = tuple(
        KeptCheckpoint(CheckpointRef(checkpoint.index, checkpoint.directory), bytes(checkpoint.metrics))
        for _, checkpoint in sorted(state.checkpoints.items())
        if not checkpoint.damaged
    )
    told = v.TellCheckpoints(group=GROUP, attempt=event.attempt, ranks=(event.rank,), number=event.number, kept=kept)
    return v.Decision((), (told,))


def unknown_to(state: TrainState, directories: tuple[str, ...]) -> tuple[str, ...]:
    """Checkpoints that lie in storage though their index was never given out: facts are missing."""
    return tuple(
        name for name in directories if commit.is_ours(name) and commit.index_of(name) >= state.group.commits.reserved
    )


def _left_behind(state: TrainState, directories: tuple[str, ...]) -> tuple[str, ...]:
    """Directories that are ours and no checkpoint: what uploads began and nobody committed, or deletions left."""
    committed = {checkpoint.directory for checkpoint in state.checkpoints.values()}
    begun = state.group.commits.named
    return tuple(name for name in directories if name not in committed and (name in begun or commit.is_ours(name)))


def _sweep(directories: tuple[str, ...]) -> tuple[v.Command, ...]:
    return (v.DeleteCheckpoints(directories=directories),) if directories else ()


def _finish(state: TrainState, *facts: f.Fact, before: tuple[v.Command, ...] = ()) -> v.Decision:
    return v.Decision(facts, (*before, *_sweep(state.doomed), v.Finish()))
