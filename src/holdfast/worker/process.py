"""The first moments of a worker, right after the fork, and its last.

Here the clone of a zygote becomes a process of its own: it dies with its zygote, adopts its own orphans, writes to its
own log, draws its own random numbers. It must never touch what is the zygote's but to close it, and never return.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TextIO

import msgspec

from holdfast import faultpoints
from holdfast.worker import kernel

STACKS_SIGNAL = signal.SIGRTMAX - 5
"""Upon this signal a worker writes the stacks of all its threads to its log, whatever it is doing. It is none that
user code, batch systems or libraries are known to use."""


class Birth(msgspec.Struct, frozen=True):
    """All that a clone must know to become a worker. ``zygotes_own`` are descriptors that it closes."""

    zygote: int
    stream: int
    zygotes_own: tuple[int, ...]
    log: str
    variables: dict[str, str]
    entry: str


def live(birth: Birth) -> NoReturn:
    """Be the worker, from the fork to the end."""
    code = 1
    try:
        kernel.die_with_parent(birth.zygote)
        kernel.become_subreaper()
        kernel.set_name("hf:worker")
        os.setpgid(0, 0)
        _close(birth.zygotes_own)
        _open_log(birth.log)
        _default_signals()
        os.environ.update(birth.variables)
        faulthandler.enable()
        faulthandler.register(STACKS_SIGNAL, file=os.dup(2), all_threads=True)
        _reseed()
        faultpoints.arm_from_environment()
        faultpoints.reach("worker.born")
        code = _call(resolve(birth.entry), socket.socket(fileno=birth.stream))
    except BaseException:  # whatever it was, it belongs in the worker's log, not in the zygote's frames
        traceback.print_exc()
    finally:
        _end(code)


def resolve(entry: str) -> Callable[..., Any]:
    """The function that ``module:qualname`` names."""
    module, _, qualname = entry.partition(":")
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _call(entry: Callable[[socket.socket], int], stream: socket.socket) -> int:
    try:
        return entry(stream)
    except SystemExit as request:
        if request.code is None or isinstance(request.code, int):
            return request.code or 0
        sys.stderr.write(f"{request.code}\n")
        return 1


def _end(code: int) -> NoReturn:
    """What the interpreter does at its end: other threads first, then the exit functions, then the last lines."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            output.flush()
    except BaseException:  # a broken exit function must not keep the process from ending
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def note(log: str, text: str) -> None:
    """Write a line into a worker's log on its behalf."""
    try:
        fd = _append(log)
    except OSError:
        return
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def _append(path: str) -> int:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _open_log(path: str) -> None:
    """Standard output and error go to the log, of libraries and subprocesses too, and line by line: what was printed
    before a SIGKILL is there."""
    log = _append(path)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target, inheritable=True)
    os.close(log)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  it stays open
    sys.stdout = _line_buffered(sys.stdout, 1)
    sys.stderr = _line_buffered(sys.stderr, 2)


def _line_buffered(stream: TextIO | None, fd: int) -> TextIO:
    """The same object where possible: modules that were imported before the fork may hold on to it."""
    reconfigure = getattr(stream, "reconfigure", None)
    if stream is None or reconfigure is None:
        return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    return stream


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _reseed() -> None:
    """Generators that were made before the fork would draw the same numbers in every worker."""
    random.seed(os.urandom(32))
    numpy_random = sys.modules.get("numpy.random")  # not as an attribute of numpy, which would import it
    if numpy_random is not None and hasattr(numpy_random, "seed"):
        numpy_random.seed(list(os.urandom(16)))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
