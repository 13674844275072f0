"""The simulator is worth something only if it finds bugs: each of these is planted in the real code and must be found
within the seeds that the test command runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.control import commit, dispatch, group, loop, retention
from holdfast.control import vocabulary as v
from holdfast.engine.agent import Agent
from holdfast.journal import facts as f
from holdfast.journal.file_log import FileLog
from holdfast.journal.writer import Writer
from holdfast.storage.envelope import seal
from holdfast.storage.store import MANIFEST
from holdfast.testing import simulate
from holdfast.train import machine

SEEDS = 3000

Plant = Callable[[pytest.MonkeyPatch], None]


def manifest_before_the_files(patch: pytest.MonkeyPatch) -> None:
    real = commit.settle

    def settle(commits: commit.Commits, name: str, attempt: int, arrived: int, at: float) -> v.Decision:
        decision = real(commits, name, attempt, arrived, at)
        uploads = [command for command in decision.commands if isinstance(command, v.UploadFiles)]
        if not uploads:
            return decision
        call, index, directory = uploads[0].call, uploads[0].index, uploads[0].directory
        files = tuple(entry for entries in commits.pending[call].files.values() for entry in entries)
        early = v.WriteManifest(group=name, attempt=attempt, index=index, directory=directory, files=files)
        return v.Decision(decision.changes, (early, *decision.commands))

    patch.setattr(commit, "settle", settle)


def manifest_without_settled_files(patch: pytest.MonkeyPatch) -> None:
    def write_manifest(store: Any, directory: str, manifest: Any) -> None:
        store.put(f"{directory}/{MANIFEST}", seal(msgspec.json.encode(manifest)))

    patch.setattr(dispatch, "write_manifest", write_manifest)


def index_reused_after_a_driver_crash(patch: pytest.MonkeyPatch) -> None:
    real = group.apply

    def apply(gang: group.Group, change: object) -> None:
        before = gang.commits.next_index
        real(gang, change)
        if isinstance(change, f.RunOpened):
            gang.commits.next_index = before

    patch.setattr(group, "apply", apply)


def failure_charged_twice(patch: pytest.MonkeyPatch) -> None:
    real = machine._end_attempt

    def end(state: machine.TrainState, change: f.AttemptEnded) -> None:
        real(state, change)
        if change.charge and len(change.failures) > 1:
            state.charged[change.charge] += 1

    patch.setattr(machine, "_end_attempt", end)


def attempt_ended_twice(patch: pytest.MonkeyPatch) -> None:
    real = machine.TrainMachine._end

    def end(self: machine.TrainMachine, state: machine.TrainState, at: float) -> v.Decision:
        decision = real(self, state, at)
        ended = [change for change in decision.changes if isinstance(change, f.AttemptEnded) and change.charge]
        return v.Decision((*ended, *decision.changes), decision.commands)

    patch.setattr(machine.TrainMachine, "_end", end)


def ack_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    _let_go_early(patch, v.Acknowledge)


def delete_before_the_retirement_is_durable(patch: pytest.MonkeyPatch) -> None:
    real = machine.TrainMachine._retire

    def retire(self: machine.TrainMachine, state: machine.TrainState, at: float) -> v.Decision:
        decision = real(self, state, at)
        retired = [change for change in decision.changes if isinstance(change, f.CheckpointsRetired)]
        directories = tuple(state.checkpoints[index].directory for fact in retired for index in fact.indices)
        return v.Decision(decision.changes, (v.DeleteCheckpoints(directories=directories),) if directories else ())

    patch.setattr(machine.TrainMachine, "_retire", retire)
    _let_go_early(patch, v.DeleteCheckpoints)


def _let_go_early(patch: pytest.MonkeyPatch, kind: type[v.Command]) -> None:
    real = loop.Controller._release

    def release(self: loop.Controller) -> None:
        if self.hands is not None and not self._busy and not self._done.done():
            early = [command for _, command in self._outbox if isinstance(command, kind)]
            self._outbox = deque(item for item in self._outbox if not isinstance(item[1], kind))
            for command in early:
                self.hands.carry_out(command)
        real(self)

    patch.setattr(loop.Controller, "_release", release)


def displaced_driver_does_not_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writer, "_confirm", lambda self: None)


def journal_is_written_and_not_synced(patch: pytest.MonkeyPatch) -> None:
    def write(self: FileLog, first: int, records: list[bytes]) -> None:
        syncing, self._current.sync = self._current.sync, lambda: None  # type: ignore[method-assign]
        try:
            real(self, first, records)
        finally:
            self._current.sync = syncing  # type: ignore[method-assign]

    real = FileLog._write
    patch.setattr(FileLog, "_write", write)


def damaged_flag_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def newest(state: machine.TrainState) -> machine.Checkpoint | None:
        return state.checkpoints[max(state.checkpoints)] if state.checkpoints else None

    patch.setattr(machine, "newest", newest)


def all_damaged_means_a_fresh_start(patch: pytest.MonkeyPatch) -> None:
    real = machine.TrainMachine.apply

    def apply(self: machine.TrainMachine, state: machine.TrainState, change: object) -> None:
        real(self, state, change)
        if isinstance(change, f.CheckpointDamaged):
            del state.checkpoints[change.index]

    patch.setattr(machine.TrainMachine, "apply", apply)


def checkpoints_are_handed_out_unverified(patch: pytest.MonkeyPatch) -> None:
    async def verify(self: Agent, store: Any, directory: str) -> None:
        return None

    patch.setattr(Agent, "_verify", verify)


def messages_of_dead_attempts_are_heard(patch: pytest.MonkeyPatch) -> None:
    real = group.observe

    def observe(gang: group.Group, event: v.GroupEvent) -> v.Decision:
        return real(gang, msgspec.structs.replace(event, attempt=gang.attempt))

    patch.setattr(group, "observe", observe)


def sweep_takes_everything(patch: pytest.MonkeyPatch) -> None:
    real = machine.TrainMachine.decide

    def decide(self: machine.TrainMachine, state: machine.TrainState, event: v.Event) -> v.Decision:
        if isinstance(event, v.DirectoriesFound):
            found = tuple(name for name in event.directories if commit.is_ours(name))
            return v.Decision((), (v.DeleteCheckpoints(directories=found),))
        return real(self, state, event)

    patch.setattr(machine.TrainMachine, "decide", decide)


def retention_gives_up_the_newest(patch: pytest.MonkeyPatch) -> None:
    def retire(checkpoints: Any, policy: retention.Policy) -> tuple[int, ...]:
        if policy.num_to_keep is None or len(checkpoints) <= policy.num_to_keep:
            return ()
        return tuple(sorted((kept.index for kept in checkpoints), reverse=True)[: -policy.num_to_keep])

    patch.setattr(retention, "retire", retire)


def counts_are_forgotten_by_a_new_driver(patch: pytest.MonkeyPatch) -> None:
    real = machine._open

    def opened(state: machine.TrainState, change: f.RunOpened) -> None:
        real(state, change)
        state.charged = {}

    patch.setattr(machine, "_open", opened)


def survivor_is_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine.failures, "attribute", tuple)


PLANTED: dict[Plant, tuple[str, ...]] = {
    manifest_before_the_files: ("2 manifest",),
    manifest_without_settled_files: ("2 manifest",),
    index_reused_after_a_driver_crash: ("3 names",),
    failure_charged_twice: ("8 budgets",),
    attempt_ended_twice: ("8 budgets",),
    ack_before_the_flush: ("1 committed is forever",),
    delete_before_the_retirement_is_durable: ("4 delete last",),
    displaced_driver_does_not_look: ("5 one driver", "1 committed", "3 names"),
    journal_is_written_and_not_synced: ("1 committed", "5 one driver"),
    damaged_flag_is_ignored: ("2 manifest",),
    all_damaged_means_a_fresh_start: ("2 manifest",),
    checkpoints_are_handed_out_unverified: ("2 manifest",),
    messages_of_dead_attempts_are_heard: ("8 budgets", "metrics", "KeyError", "Stuck"),
    sweep_takes_everything: ("4 delete last",),
    retention_gives_up_the_newest: ("4 delete last", "1 committed"),
    counts_are_forgotten_by_a_new_driver: ("8 budgets",),
    survivor_is_blamed: ("8 budgets",),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_simulator_finds_a_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS):
        failure = simulate.live(seed).failure
        if failure is not None:
            print(f"{plant.__name__}: found after {seed + 1} seeds: {failure.what[:200]}")
            assert any(promise in failure.what for promise in PLANTED[plant]), failure.what
            return
    pytest.fail(f"{plant.__name__} was not found within {SEEDS} seeds")
