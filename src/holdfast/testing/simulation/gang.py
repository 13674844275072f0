"""One undisturbed group of very many simulated workers, to see what an event costs a controller at that size.

Messages are made up here and handed to the real dispatcher; facts go to the real recorder and file log on a simulated
disk. It must never measure the cost of playing workers.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

from holdfast.control.dispatch import Dispatcher, Job
from holdfast.control.loop import Controller
from holdfast.control.recover import open_run
from holdfast.engine.base import Engine, Gang, Listener, Node
from holdfast.errors import EngineError
from holdfast.journal.facts import RunOpened
from holdfast.journal.log import Holder
from holdfast.testing.simulation.clock import VirtualLoop
from holdfast.testing.simulation.stores import Disk
from holdfast.train.machine import FINISHED, Settings, TrainMachine, TrainState, new_state
from holdfast.wire import messages as m

REPORTS = 10
PERIOD = 5
RANKS_PER_NODE = 8
ROW = b'{"loss":0.25,"step":1}'


class _Quiet:
    """Ground on which nothing ever happens."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def reached(self, operation: str, key: str) -> None: ...

    def left(self, operation: str, key: str) -> None: ...

    def wrote(self, key: str) -> None: ...

    def deletes(self, key: str) -> None: ...


class _Nodes(Engine):
    """Takes messages down and remembers what the workers wait for."""

    name = "gang"

    def __init__(self) -> None:
        self.uploads: list[m.Upload] = []
        self.started = 0
        self.told = 0
        self._listener: Listener | None = None

    async def reserve(self, gang: Gang) -> tuple[Node, ...]:
        return tuple(Node(f"node-{rank // RANKS_PER_NODE}", 1, 8.0) for rank in range(gang.size))

    def send(self, node: str, message: m.ToAgent) -> None:
        if isinstance(message, m.StartWorker):
            self.started += 1
        elif isinstance(message, m.Upload):
            self.uploads.append(message)
        elif isinstance(message, m.Tell):
            self.told += len(message.ranks)

    def attach(self, listener: Listener) -> None:
        self._listener = listener

    def detach(self, listener: Listener) -> None:
        self._listener = None

    def pause(self, listener: Listener) -> None: ...

    def resume(self, listener: Listener) -> None: ...

    def say(self, rank: int, message: m.FromAgent) -> None:
        if self._listener is None:
            raise EngineError("nobody listens")
        self._listener.agent_said(f"node-{rank // RANKS_PER_NODE}", message)

    async def close(self) -> None: ...


class _Gang:
    """The run, and a stopwatch for each kind of message."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.engine = _Nodes()
        self.store = Disk(_Quiet(), "sim://gang")
        self.took: dict[str, tuple[int, float]] = {}

    async def run(self) -> TrainState:
        machine = TrainMachine(Settings(world_size=self.size, limits={}))
        holder = Holder("simulated", "", 1, "", "", 0.0, 15.0)
        recovered = open_run(self.store, holder, TrainState, new_state, machine.apply)
        loop = asyncio.get_running_loop()
        controller = Controller(machine, recovered.state, recovered.log, _at_once, loop.time)
        job = Job(
            run="gang",
            token="gang",
            program=b"",
            environment=m.Environment(),
            storage_timeout_s=10.0,
            echo="none",
            log_directory="logs",
            gang=Gang(size=self.size),
        )
        dispatcher = Dispatcher(job, controller, self.engine, self.store, _at_once)
        controller.hands = dispatcher
        controller.remember(RunOpened(at=0.0, epoch=1, host="simulated", pid=1, function="played", fingerprint=""))
        controller.settle()
        await self._play()
        await controller.wait()
        await dispatcher.close()
        await controller.close()
        state: TrainState = controller.state
        return state

    async def _play(self) -> None:
        await _until(lambda: self.engine.started == self.size)
        await self._everybody("WorkerStarted", lambda group, attempt, rank: m.WorkerStarted(group, attempt, rank, 1))
        for call in range(1, REPORTS + 1):
            if call % PERIOD:
                await self._everybody("Rows", functools.partial(_row, call))
            else:
                await self._commit(call)
        await self._everybody("Returned", lambda group, attempt, rank: m.Returned(group, attempt, rank, b"null", b""))
        await self._everybody("Exited", lambda group, attempt, rank: m.Exited(group, attempt, rank, 0))

    async def _commit(self, call: int) -> None:
        self.engine.told = 0
        await self._everybody("Declared", functools.partial(_declared, call))
        await _until(lambda: len(self.engine.uploads) == self.size)
        uploads, self.engine.uploads = self.engine.uploads, []
        began = time.perf_counter()
        for upload in uploads:
            files = tuple(m.FileEntry(name, 8, "0" * 16) for name in upload.files)
            self.engine.say(upload.rank, m.Uploaded(upload.group, upload.attempt, upload.rank, upload.index, files))
        self._count("Uploaded", self.size, time.perf_counter() - began)
        await _until(lambda: self.engine.told == self.size)

    async def _everybody(self, name: str, message: Callable[[str, int, int], m.FromAgent]) -> None:
        began = time.perf_counter()
        for rank in range(self.size):
            self.engine.say(rank, message("gang/train", 1, rank))
        self._count(name, self.size, time.perf_counter() - began)
        await asyncio.sleep(0.2)

    def _count(self, name: str, events: int, seconds: float) -> None:
        before = self.took.get(name, (0, 0.0))
        self.took[name] = (before[0] + events, before[1] + seconds)


def _row(call: int, group: str, attempt: int, rank: int) -> m.Rows:
    return m.Rows(group, attempt, rank, call, 1, ROW)


def _declared(call: int, group: str, attempt: int, rank: int) -> m.Declared:
    return m.Declared(group, attempt, rank, call, ROW, (m.FileEntry(f"rank_{rank}.bin", 8),))


async def _until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110  time is virtual: to look again costs nothing
        await asyncio.sleep(0.01)


async def _at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    await asyncio.sleep(0.001)
    return call(*arguments)


def measure(size: int) -> str:
    """Run a group of this size to its end; what each kind of event cost, as text."""
    gang = _Gang(size)
    loop = VirtualLoop(3600.0)
    began = time.perf_counter()
    try:
        state = loop.run_until_complete(gang.run())
    finally:
        errors = loop.forget()
    if errors or state.status != FINISHED:
        raise errors[0] if errors else RuntimeError(f"the run ended {state.status}: {state.reason}")
    events = sum(count for count, _ in gang.took.values())
    seconds = sum(spent for _, spent in gang.took.values())
    lines = [f"{size} workers, {REPORTS} reports each: {time.perf_counter() - began:.1f} s in all"]
    lines += [f"  {name:<14} {1e6 * spent / count:8.1f} us an event" for name, (count, spent) in gang.took.items()]
    lines.append(f"  {'all':<14} {1e6 * seconds / events:8.1f} us an event, {events} events")
    return "\n".join(lines)
