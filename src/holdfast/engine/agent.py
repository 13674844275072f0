"""One node's agent: starts workers on request, carries their messages, uploads their checkpoints, verifies what they
load.

The agent decides nothing about a run: it does what the controller says and tells what happened. Its processes, its
uplink, its clock and its stores are given to it, so that the simulator runs this very code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdfast import faultpoints
from holdfast.engine.launch import Boot
from holdfast.engine.outputs import LogTail
from holdfast.engine.processes import Processes, WorkerExit, WorkerKey
from holdfast.engine.watchdog import Watchdog
from holdfast.errors import DamagedError, StorageError
from holdfast.storage.manifest import read_manifest, verify
from holdfast.storage.store import SourceError, Store, open_store
from holdfast.storage.transfer import upload
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel, connect
from holdfast.wire.frames import frame

TAIL_S = 0.2
COMPANY_S = 0.001
"""How long a row waits for others of its rank, so that many travel as one message."""
THREADS = 8
RECENT = 100
"""How many checkpoints of an attempt are remembered as verified."""
VERIFY_PAUSE_S = 0.05
VERIFY_PATIENCE_S = 60.0

T = TypeVar("T")


class Uplink(Protocol):
    """The agent's way to the controller."""

    def send(self, message: m.Message) -> None: ...

    @property
    def congested(self) -> bool: ...

    async def drained(self) -> None: ...


class _Worker:
    """What the agent knows of a worker that it started."""

    def __init__(self, start: m.StartWorker, tail: LogTail | None) -> None:
        self.storage_uri = start.context.storage_uri
        self.calls = 0
        self.rows: list[bytes] = []
        self.tail = tail


