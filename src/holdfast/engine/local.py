"""The engine of one machine: virtual nodes, each with its own janitor, agent and folder, as children of the driver.

Nodes are started when a gang first needs them and live as long as the driver. A node that was lost is started again by
the next ``reserve``. Without ``nodes``, there is one node and a CPU gang larger than the machine simply shares its
cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from holdfast.engine.base import Engine, Gang, Listener, Node
from holdfast.engine.launch import Boot, begin_janitor, instruct
from holdfast.errors import ConfigurationError, EngineError
from holdfast.wire.channel import Channel, serve
from holdfast.wire.handshake import new_secret
from holdfast.wire.messages import FromAgent, Preempted, ToAgent

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
MAX_SOCKET_PATH = 100
RUNTIME_VARIABLE = "HOLDFAST_RUNTIME_DIR"


class LocalEngine(Engine):
    """See the module's docstring. Lives on one event loop."""

    name = "local"

    def __init__(
        self,
        *,
        nodes: int | None = None,
        cpus_per_node: float | None = None,
        gpus_per_node: float = 0,
        transport: str = "unix",
    ) -> None:
        self._shares = nodes is None
        cores = len(os.sched_getaffinity(0))
        self._nodes = {
            name: _LocalNode(name, float(cpus_per_node or cores), float(gpus_per_node))
            for name in (f"node-{number}" for number in range(nodes or 1))
        }
        self._transport = transport
        self._listeners: list[Listener] = []
        self._pausing: list[Listener] = []
        self._reading = asyncio.Event()
        self._reading.set()
        self._folder = _job_folder()
        self._closed = False

    @property
    def description(self) -> str:
        """What a person is told: how many nodes of how many cores."""
        some = next(iter(self._nodes.values()))
        if self._shares:
            return f"local ({some.cpus:g} cores)"
        return f"local ({len(self._nodes)} nodes of {some.cpus:g} CPUs)"

    def check(self, gang: Gang) -> None:
        self._fit(gang)

    def notice(self, gang: Gang) -> str:
        some = next(iter(self._nodes.values()))
        if not self._shares or gang.size * gang.cpus <= some.cpus:
            return ""
        return f"{gang.size} workers share {some.cpus:g} core{'s' if some.cpus != 1 else ''}"

    async def reserve(self, gang: Gang) -> tuple[Node, ...]:
        names = self._fit(gang)
        wanted = [self._nodes[name] for name in dict.fromkeys(names)]
        try:
            async with asyncio.timeout(min(gang.timeout_s, START_TIMEOUT_S)):
                await asyncio.gather(*(self._replace(node) for node in wanted if node.preempted))
                while any(node.channel is None for node in wanted):  # one may be lost while another one starts
                    await asyncio.gather(*(self._ensure(node) for node in wanted))
        except TimeoutError:
            raise EngineError(
                f"the agents of {', '.join(node.name for node in wanted)} did not start in time"
            ) from None
        return tuple(self._nodes[name].told() for name in names)

    def send(self, node: str, message: ToAgent) -> None:
        channel = self._nodes[node].channel
        if channel is not None:
            channel.send(message)

    def attach(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def detach(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        self.resume(listener)

    def pause(self, listener: Listener) -> None:
        if listener not in self._pausing and not self._closed:
            self._pausing.append(listener)
            self._reading.clear()

    def resume(self, listener: Listener) -> None:
        if listener in self._pausing:
            self._pausing.remove(listener)
        if not self._pausing:
            self._reading.set()

    async def close(self) -> None:
        self._closed = True
        self._reading.set()
        shutil.rmtree(self._folder, ignore_errors=True)  # now, while there are janitors to do it if this process dies
        await asyncio.gather(*(self._end(node) for node in self._nodes.values()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def agent_pid(self, node: str) -> int | None:
        """The agent's pid, where it runs; for people and tests that want to end it."""
        return self._nodes[node].agent_pid

    def _fit(self, gang: Gang) -> tuple[str, ...]:
        """The node of each rank, or an error that says what is missing."""
        if self._shares and not gang.gpus:
            return (next(iter(self._nodes)),) * gang.size
        names: list[str] = []
        for node in self._nodes.values():
            names.extend([node.name] * min(node.room_for(gang), gang.size - len(names)))
        if len(names) < gang.size:
            have = ", ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in self._nodes.values())
            raise EngineError(
                f"{gang.size} workers with {gang.cpus:g} CPUs and {gang.gpus:g} GPUs each were asked for; there is "
                f"room for {len(names)} ({have}), so {gang.size - len(names)} are missing. Ask for fewer workers, or "
                "give holdfast.init() more nodes or CPUs per node."
            )
        return tuple(names)

    async def _ensure(self, node: _LocalNode) -> None:
        """Have this node's agent connected."""
        async with node.starting:
            if node.channel is not None:
                return
            if self._closed:
                raise EngineError("the engine is closed")
            try:
                await self._start(node)
            except OSError as error:
                raise EngineError(
                    f"the agent of {node.name} cannot be started: {error}. Its sockets lie in {self._folder}; set "
                    f"{RUNTIME_VARIABLE} to another folder if that one cannot be used"
                ) from error

    async def _replace(self, node: _LocalNode) -> None:
        """End an agent that was preempted; another one starts in its place."""
        async with node.starting:
            if node.preempted and node.channel is not None:
                await node.channel.close()
                await node.gone()

    async def _start(self, node: _LocalNode) -> None:
        await node.gone()
        node.preempted = False
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Channel] = loop.create_future()
        secret = new_secret()
        node.incarnation += 1

        async def on_peer(channel: Channel) -> None:
            if arrived.done():
                await channel.close()
            else:
                arrived.set_result(channel)

        # The janitor comes first: once it is there, nothing that is made now outlives this driver.
        node.janitor = await loop.run_in_executor(None, begin_janitor, os.getpid(), str(self._folder))
        node.ended = ended = _end_of(node.janitor)
        folder = self._folder / f"{node.name}.{node.incarnation}"
        server, address = await self._serve(folder, secret, on_peer)
        try:
            instruct(node.janitor, self._boot(node.name, address, secret, folder))
            both: set[asyncio.Future[Any]] = {arrived, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}.sock")
        if not arrived.done():
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # until there is another janitor, nobody would remove it after this driver's death
            raise EngineError(f"the agent of {node.name} ended with code {node.janitor.returncode} before it connected")
        node.channel = arrived.result()
        node.listening = loop.create_task(self._listen(node, node.channel))

    async def _serve(
        self, folder: Path, secret: bytes, on_peer: Callable[[Channel], Awaitable[None]]
    ) -> tuple[asyncio.Server, str]:
        wanted = f"unix:{folder}.sock" if self._transport == "unix" else "tcp:127.0.0.1:0"
        while True:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                return await serve(wanted, secret, FromAgent, on_peer)
            except FileNotFoundError:
                pass  # another node's janitor has just ended, and took the empty folder with it

    def _boot(self, name: str, address: str, secret: bytes, folder: Path) -> Boot:
        return Boot(
            driver_pid=os.getpid(),
            node=name,
            address=address,
            secret=secret,
            folder=str(folder),
            sys_path=tuple(sys.path),
            job_folder=str(self._folder),
        )

    async def _listen(self, node: _LocalNode, channel: Channel) -> None:
        def heard(message: FromAgent) -> None:
            node.preempted = node.preempted or isinstance(message, Preempted)
            for listener in tuple(self._listeners):
                listener.agent_said(node.name, message)

        reason = await channel.listen(heard, self._reading.wait)
        node.channel = None
        if not self._closed:
            for listener in tuple(self._listeners):
                listener.node_lost(node.name, reason)

    async def _end(self, node: _LocalNode) -> None:
        async with node.starting:
            if node.channel is not None:
                await node.channel.close()
            await node.gone()


class _LocalNode:
    """One virtual node: what it offers, and the processes that stand for it."""

    def __init__(self, name: str, cpus: float, gpus: float) -> None:
        self.name = name
        self.cpus = cpus
        self.gpus = gpus
        self.incarnation = 0
        self.preempted = False
        self.channel: Channel | None = None
        self.janitor: subprocess.Popen[bytes] | None = None
        self.ended: asyncio.Future[int] | None = None
        self.listening: asyncio.Task[None] | None = None
        self.starting = asyncio.Lock()

    def told(self) -> Node:
        return Node(self.name, self.incarnation, self.cpus, self.gpus)

    def room_for(self, gang: Gang) -> int:
        rooms = [int(self.cpus / gang.cpus)] if gang.cpus else []
        rooms += [int(self.gpus / gang.gpus)] if gang.gpus else []
        return min(rooms, default=gang.size)

    @property
    def agent_pid(self) -> int | None:
        if self.janitor is None or self.channel is None:
            return None
        children = psutil.Process(self.janitor.pid).children()
        return children[0].pid if children else None

    async def gone(self) -> None:
        """Wait until the node's processes are gone, and make sure that they go."""
        if self.janitor is None or self.ended is None:
            return
        if self.listening is not None:
            await self.listening
        assert self.janitor.stdin is not None
        self.janitor.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.janitor.kill()
            await self.ended
        self.janitor = self.ended = self.listening = None


def _end_of(janitor: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """The janitor's exit code, once it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    pidfd = os.pidfd_open(janitor.pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended.set_result(janitor.wait())

    loop.add_reader(pidfd, reap)
    return ended


def _job_folder() -> Path:
    """A private folder for this driver's sockets and nodes, outside ``/tmp``, which a task may not see."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    fallback = f"{session}/holdfast" if session and os.path.isdir(session) else f"/var/tmp/holdfast-{os.getuid()}"
    base = Path(os.environ.get(RUNTIME_VARIABLE) or fallback)
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = base.stat().st_uid
    except OSError as error:
        raise ConfigurationError(
            f"the folder {base} for sockets cannot be made: {error.strerror}; set {RUNTIME_VARIABLE} to a folder that "
            "you may write"
        ) from error
    if not os.access(base, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{base} cannot be written; set {RUNTIME_VARIABLE} to a folder that you may write")
    if owner != os.getuid():
        raise ConfigurationError(f"{base} belongs to another user; set {RUNTIME_VARIABLE} to a folder of your own")
    folder = base / f"{os.getpid()}-{secrets.token_hex(3)}"
    if len(str(folder)) > MAX_SOCKET_PATH - 20:
        raise ConfigurationError(
            f"{folder} is too long for a socket's path; set {RUNTIME_VARIABLE} to a shorter folder"
        )
    return folder
