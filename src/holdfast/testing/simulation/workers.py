"""Workers that play a training function over the real messages, and the ``Processes`` port that runs them.

A worker goes on from the step that its checkpoint holds, reports a row for each step, brings files to some, and waits
for the commit, as the real session does. What it writes is a function of its rank and step alone, so that anybody can
tell whether a checkpoint or a metric is what it should be. A worker must never know more than its messages say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from holdfast.engine.processes import Listener, Processes, WorkerExit, WorkerKey
from holdfast.testing.simulation.clock import RUNNING, Process
from holdfast.wire import messages as m
from holdfast.wire.frames import FrameReader, frame, row_frame
from holdfast.worker.session import BACKLOG

if TYPE_CHECKING:
    from holdfast.testing.simulation.world import World

SHARED = "model.bin"
CONFLICT = "config.bin"


class Plan(msgspec.Struct, frozen=True):
    """The training function: how many steps, and which of them bring which files."""

    steps: int
    period: int
    """A checkpoint at every so many steps; 0 for none."""
    bringers: tuple[int, ...]
    """The ranks that bring a file of their own."""
    shared: bool
    """Whether every bringer brings the same file too."""
    conflict: bool
    """Whether the bringers bring different files under one name, which cannot be committed."""
    pace_s: float
    manner: m.Manner = m.Manner()
    """In the background or not, under our name or the user's own."""

    def brings(self, rank: int, step: int) -> tuple[str, ...]:
        """The names of the files that a rank brings to a step."""
        if not self.period or step % self.period or rank not in self.bringers:
            return ()
        names = [f"rank_{rank}.bin"]
        names += [SHARED] if self.shared else []
        names += [CONFLICT] if self.conflict else []
        return tuple(names)

    def files(self, step: int) -> dict[str, bytes]:
        """What a whole checkpoint of this step holds."""
        return {name: content(name, rank, step) for rank in self.bringers for name in self.brings(rank, step)}


def content(name: str, rank: int, step: int) -> bytes:
    """The bytes of a file; the step stands first."""
    about = "all" if name == SHARED else f"rank {rank}"
    return f"{step} {name} of {about} ".encode() * 2


def metrics_of(rank: int, step: int) -> bytes:
    """A row, as the worker reports it."""
    return b'{"step":%d,"rank":%d,"score":%d}' % (step, rank, step * 7 % 5)


class Death(msgspec.Struct, frozen=True):
    """A way to end that was chosen for a worker: at its next report, or in its first moments."""

    kind: str
    message: str = "made to"


