"""One driver: it opens the run, drives it with the real controller and dispatcher, and lets go.

What it does is what ``train.run`` does around the controller; it must never do more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.control.dispatch import Dispatcher, Job
from holdfast.control.loop import Controller
from holdfast.control.preemption import DRIVER
from holdfast.control.recover import Recovered, open_run
from holdfast.control.vocabulary import DirectoriesFound, PreemptionSeen, StopAsked
from holdfast.engine.base import Gang
from holdfast.errors import FencedError, JournalError, RunIsLiveError, StorageError
from holdfast.journal.facts import RunOpened
from holdfast.journal.log import Holder, Log
from holdfast.journal.pacer import SnapshotPacer
from holdfast.testing.simulation.clock import RUNNING, Process
from holdfast.testing.simulation.cluster import SimulatedEngine
from holdfast.train.machine import FAILED, FINISHED, LIVE, TrainMachine, TrainState, new_state
from holdfast.wire.messages import Environment

if TYPE_CHECKING:
    from holdfast.testing.simulation.world import World

LEASE_S = 15.0
STORAGE_TIMEOUT_S = 3.0


class Driver:
    """See the module's docstring."""

    def __init__(self, world: World, number: int, *, take_over: bool) -> None:
        self.world = world
        self.number = number
        self.take_over = take_over
        self.process = Process(f"driver {number}")
        self.machine = TrainMachine(world.scenario.settings)
        self.engine = SimulatedEngine(world, self.process, lambda: self.attempt)
        self.controller: Controller | None = None
        self.log: Log | None = None
        self.done = False
        self.looked_for_one = self.met_a_live_one = False

    def start(self) -> None:
        """Begin to open the run; the rest follows on the loop."""
        holder = Holder(
            host="simulated",
            boot_id="",
            pid=self.number,
            pid_namespace="",
            start_time="",
            started_at=self.world.loop.now,
            lease_s=LEASE_S,
            token=f"driver {self.number}",
        )
        take = functools.partial(
            open_run,
            self.world.store,
            holder,
            TrainState,
            new_state,
            self.machine.apply,
            take_over=self.take_over,
            wait=self._wait_for_holder,
        )
        self.world.note("launch", self.process.name, "take over" if self.take_over else "")
        self.opening = self.world.submit(self.process, self._open, take)
        self.world.loop.spawn(self.process, self._live())

    def stop(self, reason: str) -> None:
        """What Ctrl-C does."""
        if self.controller is not None:
            self.controller.post(StopAsked(at=self._now(), reason=reason))

    def preempt(self) -> None:
        """What SIGTERM does."""
        if self.controller is not None:
            self.controller.post(PreemptionSeen(at=self._now(), node=DRIVER))

    def vanish(self, die: Callable[[Process], None]) -> None:
        """The machine is gone: driver, agents and workers at once."""
        die(self.process)
        for node in self.engine.nodes.values():
            node.lost = True
            die(node.process)
            node.processes.vanish()

    @property
    def attempt(self) -> int:
        return 0 if self.controller is None else self.controller.state.group.attempt

    def _open(self, take: Callable[[], Recovered[TrainState]]) -> Recovered[TrainState]:
        recovered = take()
        self.log = recovered.log
        self.process.epoch = recovered.log.epoch
        self.world.note("opened", self.process.name, "epoch", recovered.log.epoch, "position", recovered.log.position)
        self.world.truth.recovered(self.process, self.machine, recovered.state)
        if self.met_a_live_one and not self.take_over:
            self.world.violate("5 one driver", f"{self.process} took the run from a driver that lives")
        return recovered

    def _wait_for_holder(self, seconds: float) -> None:
        """While a newcomer waits for one lease, whoever drives renews it."""
        busy = self.world.calls_under_way()
        for other in self.world.living():
            if other is self or other.log is None or other.process.state is not RUNNING or other.process in busy:
                continue
            self.looked_for_one = True
            if self.world.execute_as(other.process, other.log.renew):
                self.met_a_live_one = True

    async def _live(self) -> None:
        state: TrainState | None = None
        try:
            recovered: Recovered[TrainState] = await self.opening.answer
            state = await self._drive(recovered)
        except Exception as error:
            self._judge(error)
        finally:
            await self.engine.close()
            self.done = True
        self.world.driver_ended(self, state)

    def _judge(self, error: Exception) -> None:
        """An error ends a driver only where something was done to deserve it."""
        world = self.world
        world.note("driver failed", self.process.name, type(error).__name__, str(error))
        if isinstance(error, RunIsLiveError):
            deserved = self.looked_for_one
        elif isinstance(error, FencedError):
            deserved = self._is_displaced()
        elif isinstance(error, JournalError | StorageError):
            deserved = world.storage_failed() or self._is_displaced()
        else:
            deserved = False
        if not deserved:
            world.loop.stop_with(error)

    def _is_displaced(self) -> bool:
        """Whether another driver has claimed the run after this one, or could have while this one opened it."""
        if self.log is None:
            return len(self.world.drivers) > 1
        return self.world.store.visible(f"epochs/{self.log.epoch + 1:06d}.json") is not None

    async def _drive(self, recovered: Recovered[TrainState]) -> TrainState:
        if recovered.state.status == FINISHED:
            await self.world.blocking(self.process)(recovered.log.close)
            return recovered.state
        run = self.world.blocking(self.process)
        controller = Controller(self.machine, recovered.state, recovered.log, run, self._now, lease_s=LEASE_S)
        controller._pacer = SnapshotPacer(share=1.0, minimum=self.world.scenario.snapshot_every)
        dispatcher = Dispatcher(self._job(), controller, self.engine, self.world.store, run)
        controller.hands = dispatcher
        self.controller = controller
        try:
            self._begin(controller, recovered)
            await controller.wait()
        finally:
            await dispatcher.close()
            await controller.close()
        state: TrainState = controller.state
        return state

    def _begin(self, controller: Controller, recovered: Recovered[TrainState]) -> None:
        state = recovered.state
        controller.remember(
            RunOpened(
                at=self._now(),
                epoch=recovered.log.epoch,
                host="simulated",
                pid=self.number,
                function="played",
                fingerprint="",
                restarted=state.status != LIVE,
                fresh_budget=state.status == FAILED,
            )
        )
        if recovered.directories:
            controller.post(DirectoriesFound(at=self._now(), directories=recovered.directories))
        controller.settle()

    def _job(self) -> Job:
        options: dict[str, Any] = {
            "run": "simulated",
            "token": f"run{self.number}",
            "program": b"",
            "environment": Environment(),
            "storage_timeout_s": STORAGE_TIMEOUT_S,
            "echo": "none",
            "log_directory": "logs",
            "gang": Gang(size=self.world.scenario.settings.world_size),
        }
        return Job(**options)

    def _now(self) -> float:
        return self.world.loop.now
