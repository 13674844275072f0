"""Workers forked by zygotes, on this machine.

It carries the workers' messages and tells of each death once, after the last message of the dead, when nothing is left
of what they had started. It runs on the agent's event loop, never blocks it, and never starts a process by any way but
a zygote: a child of the agent that is not a zygote is what a dead zygote has left behind, and is killed.

A zygote that dies takes its workers with it, and the next start makes a new one. Without the pristine zygote none can
be made: workers that run go on, but the first need of a new zygote ends the agent, and its janitor then ends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

from holdfast.engine import zygote as z
from holdfast.engine.link import Link
from holdfast.engine.processes import Listener, Processes, WorkerExit, WorkerKey
from holdfast.errors import WireError
from holdfast.wire.frames import FrameReader
from holdfast.wire.messages import Environment, FromWorker
from holdfast.worker import kernel, process

READ_SIZE = 256 * 1024
STATUS_S = 10.0
"""How long after a worker's death its zygote may take to say so, before it is held to be stuck and killed."""
IDLE_ZYGOTES = 3
"""So many zygotes without workers are kept for the next run."""


class _Zygote:
    """An environment's zygote, as the agent knows it. ``identity`` is the environment that was asked for."""

    def __init__(self, identity: bytes, environment: Environment, link: Link, notice: str) -> None:
        self.identity = identity
        self.environment = environment
        self.link = link
        self.notice = notice
        self.pid = -1
        self.pidfd = -1
        self.ready = False
        self.gone = False
        self.waiting: list[_Worker] = []
        self.workers: dict[int, _Worker] = {}
        self.prepared: list[asyncio.Future[str]] = []

    @property
    def idle(self) -> bool:
        return self.ready and not self.workers


class _Worker:
    """A worker, as the agent knows it: waiting for its zygote, then forked, then dead."""

    def __init__(self, key: WorkerKey, request: z.Fork, zygote: _Zygote) -> None:
        self.key = key
        self.request = request
        self.zygote = zygote
        self.stream, self.theirs = socket.socketpair()
        self.stream.setblocking(False)
        self.reader: FrameReader[FromWorker] = FrameReader(FromWorker)
        self.unsent = bytearray()
        self.pid = -1
        self.pidfd = -1
        self.doomed = False
        self.broken = False
        self.ours = False
        self.overdue: asyncio.TimerHandle | None = None
        self.oom_kills = _oom_kills()


