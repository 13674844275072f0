"""The few Linux calls by which nothing outlives its owner: subreapers, the parent-death signal, pidfds, children.

It must never import more than the standard library's smallest parts: a janitor, which does nothing but wait for its
owner's death, loads it too.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time

_SET_PDEATHSIG = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36
_EXITING = 0x4
_libc = ctypes.CDLL(None, use_errno=True)

UNKILLABLE_S = 10.0
"""How long the end of a killed child is waited for: one that hangs inside the kernel cannot be helped."""


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def set_name(name: str) -> None:
    """The name that ps and top show; fifteen characters at most."""
    _libc.prctl(_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def become_subreaper() -> None:
    """From now on the orphans among our descendants become our children, and not init's."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the thread that forked us ends, and end now if it has ended already.

    For leaves alone: a process that must clean up below itself would die before it could.
    """
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def ignore_signals() -> None:
    """For the processes between a driver and its workers: they end with their owners, and not by a signal that a
    terminal, a batch system or an operator sends to a whole group. SIGTERM is a notice for agents and workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def children() -> list[int]:
    """The pids of this process's children, dead ones that nobody has waited for included."""
    found: list[int] = []
    try:
        for task in os.listdir("/proc/self/task"):
            found += map(int, _read(f"/proc/self/task/{task}/children").split())
    except OSError:  # a kernel without that file, or a thread that ended meanwhile
        return _children_by_scan(os.getpid())
    return found


def _children_by_scan(parent: int) -> list[int]:
    """By the parent that every process names: slower, and there on every kernel."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == parent]


def _parent(pid: int | str) -> int:
    return int(_stat(pid)[1])


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end. Its peers may know by then, for its sockets are closed before it is dead."""
    return bool(int(_stat(pid)[6]) & _EXITING)


def _stat(pid: int | str) -> list[bytes]:
    """The state, parent, process group, session, terminal, its group and the kernel's flags of a process."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return [b"X", b"0", b"0", b"0", b"0", b"0", b"%d" % _EXITING]
    return stat[stat.rindex(b")") + 2 :].split(None, 7)[:7]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = part = os.read(fd, 65536)
        while part:
            part = os.read(fd, 65536)
            data += part
        return data
    finally:
        os.close(fd)


def kill(pidfd: int) -> None:
    """SIGKILL for the process behind this pidfd, if there is one."""
    try:
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:  # it has just ended, or it runs as another user and cannot be helped
        pass


def kill_child(pid: int) -> int | None:
    """SIGKILL for a child of ours. Returns its pidfd, which the caller closes; None when it is no child of ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if _parent(pid) == os.getpid():
        kill(pidfd)
        return pidfd
    os.close(pidfd)
    return None


def has_ended(pidfd: int) -> bool:
    """Whether the process behind this pidfd is dead."""
    return _poll_end(pidfd, 0)


def wait_for_end(pidfd: int) -> None:
    """Return when the process behind this pidfd is dead."""
    _poll_end(pidfd, None)


def _poll_end(pidfd: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout))


def end_children(patience_s: float = UNKILLABLE_S) -> None:
    """Kill every child, wait for it, and look again until none is left.

    A subreaper's descendants become its children as their own parents die, so this ends the whole tree below.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        pidfds = [pidfd for pid in children() if (pidfd := kill_child(pid)) is not None]
        poll = select.poll()
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        poll.poll(1 if not pidfds else max(0, (deadline - time.monotonic()) * 1000))
        for pidfd in pidfds:
            os.close(pidfd)
        if time.monotonic() > deadline:
            return