class Agent:
    """See the module's docstring. Lives on one event loop."""

    def __init__(
        self,
        uplink: Uplink,
        folder: Path,
        processes: Processes,
        run: Callable[..., Any],
        opener: Callable[[str], Store] = open_store,
    ) -> None:
        self._uplink = uplink
        self._folder = folder
        self._processes = processes
        self._run = run
        self._opener = opener
        self._stores: dict[str, Store] = {}
        self._programs: dict[str, bytes] = {}
        self._workers: dict[WorkerKey, _Worker] = {}
        self._declared: dict[tuple[WorkerKey, int], m.Declare] = {}
        """What ranks have brought and nobody has asked to upload yet; it may outlive them."""
        self._uploads: dict[tuple[WorkerKey, int], asyncio.Task[None]] = {}
        self._verified: dict[tuple[str, int, int], asyncio.Task[StorageError | None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._tailing: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(uplink.send, processes, run, self._spawn)
        processes.listen(self)

    def handle(self, message: m.ToAgent) -> None:
        """Do what the controller says."""
        match message:
            case m.StartWorker():
                self._start(message)
            case m.KillGroup():
                self._kill_group(message)
            case m.Upload():
                self._begin_upload(message)
            case m.Digest():
                self._spawn(self._digest(message))
            case m.Tell():
                for rank in message.ranks:
                    self._processes.send((message.group, message.attempt, rank), message.body)
            case m.Watch():
                self._watchdog.limit(message)
            case m.DumpStacks():
                self._watchdog.dump(message)
            case m.Prepare():
                faultpoints.follow(message.environment.variables)
                self._spawn(self._prepare(message))
            case m.Program():
                self._programs[message.id] = message.body
            case m.ForgetProgram():
                self._programs.pop(message.id, None)

    async def close(self) -> None:
        """End every worker and everything that is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._processes.close()

    def worker_rows(self, key: WorkerKey, rows: list[bytes]) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        if not worker.rows:
            asyncio.get_running_loop().call_later(COMPANY_S, self._pass_on_rows, key, worker)
        worker.rows += rows
        self._watchdog.progress(key)
        if self._uplink.congested and not self._draining:
            self._draining = True
            self._spawn(self._hold_back())

    def worker_message(self, key: WorkerKey, message: m.FromWorker) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        if isinstance(message, m.Inside | m.Heartbeat):
            self._watchdog.enter(key, isinstance(message, m.Inside) and message.inside)
            return
        self._pass_on_rows(key, worker)
        self._watchdog.progress(key)
        match message:
            case m.Declare():
                worker.calls = message.call
                self._declared[(key, message.call)] = message
                self._uplink.send(m.Declared(*key, message.call, message.metrics, message.files, message.manner))
            case m.Started():
                self._watchdog.begin(key)
                self._uplink.send(m.WorkerStarted(*key, message.pid))
            case m.Fetch():
                self._spawn(self._fetch(key, worker.storage_uri, message.checkpoint))
            case m.Meet():
                self._uplink.send(m.Met(*key, message.number, message.what, message.data, message.late))
            case m.ListCheckpoints():
                self._uplink.send(m.CheckpointsAsked(*key, message.number))
            case m.Return():
                self._watchdog.end(key)
                self._uplink.send(m.Returned(*key, message.value, message.pickled))
            case m.Raise():
                self._watchdog.end(key)
                self._uplink.send(m.Raised(*key, message.error, message.started))

    def worker_exited(self, key: WorkerKey, end: WorkerExit) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            self._pass_on_rows(key, worker)
            if worker.tail is not None:
                self._tell_output(key, worker.tail, last=True)
        self._watchdog.remove(key)
        self._uplink.send(m.Exited(*key, end.status, end.ours, end.oom, end.lost))

    def _pass_on_rows(self, key: WorkerKey, worker: _Worker) -> None:
        rows, worker.rows = worker.rows, []
        if rows:
            self._uplink.send(m.Rows(*key, worker.calls + 1, len(rows), b",".join(rows)))
            worker.calls += len(rows)

    def _start(self, message: m.StartWorker) -> None:
        context = message.context
        key: WorkerKey = (context.group, context.attempt, context.rank)
        log = self._store(context.storage_uri).local_path(message.log) or self._folder / message.log
        tail = LogTail(log) if message.echo else None
        self._workers[key] = _Worker(message, tail)
        self._watchdog.add(key, log)
        self._declared = {what: brought for what, brought in self._declared.items() if not _older(what[0], key)}
        begin = m.Begin(self._programs.get(message.program, b""), context, message.resume)
        self._processes.start(key, message.environment, str(log), {}, frame(begin))
        if tail is not None and self._tailing is None:
            self._tailing = self._spawn(self._follow_outputs())

    def _kill_group(self, message: m.KillGroup) -> None:
        for (key, index), task in list(self._uploads.items()):
            if key[:2] == (message.group, message.attempt) and index not in message.finish:
                task.cancel()
        for key in list(self._workers):
            if key[:2] == (message.group, message.attempt):
                self._processes.kill(key)

    async def _prepare(self, message: m.Prepare) -> None:
        self._uplink.send(m.Prepared(message.environment, await self._processes.prepare(message.environment)))

    def _begin_upload(self, message: m.Upload) -> None:
        key = (message.group, message.attempt, message.rank)
        declared = self._declared.pop((key, message.call), None)
        if declared is not None:
            self._uploads[(key, message.index)] = self._spawn(self._upload(key, declared, message))

    async def _upload(self, key: WorkerKey, declared: m.Declare, message: m.Upload) -> None:
        def on_trouble(error: Exception) -> None:
            self._uplink.send(m.UploadTrouble(*key, message.index, str(error), False))

        faultpoints.reach("upload.begin", rank=message.rank, index=message.index)
        try:
            files = await upload(
                Path(declared.directory),
                message.files,
                self._store(message.storage_uri),
                message.directory,
                run=self._run,
                patience_s=message.patience_s,
                on_trouble=on_trouble,
            )
        except StorageError as error:
            unreadable = isinstance(error, SourceError)
            self._uplink.send(m.UploadTrouble(*key, message.index, str(error), True, unreadable))
        else:
            faultpoints.reach("upload.end", rank=message.rank, index=message.index)
            self._uplink.send(m.Uploaded(*key, message.index, files))
            if declared.manner.delete:
                await self._run(shutil.rmtree, declared.directory, True)
        finally:
            self._uploads.pop((key, message.index), None)

    async def _digest(self, message: m.Digest) -> None:
        key = (message.group, message.attempt, message.rank)
        declared = self._declared.get((key, message.call))
        if declared is None:
            return
        source = self._opener(declared.directory)
        files = []
        try:
            for name in message.files:
                entry: m.FileEntry = await self._run(source.checksum, name)
                files.append(m.FileEntry(name, entry.size, entry.checksum))
        except StorageError as error:
            self._uplink.send(m.UploadTrouble(*key, -1, str(error), True, True))
            return
        self._uplink.send(m.Digested(*key, message.call, tuple(files)))

    async def _fetch(self, key: WorkerKey, storage_uri: str, checkpoint: m.CheckpointRef) -> None:
        """Verify a checkpoint once for all of an attempt's workers on this node, and tell this one where it lies."""
        what = (key[0], key[1], checkpoint.index)
        verifying = self._verified.get(what)
        if verifying is None:
            verifying = self._spawn(self._verify(self._store(storage_uri), checkpoint.directory))
            recent = list(self._verified.items())[-RECENT:]
            self._verified = {old: found for old, found in recent if old[:2] == key[:2]}
            self._verified[what] = verifying
        error = await verifying
        if isinstance(error, DamagedError):
            self._uplink.send(m.Damaged(*key, checkpoint.index, str(error)))
        path = self._store(storage_uri).local_path(checkpoint.directory)
        message = f"{checkpoint.directory} cannot be loaded: {error}" if error else ""
        self._processes.send(key, frame(m.Fetched(checkpoint.index, str(path), message)))

    async def _verify(self, store: Store, directory: str) -> StorageError | None:
        """What is wrong with a checkpoint. A store that fails is asked again for a while: it says nothing about what it
        holds, and a rank that could not load would be charged for it."""
        pause, deadline = VERIFY_PAUSE_S, asyncio.get_running_loop().time() + VERIFY_PATIENCE_S
        while True:
            try:
                manifest = await self._run(read_manifest, store, directory)
                if manifest is None:
                    return DamagedError("its manifest is missing")
                await self._run(verify, store, directory, manifest)
                return None
            except DamagedError as error:
                return error
            except StorageError as error:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    return error
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, 5.0)

    async def _hold_back(self) -> None:
        """Stop reading from workers until the controller has caught up."""
        held = list(self._workers)
        for key in held:
            self._processes.pause(key)
            self._watchdog.hold(key, True)
        try:
            await self._uplink.drained()
        finally:
            self._draining = False
            for key in held:
                self._processes.resume(key)
                self._watchdog.hold(key, False)

    async def _follow_outputs(self) -> None:
        """Pass on what echoed workers print, until none is left."""
        try:
            while tails := [(key, worker.tail) for key, worker in self._workers.items() if worker.tail is not None]:
                for key, tail in tails:
                    self._tell_output(key, tail, last=False)
                await asyncio.sleep(TAIL_S)
        finally:
            self._tailing = None

    def _tell_output(self, key: WorkerKey, tail: LogTail, *, last: bool) -> None:
        text = tail.read(last=last)
        if text and not self._watchdog.is_dumping(key):
            self._uplink.send(m.Output(*key, text))

    def _store(self, uri: str) -> Store:
        if uri not in self._stores:
            self._stores[uri] = self._opener(uri)
        return self._stores[uri]

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "the agent has failed", "exception": error})


def _older(one: WorkerKey, other: WorkerKey) -> bool:
    """Is this a worker of an earlier attempt of the same group?"""
    return one[0] == other[0] and one[1] < other[1]


def threads(pool: concurrent.futures.Executor) -> Callable[..., Any]:
    """Runs blocking calls in a pool of threads."""

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    return run


async def run_agent(boot: Boot, processes: Processes) -> None:
    """Be the agent of a node until the driver's connection ends."""
    channel = await connect(boot.address, boot.secret, m.ToAgent)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _fail(channel, context))
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        agent = Agent(channel, Path(boot.folder), processes, threads(pool))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, channel.send, m.Preempted())
        await channel.listen(agent.handle)
        await agent.close()


def _fail(channel: Channel, context: dict[str, Any]) -> None:
    """An error that nobody expected: say it, and end this node rather than leave the controller waiting for an
    answer.
    """
    error = context.get("exception")
    sys.stderr.write(f"holdfast: this node's agent ends: {context['message']}\n")
    if error is not None:
        traceback.print_exception(error)
    channel.hang_up()