class PlayedWorker:
    """One worker: its process, its two pipes, and what it does."""

    def __init__(self, world: World, home: PlayedProcesses, key: WorkerKey) -> None:
        self.world = world
        self.home = home
        self.key = key
        self.rank = key[2]
        self.process = Process(f"{home.node}/worker {key[1]}.{key[2]}", home.process.epoch)
        self.reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
        self.unread = b""
        self.reading = False
        self.paused = False
        self.exit: WorkerExit | None = None
        self.gone = False
        self.doom: Death | None = None
        self.started = False
        self.step = -1
        """The step that it is at or has made; below 0 until it knows where to begin."""
        self.calls = 0
        self.last_delivery = 0.0
        self._frames: FrameReader[m.ToWorker] = FrameReader(m.ToWorker)
        self._begin: m.Begin | None = None
        self._fetched: m.Fetched | None = None
        self._unsettled: set[int] = set()
        self._refusal = ""
        self._woken: asyncio.Future[None] | None = None

    def take(self, data: bytes) -> None:
        """Bytes have arrived from the agent."""
        for message in self._frames.feed(data):
            if isinstance(message, m.Begin):
                self._begin = message
                self.world.truth.begun(self.key, self.process.epoch, message)
            elif isinstance(message, m.Committed):
                self.world.truth.told_committed(self, message)
                self._unsettled.discard(message.call)
            elif isinstance(message, m.Refused):
                self._refusal = message.error
                self._unsettled.discard(message.call)
            elif isinstance(message, m.Fetched):
                self._fetched = message
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def live(self) -> None:
        """From the fork to the end."""
        world = self.world
        while self._begin is None:
            await self._wait()
        if await self._dies_young():
            return
        self.started = True
        self._say(m.Started(1000 + self.rank))
        step = 0
        if self._begin.resume is not None:
            found = await self._load(self._begin.resume)
            if found is None:
                return
            step = found
        self.step = step
        while step < world.plan.steps:
            await world.pause(world.plan.pace_s)
            if self.doom is not None:
                if self.doom.kind == "hang":
                    await asyncio.get_running_loop().create_future()
                self._end(self.doom)
                return
            self.step = step = step + 1
            if not await self._report(step):
                return
        if not await self._settle_down_to(0):
            return
        self._say(m.Return(b'{"steps":%d}' % step, b""))
        await world.pause(0.002 if world.chance.random() < 0.95 else 30.0)
        self.home.ended(self, WorkerExit(0))

    async def _dies_young(self) -> bool:
        await self.world.pause(0.005)
        if self.doom is None or not self.doom.kind.startswith("startup"):
            return False
        if self.doom.kind == "startup_raise":
            self._say(m.Raise(m.ErrorInfo("ImportError", self.doom.message), False))
        self.home.ended(self, WorkerExit(1))
        return True

    async def _load(self, resume: m.CheckpointRef) -> int | None:
        self._say(m.Fetch(resume))
        self._say(m.Inside(True))
        while self._fetched is None:
            await self._wait()
        self._say(m.Inside(False))
        if self._fetched.error:
            self._raise("DamagedError", self._fetched.error)
            return None
        return self.world.truth.loaded(self, resume)

    async def _report(self, step: int) -> bool:
        """One call; False when it was the last thing that this worker did."""
        self.calls += 1
        metrics = metrics_of(self.rank, step)
        names = self.world.plan.brings(self.rank, step)
        if not names:
            self.write(row_frame(metrics))
            return True
        directory = f"/scratch/{self.key[1]}/{self.home.process.name}/{self.rank}/{self.calls}"
        files = []
        for name in names:
            data = content(name, self.rank, step)
            self.world.files[f"{directory}/{name}"] = data
            files.append(m.FileEntry(name, len(data)))
        manner = self.world.plan.manner
        self._say(m.Declare(self.calls, metrics, directory, tuple(files), manner))
        self._unsettled.add(self.calls)
        return await self._settle_down_to(BACKLOG if manner.mode == m.ASYNC else 0)

    async def _settle_down_to(self, backlog: int) -> bool:
        if len(self._unsettled) > backlog:
            self._say(m.Inside(True))
            while len(self._unsettled) > backlog:
                await self._wait()
            self._say(m.Inside(False))
        if self._refusal:
            self._raise("ReportError", self._refusal)
            return False
        return True

    def _end(self, death: Death) -> None:
        if death.kind == "return":
            self._say(m.Return(b'"early"', b""))
            self.home.ended(self, WorkerExit(0))
        elif death.kind == "exit":
            self.home.ended(self, WorkerExit(3))
        elif death.kind == "peer_loss":
            self._raise("ConnectionResetError", "connection reset by peer")
        else:
            self._raise("ValueError", death.message)

    def _raise(self, kind: str, message: str) -> None:
        self._say(m.Raise(m.ErrorInfo(kind, message), True))
        self.home.ended(self, WorkerExit(1))

    def _say(self, message: m.Message) -> None:
        self.write(frame(message))

    def write(self, data: bytes) -> None:
        self.unread += data
        self.home.read_soon(self)

    async def _wait(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        await self._woken


class PlayedProcesses(Processes):
    """One node's workers."""

    def __init__(self, world: World, node: str, process: Process) -> None:
        self.world = world
        self.node = node
        self.process = process
        self.workers: dict[WorkerKey, PlayedWorker] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    async def prepare(self, environment: m.Environment) -> str:
        await self.world.pause(0.01)
        return ""

    def start(
        self, key: WorkerKey, environment: m.Environment, log: str, variables: Mapping[str, str], first: bytes
    ) -> None:
        if key in self.workers:
            self.world.violate("engine", f"{key} was started twice")
            return
        worker = self.workers[key] = PlayedWorker(self.world, self, key)
        self.world.note("start", self.node, *key)
        self.world.loop.spawn(worker.process, worker.live())
        self.send(key, first)
        self.world.born(worker)

    def send(self, key: WorkerKey, data: bytes) -> None:
        worker = self.workers.get(key)
        if worker is None:
            return
        loop = self.world.loop
        worker.last_delivery = max(worker.last_delivery, loop.now + self.world.delay(0.0005))
        loop.call_at(worker.last_delivery, self._deliver, worker, data, context=worker.process.context)

    def kill(self, key: WorkerKey) -> None:
        worker = self.workers.get(key)
        if worker is not None:
            self.ended(worker, WorkerExit(-9, ours=True))

    def signal(self, key: WorkerKey, number: int) -> None:
        """Played workers have no stacks to write."""

    def pause(self, key: WorkerKey) -> None:
        if key in self.workers:
            self.workers[key].paused = True

    def resume(self, key: WorkerKey) -> None:
        worker = self.workers.get(key)
        if worker is not None:
            worker.paused = False
            self.read_soon(worker)

    async def close(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        """Every worker is gone, and nobody is told."""
        for worker in self.workers.values():
            self.world.loop.kill(worker.process)
        self.workers.clear()

    def ended(self, worker: PlayedWorker, how: WorkerExit) -> None:
        """The worker's process is dead. Whoever ended it first decides how."""
        if worker.exit is not None:
            return
        worker.exit = how
        self.world.loop.kill(worker.process)
        self.world.note("death", self.node, *worker.key, how.status, how.ours, how.oom, how.lost)
        when = self.world.loop.now + self.world.delay(0.001)
        self.world.loop.call_at(when, self._reap, worker, context=self.process.context)

    def read_soon(self, worker: PlayedWorker) -> None:
        if worker.reading or worker.paused or worker.gone:
            return
        worker.reading = True
        when = self.world.loop.now + self.world.delay(0.0005)
        self.world.loop.call_at(when, self._read, worker, context=self.process.context)

    def _deliver(self, worker: PlayedWorker, data: bytes) -> None:
        self.world.step("to worker", worker.process.name)
        if worker.process.state is RUNNING:
            worker.take(data)

    def _read(self, worker: PlayedWorker) -> None:
        worker.reading = False
        if worker.gone or worker.paused:
            return
        data = worker.unread
        if self.world.chance.random() < 0.1:
            data = data[: self.world.chance.randrange(len(data) + 1)]
        worker.unread = worker.unread[len(data) :]
        if worker.unread:
            self.read_soon(worker)
        self.world.step("from worker", worker.process.name)
        self._hear(worker, data)

    def _reap(self, worker: PlayedWorker) -> None:
        """The last words first, then the exit."""
        data, worker.unread = worker.unread, b""
        worker.gone = True
        self.world.step("reap", worker.process.name)
        self._hear(worker, data)
        self.workers.pop(worker.key, None)
        assert self._listener is not None
        assert worker.exit is not None
        self._listener.worker_exited(worker.key, worker.exit)

    def _hear(self, worker: PlayedWorker, data: bytes) -> None:
        assert self._listener is not None
        for message in worker.reader.feed(data):
            if isinstance(message, list):
                self._listener.worker_rows(worker.key, message)
            else:
                self._listener.worker_message(worker.key, message)


def step_of(data: bytes) -> int:
    """The step that a file of a checkpoint holds."""
    return int(data.split(b" ", 1)[0])
