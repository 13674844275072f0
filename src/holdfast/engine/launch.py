"""From the driver down to an agent: the driver starts a janitor, that forks the agent, that forks the pristine zygote.

The janitor is one small process without threads that waits for the death of its driver or of its agent, then ends
everything below and removes the node's folder. The agent does the same when the janitor dies. Both ignore SIGINT,
SIGHUP and SIGTERM, which a terminal or a batch system may send to everyone; once it is at work, the agent takes SIGTERM
for a notice that its node is preempted. Neither carries a parent-death signal: it would fire when the thread that
started it ends.

Nothing here decides what to run or reads a message. The janitor must never import asyncio or start a thread.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, NoReturn

import msgspec

from holdfast import faultpoints
from holdfast.engine import zygote
from holdfast.worker import kernel, process

if TYPE_CHECKING:
    import subprocess

GRACE_S = 2.0
"""How long an agent may take to end by itself after its driver has closed its side."""

_START = "import sys; sys.path[:] = sys.argv[3:]; from holdfast.engine.launch import main; main()"


class Boot(msgspec.Struct, frozen=True):
    """All that a node's processes are told. It travels over the janitor's standard input, for it holds the secret."""

    driver_pid: int
    node: str
    address: str
    secret: bytes
    folder: str
    """The node's own, made by the agent (0700), and removed by agent or janitor, whichever ends last."""
    sys_path: tuple[str, ...] = ()
    job_folder: str = ""
    """Removed too, where it is given, when the driver has died."""
    agent: str = "holdfast.engine.agent:run_agent"
    worker: str = "holdfast.worker.entry:run"


def spawn_janitor(boot: Boot) -> subprocess.Popen[bytes]:
    """Start a node's processes. To end them, close the janitor's ``stdin``; then wait for it."""
    janitor = begin_janitor(boot.driver_pid, boot.job_folder, boot.sys_path)
    instruct(janitor, boot)
    return janitor


def begin_janitor(driver_pid: int, job_folder: str, sys_path: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a janitor that waits for ``instruct``. From now on the job's folder does not outlive its driver."""
    import subprocess

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", _START, str(driver_pid), job_folder, *(sys_path or sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


def instruct(janitor: subprocess.Popen[bytes], boot: Boot) -> None:
    """Tell a janitor all that it has to know."""
    assert janitor.stdin is not None
    body = msgspec.msgpack.encode(boot)
    try:
        janitor.stdin.write(len(body).to_bytes(4, "little") + body)
    except BrokenPipeError:
        pass  # it was killed; who waits for it will see


def main() -> None:
    """Be the janitor."""
    kernel.ignore_signals()
    driver_pid, job_folder = int(sys.argv[1]), sys.argv[2]
    boot = _read_boot()
    if boot is None:
        if os.getppid() != driver_pid or kernel.is_ending(driver_pid):
            _remove_folder(job_folder)
        return
    sys.argv[:] = [""]
    kernel.set_name("hf:janitor")
    kernel.become_subreaper()
    faultpoints.arm_from_environment()
    driver = -1
    try:
        driver = os.pidfd_open(boot.driver_pid)
        if os.getppid() == boot.driver_pid:
            _guard(boot, driver)
    except ProcessLookupError:
        pass  # the driver is dead already
    finally:
        kernel.end_children()
        _remove(boot, driver)


def _guard(boot: Boot, driver: int) -> None:
    """Have an agent until the tree must end."""
    me = os.pidfd_open(os.getpid())
    faultpoints.reach("janitor.ready")
    agent = os.fork()
    if agent == 0:
        _Agent(boot, me, driver).run()
    _wait(driver, os.pidfd_open(agent))


def _read_boot() -> Boot | None:
    """None when the driver died before it had said everything."""
    head = _read_exactly(4)
    body = _read_exactly(int.from_bytes(head, "little")) if head else b""
    return msgspec.msgpack.decode(body, type=Boot) if body else None


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            return b""
        data += part
    return data


def _wait(driver: int, agent: int) -> None:
    """Return when the tree must end. If a live driver closes its side, the agent has a grace to end by itself."""
    poll = select.poll()
    for fd in (driver, agent, 0):
        poll.register(fd, select.POLLIN)
    timeout = None
    while True:
        ready = {fd for fd, _ in poll.poll(timeout)}
        if not ready or driver in ready or agent in ready:
            return
        poll.unregister(0)
        timeout = GRACE_S * 1000


def _remove(boot: Boot, driver: int) -> None:
    """Remove the node's folder; and the job's, where the driver behind this pidfd (none: -1) will not do it, or where
    nothing is in it: a driver that dies before it has another janitor leaves nothing then."""
    _remove_folder(boot.folder)
    if driver < 0 or kernel.has_ended(driver) or kernel.is_ending(boot.driver_pid):
        _remove_folder(boot.job_folder)
    elif boot.job_folder:
        try:
            os.rmdir(boot.job_folder)
        except OSError:
            pass


def _remove_folder(folder: str) -> None:
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


class _Agent:
    """The agent's process, from the fork on. ``janitor`` and ``driver`` are pidfds."""

    def __init__(self, boot: Boot, janitor: int, driver: int) -> None:
        self._boot = boot
        self._janitor = janitor
        self._driver = driver
        self._leaving = threading.Lock()

    def run(self) -> NoReturn:
        try:
            kernel.set_name("hf:agent")
            kernel.become_subreaper()
            _leave_stdin_to_janitor()
            os.makedirs(self._boot.folder, mode=0o700, exist_ok=True)  # here, where there are two to remove it
            faultpoints.reach("agent.born")
            pristine, pid = self._fork_pristine()
            threading.Thread(target=self._follow, name="janitor watch", daemon=True).start()
            self._serve(pristine, pid)
        except BaseException:  # the janitor's frames lie above; they are not ours to unwind into
            self._leave(traceback.format_exc())
        finally:
            self._leave()

    def _fork_pristine(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.close(self._janitor)
            os.close(self._driver)
            zygote.run_pristine(theirs, me, os.path.join(self._boot.folder, "zygotes.log"), self._boot.worker)
        theirs.close()
        os.close(me)
        return ours, pid

    def _serve(self, pristine: socket.socket, pid: int) -> None:
        # After the fork of the pristine zygote, which imports its own part meanwhile.
        import asyncio

        from holdfast.engine.forked import ForkedProcesses

        processes = ForkedProcesses(pristine, pid, self._boot.worker, self._leave)
        asyncio.run(process.resolve(self._boot.agent)(self._boot, processes))

    def _follow(self) -> None:
        """In a thread, so that nothing that the agent's loop does can delay it."""
        kernel.wait_for_end(self._janitor)
        self._leave()

    def _leave(self, reason: str = "") -> NoReturn:
        """End all that is below, then this process; in whichever thread comes first. ``reason`` is for people."""
        self._leaving.acquire()
        try:
            if reason and not kernel.has_ended(self._janitor):
                sys.stderr.write(f"holdfast: the agent of {self._boot.node} ends: {reason}\n")
            kernel.end_children()
            _remove(self._boot, self._driver)
            if kernel.has_ended(self._driver):
                kernel.kill(self._janitor)  # it has nothing left to do, and may be stopped
        finally:
            os._exit(1 if reason else 0)


def _leave_stdin_to_janitor() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
