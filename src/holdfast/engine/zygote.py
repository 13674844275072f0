"""The processes that workers are forked from. A zygote imports modules and does nothing else.

The *pristine* zygote has imported our own code alone. It is forked by the agent before that starts a loop or a thread,
and makes a zygote for an environment by a double fork, so that the agent, the nearest subreaper, adopts it. The zygote
of an environment sets the environment's variables, then imports its modules, then forks workers.

A zygote never runs a loop or a thread, never computes, never outlives its agent, and leaves nothing below itself alive
when it ends. A child that it does not know was a dead worker's: each live worker adopts its own orphans.

The agent speaks to a zygote over a socket pair that keeps message boundaries and carries descriptors. A message that
is too large for it travels in a file in memory, whose descriptor comes last.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec

from holdfast import faultpoints
from holdfast.engine import preload
from holdfast.wire.messages import Environment, Message
from holdfast.worker import kernel, process

MAX_MESSAGE = 1 << 15
"""The largest message that the socket itself carries; the kernel allows some 200 KB where nobody has set it lower."""
IN_MEMORY = b"\xc1"
"""Stands for a message that lies in the file behind the last descriptor. No msgpack begins with it."""
PUBLIC = ("holdfast.train",)
"""Modules of ours that users' functions import."""
STRAGGLERS_S = 2.0
"""How long an exit is held back for what the dead worker had started and the kernel does not let go of."""


# agent → pristine zygote, agent → zygote


class MakeZygote(Message, frozen=True):
    """Make a zygote that serves the passed socket."""

    environment: Environment


class Fork(Message, frozen=True):
    """Fork a worker that speaks over the passed socket. Answered by Forked, and by Ended in any case."""

    number: int
    log: str
    variables: dict[str, str]
    entry: str


Request = MakeZygote | Fork


# zygote → agent


class Born(Message, frozen=True):
    """Sent before the agent can see the new zygote among its children. Brings a pidfd."""

    pid: int


class Ready(Message, frozen=True):
    """``unsafe`` says why no worker can be forked after the imports; the zygote then ends. ``notice`` is for people."""

    unsafe: str = ""
    notice: str = ""


class Forked(Message, frozen=True):
    """Brings a pidfd."""

    number: int
    pid: int


class Ended(Message, frozen=True):
    """The worker and all that it had started are gone. ``status`` is its exit code, or minus the signal."""

    number: int
    status: int