class ForkedProcesses(Processes):
    """See the module's docstring. ``pristine`` is the agent's end of the pristine zygote's socket, ``entry`` the
    workers' ``module:qualname``, and ``end_agent`` ends the agent's process, for the reason that it is given."""

    _loop: asyncio.AbstractEventLoop
    _listener: Listener
    _pristine: Link

    def __init__(self, pristine: socket.socket, pid: int, entry: str, end_agent: Callable[[str], NoReturn]) -> None:
        self._pristine_socket = pristine
        self._pristine_pid = pid
        self._pristine_pidfd = os.pidfd_open(pid)
        self._entry = entry
        self._end_agent = end_agent
        self._numbers = itertools.count()
        self._workers: dict[WorkerKey, _Worker] = {}
        self._zygotes: dict[bytes, _Zygote] = {}  # the one to use for each environment, the last used last
        self._alive: list[_Zygote] = []
        self._strangers: dict[int, int] = {}  # pid → pidfd; each was sent a SIGKILL
        self._statuses: dict[int, int] = {}
        self._lost: list[_Worker] = []

    def listen(self, listener: Listener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._janitor = os.getppid()
        self._pristine = Link(self._loop, self._pristine_socket)

    async def prepare(self, environment: Environment) -> str:
        zygote = self._zygote(environment)
        if zygote.ready:
            return zygote.notice
        prepared: asyncio.Future[str] = self._loop.create_future()
        zygote.prepared.append(prepared)
        return await prepared

    def start(
        self, key: WorkerKey, environment: Environment, log: str, variables: Mapping[str, str], first: bytes
    ) -> None:
        if key in self._workers:
            raise ValueError(f"worker {key} is running already")
        try:
            zygote = self._zygote(environment)
            request = z.Fork(next(self._numbers), log, dict(variables), self._entry)
            worker = self._workers[key] = _Worker(key, request, zygote)
        except OSError as error:
            process.note(log, f"holdfast: cannot start a worker: {error}")
            self._loop.call_soon(self._listener.worker_exited, key, WorkerExit(os.EX_OSERR))
            return
        self._loop.add_reader(worker.stream, self._read, worker)
        self.send(key, first)
        if zygote.ready:
            self._fork(worker)
        else:
            zygote.waiting.append(worker)

    def send(self, key: WorkerKey, data: bytes) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        waiting = bool(worker.unsent)
        worker.unsent += data
        if not waiting:
            self._write(worker)

    def kill(self, key: WorkerKey) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        if worker in worker.zygote.waiting:
            worker.zygote.waiting.remove(worker)
            worker.ours = True
            self._loop.call_soon(self._finish, worker, -signal.SIGKILL)
        elif worker.pidfd < 0:
            worker.doomed = True
        elif not kernel.has_ended(worker.pidfd):
            worker.ours = not kernel.is_ending(worker.pid)  # else it dies by itself, and that is to be told
            signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def signal(self, key: WorkerKey, number: int) -> None:
        worker = self._workers.get(key)
        if worker is not None and worker.pidfd >= 0 and not kernel.has_ended(worker.pidfd):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, number)

    def pause(self, key: WorkerKey) -> None:
        worker = self._workers.get(key)
        if worker is not None:
            self._loop.remove_reader(worker.stream)

    def resume(self, key: WorkerKey) -> None:
        worker = self._workers.get(key)
        if worker is not None:
            self._loop.add_reader(worker.stream, self._read, worker)

    async def close(self) -> None:
        for worker in self._workers.values():
            self._release(worker)
        self._workers.clear()
        self._lost.clear()
        for zygote in self._alive:
            self._release_zygote(zygote)
            for prepared in zygote.prepared:
                prepared.cancel()
        self._alive.clear()
        self._zygotes.clear()
        for pidfd in self._strangers.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._strangers.clear()
        self._pristine.close()
        await asyncio.to_thread(kernel.end_children)

    # Zygotes

    def _zygote(self, environment: Environment) -> _Zygote:
        """The environment's zygote, made now where there is none."""
        identity = msgspec.msgpack.encode(environment, order="deterministic")
        zygote = self._zygotes.pop(identity, None)
        if zygote is None:
            self._retire_idle()
            zygote = self._make(identity, environment)
        self._zygotes[identity] = zygote
        return zygote

    def _make(self, identity: bytes, environment: Environment, notice: str = "") -> _Zygote:
        if kernel.has_ended(self._pristine_pidfd):
            self._end_agent("its pristine zygote has died, so that no new zygote can be made")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote = _Zygote(identity, environment, Link(self._loop, ours), notice)
        try:
            self._pristine.send(z.MakeZygote(environment), theirs)
        except OSError:
            zygote.link.close()
            theirs.close()
            raise
        self._alive.append(zygote)
        self._loop.add_reader(ours, self._zygote_said, zygote)
        return zygote

    def _retire_idle(self) -> None:
        idle = [zygote for zygote in self._zygotes.values() if zygote.idle]
        for zygote in idle[: 1 - IDLE_ZYGOTES]:
            del self._zygotes[zygote.identity]
            zygote.link.close()  # it ends by itself then, and its pidfd tells

    def _zygote_said(self, zygote: _Zygote) -> None:
        for answer, pidfd in zygote.link.receive():
            match answer:
                case z.Born(pid):
                    zygote.pid, zygote.pidfd = pid, pidfd
                    self._loop.add_reader(pidfd, self._zygote_ended, zygote)
                case z.Ready():
                    self._zygote_ready(zygote, answer)
                case z.Forked(number, pid):
                    self._forked(zygote.workers[number], pid, pidfd)
                case z.Ended(number, status):
                    self._finish(zygote.workers[number], status)
        if zygote.link.ended:
            self._hang_up(zygote)

    def _zygote_ready(self, zygote: _Zygote, ready: z.Ready) -> None:
        if zygote.pid < 0:  # who was to announce it was killed; without its pidfd it cannot be watched
            self._zygote_gone(zygote)
            return
        if ready.unsafe:
            self._replace(zygote, f"workers start as fresh processes: {ready.unsafe}")
            return
        zygote.ready = True
        zygote.notice = "; ".join(filter(None, (zygote.notice, ready.notice)))
        _resolve(zygote.prepared, zygote.notice)
        waiting, zygote.waiting = zygote.waiting, []
        for worker in waiting:
            self._fork(worker)

    def _replace(self, zygote: _Zygote, notice: str) -> None:
        """Have a zygote that imports nothing take over from one that cannot be used."""
        environment = msgspec.structs.replace(zygote.environment, preload=())
        try:
            fresh = self._make(zygote.identity, environment, notice)
        except OSError as error:
            self._abandon(zygote, str(error))
            return
        fresh.waiting, zygote.waiting = zygote.waiting, []
        fresh.prepared, zygote.prepared = zygote.prepared, []
        for worker in fresh.waiting:
            worker.zygote = fresh
        self._zygotes[zygote.identity] = fresh

    def _hang_up(self, zygote: _Zygote) -> None:
        """The zygote's stream has ended: so has the zygote, or it is of no use."""
        zygote.link.close()
        if zygote.pidfd < 0:
            self._zygote_gone(zygote)
        elif not zygote.gone:
            kernel.kill(zygote.pidfd)

    def _zygote_ended(self, zygote: _Zygote) -> None:
        self._zygote_said(zygote)
        self._zygote_gone(zygote)

    def _zygote_gone(self, zygote: _Zygote) -> None:
        if zygote.gone:
            return
        zygote.gone = True
        self._alive.remove(zygote)
        self._release_zygote(zygote)
        status = _reap(zygote.pid)
        self._lost += zygote.workers.values()
        if self._zygotes.get(zygote.identity) is zygote:
            if not zygote.ready and zygote.environment.preload:
                self._replace(zygote, f"workers start as fresh processes: importing modules died ({status})")
            else:
                self._abandon(zygote, f"the process that workers are forked from has died ({status})")
        self._sweep()

    def _abandon(self, zygote: _Zygote, notice: str) -> None:
        """Make do without a zygote for this environment until the next start."""
        self._zygotes.pop(zygote.identity, None)
        self._lost += zygote.waiting
        zygote.waiting = []
        _resolve(zygote.prepared, notice)

    def _release_zygote(self, zygote: _Zygote) -> None:
        zygote.link.close()
        if zygote.pidfd >= 0:
            self._loop.remove_reader(zygote.pidfd)
            os.close(zygote.pidfd)

    def _sweep(self) -> None:
        """Kill what dead zygotes have left behind, then tell of their workers."""
        children = kernel.children()
        for zygote in [zygote for zygote in self._alive if zygote.pid < 0]:
            self._zygote_said(zygote)  # Born waits there if the zygote was among the children already
        known = {self._pristine_pid, *(zygote.pid for zygote in self._alive)}
        for pid in children:
            if pid in known or pid in self._strangers:
                continue
            pidfd = kernel.kill_child(pid)
            if pidfd is not None:
                self._strangers[pid] = pidfd
                self._loop.add_reader(pidfd, self._stranger_ended, pid)
        if not self._strangers:
            self._tell_lost()
        elif self._lost:
            self._loop.call_later(z.STRAGGLERS_S, self._tell_lost)

    def _stranger_ended(self, pid: int) -> None:
        pidfd = self._strangers.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        status = _reap(pid)
        if status is not None:
            self._statuses[pid] = status
        self._sweep()

    def _tell_lost(self) -> None:
        if os.getppid() != self._janitor:
            return  # it was not the zygotes that died: this agent ends, and its own end tells of all its workers
        lost, self._lost = self._lost, []
        statuses, self._statuses = self._statuses, {}
        for worker in lost:
            self._finish(worker, statuses.get(worker.pid, -signal.SIGKILL), lost=True)

    # Workers

    def _fork(self, worker: _Worker) -> None:
        worker.zygote.workers[worker.request.number] = worker
        worker.zygote.link.send(worker.request, worker.theirs)

    def _forked(self, worker: _Worker, pid: int, pidfd: int) -> None:
        worker.pid, worker.pidfd = pid, pidfd
        self._loop.add_reader(pidfd, self._worker_ended, worker)
        if worker.doomed:
            self.kill(worker.key)
        elif worker.broken:
            kernel.kill(pidfd)

    def _worker_ended(self, worker: _Worker) -> None:
        """It is dead; its zygote will say how it died."""
        self._loop.remove_reader(worker.pidfd)
        self._read_all(worker)
        worker.overdue = self._loop.call_later(STATUS_S, self._give_up, worker.zygote)

    def _give_up(self, zygote: _Zygote) -> None:
        if not zygote.gone:
            kernel.kill(zygote.pidfd)

    def _finish(self, worker: _Worker, status: int, lost: bool = False) -> None:
        if self._workers.get(worker.key) is not worker:
            return  # closed meanwhile
        self._read_all(worker)
        self._release(worker)
        del self._workers[worker.key]
        worker.zygote.workers.pop(worker.request.number, None)
        killed = status == -signal.SIGKILL
        ours = killed and worker.ours
        oom = killed and not ours and _oom_kills() > worker.oom_kills
        self._listener.worker_exited(worker.key, WorkerExit(status, ours, oom, lost))

    def _release(self, worker: _Worker) -> None:
        self._loop.remove_reader(worker.stream)
        self._loop.remove_writer(worker.stream)
        worker.stream.close()
        worker.theirs.close()
        if worker.pidfd >= 0:
            self._loop.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
        if worker.overdue is not None:
            worker.overdue.cancel()

    def _read_all(self, worker: _Worker) -> None:
        while self._read(worker):
            pass

    def _read(self, worker: _Worker) -> bool:
        """Pass on one piece of what the worker said; false when there was none."""
        try:
            data = worker.stream.recv(READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(worker.stream)
            return False
        try:
            for found in worker.reader.feed(data):
                if isinstance(found, list):
                    self._listener.worker_rows(worker.key, found)
                else:
                    self._listener.worker_message(worker.key, found)
        except WireError as error:
            process.note(worker.request.log, f"holdfast: killed, for it wrote to its agent's socket: {error}")
            worker.broken = True
            worker.stream.shutdown(socket.SHUT_RD)
            kernel.kill(worker.pidfd)
        return True

    def _write(self, worker: _Worker) -> None:
        try:
            while worker.unsent:
                del worker.unsent[: worker.stream.send(worker.unsent)]
        except BlockingIOError:
            self._loop.add_writer(worker.stream, self._write, worker)
            return
        except OSError:  # it is gone, and its pidfd tells
            worker.unsent.clear()
        self._loop.remove_writer(worker.stream)


def _reap(pid: int) -> int | None:
    """The exit status of a dead child, or None where it is not ours to wait for."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG) if pid > 0 else (0, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def _resolve(futures: list[asyncio.Future[str]], notice: str) -> None:
    for future in futures:
        if not future.done():
            future.set_result(notice)
    futures.clear()


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started."""
    try:
        with open("/proc/vmstat", "rb") as counters:
            text = counters.read()
    except OSError:
        return 0
    at = text.find(b"\noom_kill ")
    return int(text[at + 10 :].split(None, 1)[0]) if at >= 0 else 0
