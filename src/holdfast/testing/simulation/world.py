"""One world, from one seed: a store, drivers one after the other, their nodes and workers, and faults at any step.

Every process is real code on the virtual loop. A blocking call takes effect at a random moment of a random delay;
between two steps of it another process may get in, its own may die, and what was on its way to the store may still
arrive. The world decides when faults happen and never how the code under test reacts.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.control.failures import MAX_FAILURES
from holdfast.errors import StorageError
from holdfast.storage.store import Store
from holdfast.testing.simulation import faults
from holdfast.testing.simulation.audit import STORAGE, Injected, audit
from holdfast.testing.simulation.clock import RUNNING, Process, Stuck, VirtualLoop
from holdfast.testing.simulation.driving import Driver
from holdfast.testing.simulation.scenario import BUCKET, DISK, LAX_BUCKET, Fault, Scenario, draw
from holdfast.testing.simulation.stores import LOCAL, Bucket, Disk, Scratch
from holdfast.testing.simulation.truth import Truth
from holdfast.testing.simulation.workers import PlayedWorker
from holdfast.train.machine import FINISHED, LIVE, TrainState

LIMIT_S = 3600.0
MAX_STEPS = 60_000
URI = "sim://run"


class Violation(Exception):
    """A promise was broken."""


class Died(BaseException):
    """The process that made a call is dead, so the call goes no further."""


class Call:
    """A blocking call that a process has handed to a thread."""

    __slots__ = ("answer", "arguments", "call", "process", "taken")

    def __init__(self, process: Process, answer: asyncio.Future[Any], call: Callable[..., Any], arguments: Any) -> None:
        self.process = process
        self.answer = answer
        self.call = call
        self.arguments = arguments
        self.taken = False


class World:
    """See the module's docstring."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.scenario = scenario or draw(self.chance)
        self.plan = self.scenario.plan
        self.loop = VirtualLoop(LIMIT_S)
        self.outside = contextvars.Context()
        self.files: dict[str, bytes] = {}
        self.store: Disk | Bucket = (
            Disk(self, URI)
            if self.scenario.store == DISK
            else Bucket(self, URI, honours=self.scenario.store != LAX_BUCKET)
        )
        self.truth = Truth(self, self.store)
        self.injected = Injected(charges={}, whole=set())
        self.trace: list[tuple[Any, ...]] = []
        self.steps = 0
        self.drivers: list[Driver] = []
        self.faults = deque(self.scenario.faults)
        self.no_room = 0
        self.dooms: deque[str] = deque()
        self.failing_calls = 0
        self.failing_until = -1.0
        self.failing_below = ""
        self.slow_until = -1.0
        self._next_fault = self.faults[0].gap if self.faults else -1
        self._pending: list[Call] = []
        self._stack: list[Call] = []
        self._relaunches = self.scenario.relaunches
        self._over: asyncio.Future[None] | None = None

    def run(self) -> None:
        """Live through it; raises what went wrong."""
        self._over = self.loop.create_future()
        self.launch()
        broken: Exception | None = None
        try:
            self.loop.run_until_complete(self._over)
        except Exception as error:
            broken = error
        errors = self.loop.forget()
        if errors and (broken is None or isinstance(broken, Stuck)):
            raise errors[0]  # what nobody was told of is why nothing went on
        if broken is not None:
            raise broken

    # Time and chance

    def delay(self, scale: float) -> float:
        """A random delay around ``scale`` seconds, now and then much longer."""
        drawn = self.chance.random()
        return scale * (drawn + 0.1) if drawn < 0.98 else scale * 30 * drawn

    async def pause(self, scale: float) -> None:
        await asyncio.sleep(self.delay(scale))

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.loop.now, 6), *what))

    def step(self, *what: Any) -> None:
        """Something happens, and with it perhaps a fault."""
        self.trace.append((round(self.loop.now, 6), *what))
        self.steps += 1
        if self.steps == self._next_fault:
            fault = self.faults.popleft()
            self._next_fault = self.steps + self.faults[0].gap if self.faults else -1
            self.note("FAULT", fault.kind)
            if self._stack:
                faults.cause(self, fault.kind)
            else:
                self.loop.call_soon(faults.cause, self, fault.kind, context=self.outside)
        if self.steps > MAX_STEPS:
            self.violate("liveness", f"still not over after {MAX_STEPS} steps")

    def postpone(self, kind: str, steps: int = 30) -> None:
        """A fault found nothing to happen to; it is tried again later."""
        self.faults.appendleft(Fault(steps, kind))
        self._next_fault = self.steps + steps

    def violate(self, promise: str, text: str) -> None:
        self.note("VIOLATION", promise, text)
        self.loop.stop_with(Violation(f"{promise}: {text}"))

    # Blocking calls

    def blocking(self, process: Process) -> Callable[..., Any]:
        """The port by which a process runs blocking calls."""

        async def run(call: Callable[..., Any], *arguments: Any) -> Any:
            return await self.submit(process, call, *arguments).answer

        return run

    def submit(self, process: Process, call: Callable[..., Any], *arguments: Any) -> Call:
        made = Call(process, self.loop.create_future(), call, arguments)
        self._pending.append(made)
        when = self.loop.now + self._call_delay()
        self.loop.call_at(when, self.execute, made, context=process.context)
        return made

    def execute(self, made: Call) -> None:
        """Let a call take effect, unless it has."""
        if made.taken:
            return
        made.taken = True
        self._pending.remove(made)
        self._stack.append(made)
        result: Any = None
        error: Exception | None = None
        try:
            result = made.call(*made.arguments)
        except Died:
            return
        except Exception as raised:
            error = raised
        finally:
            self._stack.pop()
        for driver in self.drivers:
            if driver.process is made.process and driver.log is not None:
                self.truth.confirmed(driver.log.durable)
        if made.process.alive:
            when = self.loop.now + self._call_delay()
            self.loop.call_at(when, _answer, made.answer, result, error, context=made.process.context)

    def execute_as(self, process: Process, call: Callable[[], None]) -> bool:
        """Have a process make a call at this very moment; whether it came through."""
        made = Call(process, self.loop.create_future(), call, ())
        self._stack.append(made)
        try:
            call()
        except (Died, Exception):
            return False
        finally:
            self._stack.pop()
        return True

    def calls_under_way(self) -> list[Process]:
        return [made.process for made in self._stack]

    def _call_delay(self) -> float:
        return self.delay(0.05 if self.loop.now < self.slow_until else 0.0005)

    # What lies under the stores

    def open_store(self, uri: str) -> Store:
        return self.store if uri == URI else Scratch(self, uri)

    def reached(self, operation: str, key: str) -> None:
        made = self._stack[-1]
        if self._is_dead(made):
            if made.process.late_calls <= 0:
                raise Died
            made.process.late_calls -= 1
            self.note("late", made.process.name, operation, _plain(key))
            return
        self.step("store", made.process.name, operation, _plain(key))
        if self._pending and self.chance.random() < self.scenario.nesting:
            self._let_in_another(made)
        if self._is_dead(made):
            if made.process.late_calls <= 0:
                raise Died
            made.process.late_calls -= 1
            return
        if self._fails(key):
            self.note("fails", made.process.name, operation, _plain(key))
            if operation == LOCAL:
                self.charge(int(key.split("/")[2]), MAX_FAILURES)
            raise StorageError(f"injected: cannot {operation} {_plain(key)!r}")

    def left(self, operation: str, key: str) -> None:
        made = self._stack[-1]
        if self._is_dead(made):
            raise Died
        self.step("stored", made.process.name, operation, _plain(key))
        if self._is_dead(made):
            raise Died
        if operation in ("put", "create", "append") and self.chance.random() < 0.3 and self._fails(key):
            self.note("answer lost", made.process.name, operation, _plain(key))
            raise StorageError(f"injected: the answer to {operation} {_plain(key)!r} was lost")

    def wrote(self, key: str) -> None:
        made = self._stack[-1]
        self.truth.wrote(key, made.process if made.process.epoch else None)

    def deletes(self, key: str) -> None:
        self.truth.deletes(key, self._stack[-1].process)

    def _is_dead(self, made: Call) -> bool:
        return not made.process.alive

    def _fails(self, key: str) -> bool:
        if not key.startswith(self.failing_below):
            return False
        if self.loop.now < self.failing_until and self.chance.random() < 0.7:
            return True
        if self.failing_calls > 0:
            self.failing_calls -= 1
            return True
        return False

    def _let_in_another(self, made: Call) -> None:
        busy = self.calls_under_way()
        others = [other for other in self._pending if other.process.state is RUNNING and other.process not in busy]
        if others:
            other = self.chance.choice(others)
            self.note("gets in", other.process.name, "between", made.process.name)
            self.execute(other)

    # Processes

    def die(self, process: Process) -> None:
        """SIGKILL. A call that was on its way to the store may still arrive, for a while."""
        if not process.alive:
            return
        self.loop.kill(process)
        self.note("killed", process.name)
        if process in self.calls_under_way():
            process.late_calls = self.chance.randrange(2)
        for made in [made for made in self._pending if made.process is process]:
            if self.chance.random() < 0.6:
                process.late_calls = 1
                late = self.delay(0.5 if self.scenario.store == BUCKET else 0.005)
                self.loop.call_at(self.loop.now + late, self.execute, made, context=self.outside)

    def lose_power(self) -> None:
        for driver in self.drivers:
            driver.vanish(self.die)
        if self.scenario.store == DISK:
            for made in self._pending:
                made.taken = True
            self._pending.clear()
        self.store.lose_power(self.chance)
        self.truth.power_lost()

    def living(self) -> list[Driver]:
        """Drivers whose process is there, the newest last."""
        return [driver for driver in self.drivers if driver.process.alive and not driver.done]

    def born(self, worker: PlayedWorker) -> None:
        """A worker was started."""
        if self.plan.conflict:
            self.charge(worker.key[1], MAX_FAILURES)
        if self.dooms:
            faults.doom_newborn(self, worker, self.dooms.popleft())

    def charge(self, attempt: int, budget: str) -> None:
        """From now on this budget may pay for this attempt."""
        self.injected.charges.setdefault(attempt, set()).add(budget)

    def refuses_place(self) -> bool:
        if self.no_room <= 0:
            return False
        self.no_room -= 1
        return True

    # Drivers

    def launch(self, *, take_over: bool = False) -> Driver:
        """A new driver for the run."""
        driver = Driver(self, len(self.drivers) + 1, take_over=take_over)
        self.drivers.append(driver)
        driver.start()
        return driver

    def launch_later(self) -> None:
        """Somebody starts the script again, less and less eagerly."""
        patience = 0.1 + self.delay(0.2 * len(self.drivers))
        self.loop.call_at(self.loop.now + patience, self._launch_if_none, context=self.outside)

    def _launch_if_none(self) -> None:
        if not self.living() and self._over is not None and not self._over.done():
            self.launch(take_over=self.chance.random() < 0.7)

    def driver_ended(self, driver: Driver, state: TrainState | None) -> None:
        """A driver came to its end by itself: with the run's final state, or without."""
        self.note("driver ended", driver.process.name, state.status if state is not None else "")
        if state is None or state.status == LIVE:
            if not self.living():
                self.launch_later()
            return
        if driver.process.epoch == self.truth.history().epoch:
            self.truth.compare(driver.machine, state, driver.process.name)
        if self.living():
            return
        if state.status != FINISHED and self._relaunches > 0:
            self._relaunches -= 1
            self.launch_later()
            return
        self._finish()

    def _finish(self) -> None:
        history = self.truth.history()
        for wrong in audit(history.facts, self.scenario.settings.limits, self.injected, self.plan):
            self.violate("audit", wrong)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def storage_failed(self) -> bool:
        return STORAGE in self.injected.whole


def _answer(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _plain(key: str) -> str:
    """A key as it stands in a trace: without what is drawn from the system's own chance."""
    return key.partition("probe-")[0]
