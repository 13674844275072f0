"""The promises, checked at the moment at which each could be broken, against what is durable then.

Numbers name the invariants of the design: 1 committed is forever, 2 a checkpoint exists only if its manifest does, 3
names are never reused, 4 delete last, 5 one driver, 8 budgets are honest. It must never help the code under test: it
watches, and knows which faults were injected.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from holdfast.storage.envelope import unseal
from holdfast.storage.manifest import Manifest
from holdfast.storage.store import MANIFEST, entry_of
from holdfast.testing.simulation.clock import Process
from holdfast.testing.simulation.history import History, Reader
from holdfast.testing.simulation.stores import MemoryStore
from holdfast.testing.simulation.workers import PlayedWorker, step_of
from holdfast.train.machine import TrainMachine, TrainState, new_state
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.testing.simulation.world import World

_DIRECTORY = re.compile(r"(checkpoint_(\d+))/(.*)")


class Truth:
    """What was promised to whom, and whether it holds."""

    def __init__(self, world: World, store: MemoryStore) -> None:
        self._world = world
        self._store = store
        self._reader = Reader(store)
        self.damaged: dict[int, float] = {}
        """Checkpoints that were damaged on purpose, and when."""
        self.told: set[int] = set()
        """Checkpoints whose commit some worker was told of."""
        self._uploads: dict[str, tuple[int, int, int]] = {}
        self._highest: dict[tuple[int, int], int] = {}
        self._late: set[str] = set()
        """Manifests that a displaced driver still wrote, where its successor may have swept: they count for nothing."""
        self._confirmed = 0

    def history(self) -> History:
        return self._reader.history()

    def power_lost(self) -> None:
        """Every manifest that survived must have all of its files."""
        self._reader.changed()
        for key in self._store.names():
            if key.endswith("/" + MANIFEST) and key not in self._late:
                self._check_manifest(key)

    def wrote(self, key: str, writer: Process | None) -> None:
        if key.startswith("journal/"):
            self._reader.changed()
        elif key.endswith("/" + MANIFEST):
            if writer is not None and writer.epoch < self.history().epoch:
                self._late.add(key)
            else:
                self._check_manifest(key)

    def deletes(self, key: str, process: Process | None) -> None:
        match = _DIRECTORY.fullmatch(key)
        if match is None:
            return
        directory, index, name = match[1], int(match[2]), match[3]
        history = self.history()
        if index in history.committed and index not in history.retired:
            self._world.violate("4 delete last", f"{process} deletes {key}, which the durable journal has not given up")
        if name != MANIFEST and self._store.visible(f"{directory}/{MANIFEST}") is not None:
            self._world.violate("2 manifest", f"{process} deletes {key} before the manifest beside it")

    def uploading(self, epoch: int, message: m.Upload) -> None:
        """An agent was told to upload."""
        who = (epoch, message.attempt, message.call)
        first = self._uploads.setdefault(message.directory, who)
        if first != who:
            self._world.violate("3 names", f"{message.directory} was used by (epoch, attempt, call) {first} and {who}")
        life = (epoch, message.attempt)
        others = max((high for other, high in self._highest.items() if other < life), default=-1)
        if message.index <= others:
            self._world.violate("3 names", f"{message.directory} by {who} after {others} was in use")
        self._highest[life] = max(self._highest.get(life, -1), message.index)

    def told_committed(self, worker: PlayedWorker, message: m.Committed) -> None:
        """A worker hears that a checkpoint is committed."""
        index = message.checkpoint.index
        history = self.history()
        if index not in history.committed:
            self._world.violate(
                "1 committed is forever",
                f"{worker.process} was told of checkpoint {index}, which the durable journal does not hold",
            )
        if index not in self.damaged and index not in history.retired:
            self._check_manifest(f"{message.checkpoint.directory}/{MANIFEST}")
        self.told.add(index)

    def begun(self, key: tuple[str, int, int], epoch: int, begin: m.Begin) -> None:
        """A worker is told where to start from."""
        history = self.history()
        attempt = key[1]
        if attempt not in history.started:
            self._world.violate("5 one driver", f"attempt {attempt} of epoch {epoch} runs and is in no durable journal")
            return
        place, start = history.started[attempt]
        resume = None if begin.resume is None else begin.resume.index
        if resume != start.resume:
            self._world.violate("1 committed is forever", f"attempt {attempt} got {resume}, journalled {start.resume}")
        self._check_resume(history, place, attempt, resume)

    def _check_resume(self, history: History, place: int, attempt: int, resume: int | None) -> None:
        before = {index for index, found in history.places.items() if found < place}
        needed = max((before & self.told) - set(self.damaged) - history.retired, default=-1)
        if (-1 if resume is None else resume) < needed:
            self._world.violate(
                "1 committed is forever", f"attempt {attempt} starts from {resume} and {needed} was committed and told"
            )
        if resume is not None and history.damaged.get(resume, place) < place:
            self._world.violate("2 manifest", f"attempt {attempt} starts from {resume}, which was found damaged before")
        if resume is None and before:
            self._world.violate("2 manifest", f"attempt {attempt} starts afresh though {sorted(before)} were committed")
        lost = self.told - set(history.committed)
        if lost:
            self._world.violate(
                "1 committed is forever", f"{sorted(lost)} were told and are not in the durable journal"
            )

    def loaded(self, worker: PlayedWorker, checkpoint: m.CheckpointRef) -> int:
        """A worker reads a checkpoint that its agent has verified; the step that it holds."""
        history = self.history()
        fact = history.committed.get(checkpoint.index)
        if fact is None:
            self._world.violate("2 manifest", f"{worker.process} was given {checkpoint}, which was never committed")
            return 0
        metrics = msgspec.json.decode(fact.metrics)
        if metrics is None:
            self._world.violate("metrics", f"checkpoint {checkpoint.index} was committed without rank 0's metrics")
            return 0
        step = int(metrics["step"])
        if checkpoint.index in self.damaged:
            self._check_was_whole(worker, checkpoint, step)
        elif checkpoint.index not in history.retired:
            self._check_manifest(f"{checkpoint.directory}/{MANIFEST}")
        return step

    def _check_was_whole(self, worker: PlayedWorker, checkpoint: m.CheckpointRef, step: int) -> None:
        """It was damaged on purpose; if that was before the attempt began, nobody may get it."""
        _, start = self.history().started[worker.key[1]]
        if self.damaged[checkpoint.index] >= start.at:
            return
        directory = checkpoint.directory
        expected = self._world.plan.files(step)
        found = {name: self._store.visible(f"{directory}/{name}") for name in expected}
        sealed = self._store.visible(f"{directory}/{MANIFEST}")
        if found != expected or sealed is None or unseal(sealed) is None:
            self._world.violate("2 manifest", f"{worker.process} was given {directory}, which is damaged")

    def confirmed(self, position: int) -> None:
        """A log told its driver that everything up to here is durable and its own."""
        self._confirmed = max(self._confirmed, position)
        if len(self.history().facts) < self._confirmed:
            self._world.violate(
                "5 one driver",
                f"{self._confirmed} records were confirmed, and only {len(self.history().facts)} are durable and count",
            )

    def recovered(self, process: Process, machine: TrainMachine, state: TrainState) -> None:
        """A driver has folded a state: the same as from the beginning, and nothing that was confirmed is missing."""
        self.confirmed(0)
        self.compare(machine, state, str(process))

    def compare(self, machine: TrainMachine, state: TrainState, whose: str) -> None:
        folded = new_state()
        for fact in self.history().facts:
            machine.apply(folded, fact)
        ours, theirs = _remembered(folded), _remembered(state)
        if ours != theirs:
            different = [f"{name}: {ours[name]} / {theirs[name]}" for name in ours if ours[name] != theirs[name]]
            self._world.violate(
                "replay", f"the journal folds to another state than {whose} has: {'; '.join(different)}"
            )

    def _check_manifest(self, key: str) -> None:
        """There is a manifest, durably, and every file that it names is durably what the workers wrote."""
        directory = key.rpartition("/")[0]
        match = _DIRECTORY.fullmatch(key)
        if match is None or int(match[2]) in self.damaged:
            return
        sealed = self._store.durable(key)
        body = None if sealed is None else unseal(sealed)
        if body is None:
            self._world.violate("2 manifest", f"{directory} has no whole and durable manifest")
            return
        manifest = msgspec.json.decode(body, type=Manifest)
        found = {entry.name: self._store.durable(f"{directory}/{entry.name}") for entry in manifest.files}
        absent = sorted(name for name, data in found.items() if data is None)
        if absent or not found:
            self._world.violate("2 manifest", f"{directory} has a manifest, and these files are not there: {absent}")
            return
        whole = {name: data for name, data in found.items() if data is not None}
        expected = self._world.plan.files(step_of(next(iter(whole.values()))))
        if whole != expected:
            self._world.violate("2 manifest", f"{directory} holds {sorted(whole)}, not {sorted(expected)} as written")
        wrong = [entry for entry in manifest.files if entry != entry_of(entry.name, whole[entry.name])]
        if wrong:
            self._world.violate("2 manifest", f"{directory}: the manifest does not match its files: {wrong}")


def _remembered(state: TrainState) -> dict[str, object]:
    """What of a state must survive its driver."""
    return {
        "status": state.status,
        "reason": state.reason,
        "epoch": state.epoch,
        "checkpoints": state.checkpoints,
        "charged": state.charged,
        "startup_failures": state.startup_failures,
        "attempt": state.group.attempt,
        "reserved": state.group.commits.reserved,
        "return_value": bytes(state.return_value),
    }
