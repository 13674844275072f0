"""Carries out commands: messages to agents, manifests and deletions in storage, delays. And turns what comes back into
events. It decides nothing, and outlives no run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from holdfast import faultpoints
from holdfast.control import placement
from holdfast.control import vocabulary as v
from holdfast.control.loop import Controller
from holdfast.engine.base import Engine, Gang
from holdfast.errors import EngineError, FencedError, JournalError, StorageError
from holdfast.journal.recorder import Blocking
from holdfast.storage.manifest import Manifest, write_manifest
from holdfast.storage.store import Store
from holdfast.wire import messages as m
from holdfast.wire.frames import frame

RETRY_S = 0.2
RETRY_LIMIT_S = 5.0


class Job(msgspec.Struct, frozen=True):
    """What the dispatcher needs to know of a run beyond its commands."""

    run: str
    token: str
    """Told apart from other runs of this process by this prefix of the group's name on the wire."""
    program: bytes
    environment: m.Environment
    storage_timeout_s: float
    echo: str
    """Whose output reaches the console: none, rank_zero or all."""
    log_directory: str
    gang: Gang
    run_ahead: int = 1000
    """How many calls a rank may be ahead of the slowest."""


class Dispatcher:
    """The hands of one controller, and its ears on the engine."""

    def __init__(
        self,
        job: Job,
        controller: Controller,
        engine: Engine,
        store: Store,
        run: Blocking,
        *,
        on_output: Callable[[int, str], None] = lambda rank, text: None,
        on_notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.job = job
        self.pickled_errors: dict[tuple[int, int], bytes] = {}
        self.pickled_value = b""
        self._controller = controller
        self._engine = engine
        self._store = store
        self._run = run
        self._on_output = on_output
        self._on_notice = on_notice
        self._nodes: dict[tuple[str, int], tuple[str, ...]] = {}
        self._called_off: set[tuple[str, int]] = set()
        self._briefed: dict[tuple[str, int], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._deleting: set[asyncio.Task[None]] = set()
        self._carry: dict[type[v.Command], Callable[[Any], None]] = {
            v.StartGroup: lambda c: self._spawn(self._start(c)),
            v.KillGroup: self._kill,
            v.Watch: lambda c: self._tell_agents(c, m.Watch(self._wire_name(c.group), c.attempt, c.seconds)),
            v.TellPreemption: lambda c: self._tell(c, None, m.Preempt(c.deadline_ms, c.nodes)),
            v.DumpStacks: lambda c: self._tell_agents(c, m.DumpStacks(self._wire_name(c.group), c.attempt)),
            v.DigestFiles: self._digest,
            v.UploadFiles: self._upload,
            v.WriteManifest: lambda c: self._spawn(self._write_manifest(c)),
            v.Acknowledge: self._acknowledge,
            v.Refuse: lambda c: self._tell(c, c.ranks, m.Refused(c.call, c.error)),
            v.TellMeeting: lambda c: self._tell(c, c.ranks, m.Gathered(c.number, c.data, c.error)),
            v.TellCheckpoints: lambda c: self._tell(c, c.ranks, m.CheckpointList(c.number, c.kept)),
            v.TellFloor: lambda c: self._tell(c, None, m.Advance(c.floor)),
            v.DeleteCheckpoints: lambda c: self._spawn(self._delete(c), self._deleting),
            v.Wait: self._wait,
            v.Finish: self._finish,
        }
        self._hear: dict[type[m.Message], Callable[[Any, dict[str, Any]], None]] = {
            m.Rows: self._heard_rows,
            m.WorkerStarted: lambda s, who: self._post(v.RankArrived(**who)),
            m.Declared: lambda s, who: self._post(
                v.FilesDeclared(**who, call=s.call, metrics=s.metrics, files=s.files, manner=s.manner)
            ),
            m.Digested: lambda s, who: self._post(v.FilesDigested(**who, call=s.call, files=s.files)),
            m.Uploaded: lambda s, who: self._post(v.FilesUploaded(**who, index=s.index, files=s.files)),
            m.UploadTrouble: self._heard_trouble,
            m.Returned: self._heard_return,
            m.Raised: self._heard_raise,
            m.Exited: lambda s, who: self._post(
                v.RankExited(**who, status=s.status, ours=s.ours, oom=s.oom, lost=s.lost)
            ),
            m.Damaged: lambda s, who: self._post(v.CheckpointFoundDamaged(**who, index=s.index, reason=s.reason)),
            m.Met: lambda s, who: self._post(v.RankMet(**who, number=s.number, what=s.what, data=s.data, late=s.late)),
            m.CheckpointsAsked: lambda s, who: self._post(v.CheckpointsAsked(**who, number=s.number)),
            m.Quiet: lambda s, who: self._post(v.RankQuiet(**who, seconds=s.seconds)),
            m.Stacks: lambda s, who: self._post(v.StacksTold(**who, text=s.text)),
            m.Output: lambda s, who: self._on_output(s.rank, s.text),
        }
        engine.attach(self)

    def carry_out(self, command: v.Command) -> None:
        self._carry[type(command)](command)

    def hold_back(self, held: bool) -> None:
        if held:
            self._engine.pause(self)
        else:
            self._engine.resume(self)

    def agent_said(self, node: str, message: m.FromAgent) -> None:
        """Turn a message into an event, if it concerns this run."""
        if isinstance(message, m.Prepared):
            if message.notice:
                self._on_notice(message.notice)
            return
        if isinstance(message, m.Preempted):
            self._post(v.PreemptionSeen(at=self._controller.now(), node=node))
            return
        token, _, group = message.group.partition("/")
        if token != self.job.token:
            return
        who = {"at": self._controller.now(), "group": group, "attempt": message.attempt, "rank": message.rank}
        self._hear[type(message)](message, who)

    def node_lost(self, node: str, reason: str) -> None:
        self._post(v.NodeLost(at=self._controller.now(), node=node, reason=reason))

    async def close(self) -> None:
        """Stop listening, end what is under way, and leave no worker of this run behind.

        Deletions come to their end first: nobody opens a finished run again to sweep.
        """
        self._engine.detach(self)
        for group, attempt in self._nodes:
            self._kill(v.KillGroup(group=group, attempt=attempt))
        for node, _ in self._briefed:
            self._engine.send(node, m.ForgetProgram(self.job.token))
        await asyncio.gather(*self._deleting, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _post(self, event: v.Event) -> None:
        self._controller.post(event)

    def _spawn(self, work: Coroutine[Any, Any, None], kind: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if kind is None else kind
        task = asyncio.get_running_loop().create_task(self._watched(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._controller.fail(error)

    async def _start(self, command: v.StartGroup) -> None:
        who: dict[str, Any] = {"at": self._controller.now(), "group": command.group, "attempt": command.attempt}
        try:
            nodes = await self._engine.reserve(msgspec.structs.replace(self.job.gang, size=command.world_size))
        except EngineError as error:
            self._post(v.GroupNotPlaced(**who, reason=f"could not be placed: {error}"))
            return
        if (command.group, command.attempt) in self._called_off:
            self._post(v.GroupNotPlaced(**who, reason="was stopped before it was placed"))
            return
        names = tuple(node.name for node in nodes)
        self._nodes = {(command.group, command.attempt): names}
        self.pickled_errors.clear()
        for node in dict.fromkeys(nodes):
            if (node.name, node.incarnation) not in self._briefed:
                self._briefed[(node.name, node.incarnation)] = None
                self._engine.send(node.name, m.Prepare(self.job.environment))
                self._engine.send(node.name, m.Program(self.job.token, self.job.program))
        faultpoints.reach("start.before", attempt=command.attempt)
        # Before the event: it may let a KillGroup go, which must not overtake them.
        for rank, (home, place) in enumerate(zip(names, placement.places(names), strict=True)):
            self._engine.send(home, self._start_worker(command, rank, home, place))
        self._post(v.GroupPlaced(**who, nodes=names))

    def _start_worker(self, command: v.StartGroup, rank: int, node: str, place: placement.Place) -> m.StartWorker:
        resume = None if command.resume is None else m.CheckpointRef(command.resume, command.directory)
        echo = self.job.echo == "all" or (self.job.echo == "rank_zero" and rank == 0)
        return m.StartWorker(
            context=m.WorkerContext(
                run=self.job.run,
                group=self._wire_name(command.group),
                attempt=command.attempt,
                rank=rank,
                world_size=command.world_size,
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                node_rank=place.node_rank,
                node=node,
                storage_uri=self._store.uri,
                run_ahead=self.job.run_ahead,
            ),
            program=self.job.token,
            environment=self.job.environment,
            log=f"{self.job.log_directory}/attempt_{command.attempt}/rank_{rank}.log",
            echo=echo,
            resume=resume,
        )

    def _kill(self, command: v.KillGroup) -> None:
        if (command.group, command.attempt) not in self._nodes:
            self._called_off.add((command.group, command.attempt))
        for node in dict.fromkeys(self._nodes.get((command.group, command.attempt), ())):
            self._engine.send(node, m.KillGroup(self._wire_name(command.group), command.attempt, command.finish))

    def _digest(self, command: v.DigestFiles) -> None:
        message = m.Digest(self._wire_name(command.group), command.attempt, command.rank, command.call, command.files)
        self._send_to_rank(command, message)

    def _upload(self, command: v.UploadFiles) -> None:
        message = m.Upload(
            self._wire_name(command.group),
            command.attempt,
            command.rank,
            command.call,
            command.index,
            command.directory,
            self._store.uri,
            command.files,
            self.job.storage_timeout_s,
        )
        self._send_to_rank(command, message)

    def _acknowledge(self, command: v.Acknowledge) -> None:
        faultpoints.reach("ack.before", index=command.index)
        checkpoint = m.CheckpointRef(command.index, command.directory)
        self._tell(command, None, m.Committed(command.call, checkpoint))

    def _tell(self, command: Any, ranks: tuple[int, ...] | None, message: m.Message) -> None:
        """Send a message to these ranks of the command's attempt, or to all of them."""
        nodes = self._nodes.get((command.group, command.attempt), ())
        body = frame(message)
        for node in dict.fromkeys(nodes):
            there = tuple(rank for rank, home in enumerate(nodes) if home == node and (ranks is None or rank in ranks))
            if there:
                self._engine.send(node, m.Tell(self._wire_name(command.group), command.attempt, there, body))

    def _tell_agents(self, command: Any, message: m.ToAgent) -> None:
        for node in dict.fromkeys(self._nodes.get((command.group, command.attempt), ())):
            self._engine.send(node, message)

    def _send_to_rank(self, command: Any, message: m.ToAgent) -> None:
        nodes = self._nodes.get((command.group, command.attempt), ())
        if nodes:
            self._engine.send(nodes[command.rank], message)

    async def _write_manifest(self, command: v.WriteManifest) -> None:
        who: dict[str, Any] = {"group": command.group, "attempt": command.attempt, "index": command.index}
        manifest = Manifest(index=command.index, created_at=self._controller.now(), files=command.files)
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self.job.storage_timeout_s, RETRY_S
        faultpoints.reach("manifest.before", index=command.index)
        while True:
            try:
                await self._run(write_manifest, self._store, command.directory, manifest)
                break
            except StorageError as error:
                left = deadline - loop.time()
                if left <= 0:
                    self._post(v.ManifestGaveUp(at=self._controller.now(), **who, error=str(error)))
                    return
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, RETRY_LIMIT_S)
        faultpoints.reach("manifest.after", index=command.index)
        self._post(v.ManifestWritten(at=self._controller.now(), **who))

    async def _delete(self, command: v.DeleteCheckpoints) -> None:
        """Delete what a durable fact gave up. What cannot be deleted now is swept when the run is next opened."""
        try:
            await self._controller.recorder.confirm()
            for directory in command.directories:
                faultpoints.reach("delete.before", directory=directory)
                await self._run(self._store.delete_tree, directory)
                faultpoints.reach("delete.after", directory=directory)
        except FencedError as error:
            self._controller.fail(error)
        except (StorageError, JournalError) as error:
            self._on_notice(f"could not delete {', '.join(command.directories)}: {error}")
        self._post(v.CheckpointsDeleted(at=self._controller.now(), directories=command.directories))

    def _wait(self, command: v.Wait) -> None:
        async def pass_time() -> None:
            await asyncio.sleep(command.seconds)
            self._post(v.DelayPassed(at=self._controller.now(), name=command.name))

        self._spawn(pass_time())

    def _finish(self, command: v.Finish) -> None:
        faultpoints.reach("run.ended")
        self._controller.finish()

    def _heard_rows(self, said: m.Rows, who: dict[str, Any]) -> None:
        self._post(v.RowsArrived(**who, first=said.first, count=said.count, rows=said.rows))

    def _heard_trouble(self, said: m.UploadTrouble, who: dict[str, Any]) -> None:
        if said.final:
            self._post(v.UploadGaveUp(**who, index=said.index, error=said.error, unreadable=said.unreadable))
        else:
            patience = f"{self.job.storage_timeout_s:g} s"
            self._on_notice(f"rank {said.rank}'s upload failed and is tried again for {patience}: {said.error}")

    def _heard_return(self, said: m.Returned, who: dict[str, Any]) -> None:
        if said.rank == 0:
            self.pickled_value = said.pickled
        self._post(v.RankReturned(**who, value=said.value or b"null"))

    def _heard_raise(self, said: m.Raised, who: dict[str, Any]) -> None:
        self.pickled_errors[(said.attempt, said.rank)] = said.error.pickled
        self._post(
            v.RankRaised(
                **who,
                error=said.error.kind,
                message=said.error.message,
                traceback=said.error.traceback,
                started=said.started,
            )
        )

    def _wire_name(self, group: str) -> str:
        return f"{self.job.token}/{group}"