Answer = Born | Ready | Forked | Ended

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def run_pristine(control: socket.socket, agent: int, log: str, entry: str) -> NoReturn:
    """Be the pristine zygote of the agent behind the pidfd ``agent``. Called right after the fork."""
    try:
        kernel.set_name("hf:pristine")
        _write_to(log)
        for module in (entry.partition(":")[0], "cloudpickle", *PUBLIC):
            preload.attempt(module)
        gc.freeze()
        faultpoints.reach("pristine.ready")
        environment, control = _serve_pristine(control, agent)
        _run_zygote(control, agent, environment)
    except BaseException:  # the agent's frames lie above; they are not ours to unwind into
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve_pristine(control: socket.socket, agent: int) -> tuple[Environment, socket.socket]:
    """Returns in each new zygote; the pristine one itself ends here with its agent."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(agent, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        request, fds = (None, []) if agent in ready else _receive(control)
        if not isinstance(request, MakeZygote):
            os._exit(0)
        theirs = socket.socket(fileno=fds[0])
        middle = _fork()
        if middle == 0:
            _bear(theirs)
            control.close()
            return request.environment, theirs
        theirs.close()
        os.waitpid(middle, 0)


def _bear(control: socket.socket) -> None:
    """In the middle process: fork the zygote, announce it, end. Returns in the zygote, after that end.

    The agent adopts the zygote only then, and by that time Born waits in the agent's socket.
    """
    try:
        middle = os.pidfd_open(os.getpid())
        zygote = _fork()
        if zygote == 0:
            kernel.wait_for_end(middle)
            os.close(middle)
            return
        pidfd = os.pidfd_open(zygote)
        faultpoints.reach("zygote.bearing")
        _send(control, Born(zygote), [pidfd])
    except BaseException:  # see run_pristine
        traceback.print_exc()
    os._exit(0)


def _run_zygote(control: socket.socket, agent: int, environment: Environment) -> NoReturn:
    kernel.become_subreaper()
    kernel.set_name("hf:zygote")
    mine = preload.open_files()
    notice = preload.take_on(environment)
    ready = Ready(preload.import_all(environment.preload), notice)
    kernel.ignore_signals()
    faultpoints.reach("zygote.ready")
    _send(control, ready)
    if ready.unsafe:
        os._exit(0)
    gc.freeze()
    birth = _Zygote(control, agent, mine).serve()
    process.live(birth)


class _Zygote:
    """The loop of an environment's zygote. ``mine`` are descriptors that no worker may keep."""

    def __init__(self, control: socket.socket, agent: int, mine: Iterable[int]) -> None:
        self._control = control
        self._agent = agent
        self._mine = tuple(mine)
        self._pid = os.getpid()
        self._workers: dict[int, tuple[int, int]] = {}  # pid → number, pidfd
        self._strangers: dict[int, int] = {}  # pid → pidfd; each was sent a SIGKILL
        self._ended: list[Ended] = []
        self._hold_until = 0.0
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(agent, select.POLLIN)

    def serve(self) -> process.Birth:
        """Returns in each new worker; the zygote itself ends here with its agent."""
        control = self._control.fileno()
        while True:
            wait = max(0.0, self._hold_until - time.monotonic()) * 1000 if self._ended else None
            ready = {fd for fd, _ in self._poll.poll(wait)}
            if self._agent in ready:
                _end()
            if self._ended or ready - {control}:
                self._reap()
            if control in ready:
                birth = self._receive()
                if birth is not None:
                    return birth

    def _receive(self) -> process.Birth | None:
        request, fds = _receive(self._control)
        if not isinstance(request, Fork):
            _end()
        (stream,) = fds
        try:
            pid = _fork()
        except OSError as error:
            os.close(stream)
            process.note(request.log, f"holdfast: cannot fork a worker: {error}")
            _send(self._control, Ended(request.number, os.EX_OSERR))
            return None
        if pid == 0:
            return self._birth(request, stream)
        os.close(stream)
        pidfd = os.pidfd_open(pid)
        self._workers[pid] = (request.number, pidfd)
        self._poll.register(pidfd, select.POLLIN)
        faultpoints.reach("zygote.forked")
        _send(self._control, Forked(request.number, pid), [pidfd])
        return None

    def _birth(self, request: Fork, stream: int) -> process.Birth:
        pidfds = (*(pidfd for _, pidfd in self._workers.values()), *self._strangers.values())
        own = self._mine + pidfds
        return process.Birth(self._pid, stream, own, request.log, request.variables, request.entry)

    def _reap(self) -> None:
        """Tell of dead workers once nothing is left of what they had started."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._forget(*found)
            self._kill_strangers()
        except ChildProcessError:
            pass
        if self._strangers and time.monotonic() < self._hold_until:
            return
        for ended in self._ended:
            _send(self._control, ended)
        self._ended.clear()

    def _forget(self, pid: int, status: int) -> None:
        if pid in self._workers:
            number, pidfd = self._workers.pop(pid)
            self._ended.append(Ended(number, os.waitstatus_to_exitcode(status)))
            self._hold_until = time.monotonic() + STRAGGLERS_S
        else:
            pidfd = self._strangers.pop(pid, -1)
        if pidfd >= 0:
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _kill_strangers(self) -> None:
        for pid in kernel.children():
            if pid in self._workers or pid in self._strangers:
                continue
            pidfd = kernel.kill_child(pid)
            if pidfd is not None:
                self._strangers[pid] = pidfd
                self._poll.register(pidfd, select.POLLIN)


def _write_to(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # about threads: those left here are known to survive
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def pack(message: Request | Answer) -> tuple[bytes, int]:
    """What the socket carries of a message, and the descriptor of the rest or -1, which is the caller's to close."""
    data = msgspec.msgpack.encode(message)
    if len(data) <= MAX_MESSAGE:
        return data, -1
    memory = os.memfd_create("holdfast-message")
    with open(memory, "wb", closefd=False) as file:
        file.write(data)
    return IN_MEMORY, memory


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, packed or not, and its descriptors; nothing when the peer is gone."""
    data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 4, socket.MSG_CMSG_CLOEXEC)
    if data == IN_MEMORY:
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return data, fds


def _receive(control: socket.socket) -> tuple[Request | None, list[int]]:
    """The next request and its descriptors; None when the agent is gone."""
    try:
        data, fds = receive(control)
    except ConnectionError:
        return None, []
    return (_requests.decode(data) if data else None), fds


def _send(control: socket.socket, answer: Answer, fds: Sequence[int] = ()) -> None:
    data, memory = pack(answer)
    try:
        socket.send_fds(control, [data], fds if memory < 0 else (*fds, memory))
    except ConnectionError:
        _end()
    finally:
        if memory >= 0:
            os.close(memory)


def _end() -> NoReturn:
    """The agent is gone: nothing below may stay."""
    kernel.end_children()
    os._exit(0)
