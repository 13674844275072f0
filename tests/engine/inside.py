"""What runs below a driver in these tests: an agent that does what the test tells it, and workers that behave badly.

Imported by agents and workers, so it must stay light: no pytest here.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.engine import forked
from holdfast.engine.launch import Boot
from holdfast.engine.processes import Listener, Processes, WorkerExit, WorkerKey
from holdfast.wire import frames
from holdfast.wire.messages import Environment, FromWorker, Return, Started


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "little") + body


async def run_agent(boot: Boot, processes: Processes) -> None:
    """Serve the test that listens at the boot's address until it hangs up."""
    reader, writer = await asyncio.open_unix_connection(boot.address)
    relay = Relay(writer)
    processes.listen(relay)
    relay.tell("hello", os.getpid())
    tasks = set()
    try:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "little")
            name, arguments = msgspec.msgpack.decode(await reader.readexactly(size), type=tuple[str, list[Any]])
            if name == "prepare":
                environment = msgspec.convert(arguments[0], Environment)
                task = asyncio.create_task(_prepare(processes, relay, environment))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            elif name == "start":
                key, environment, log, variables, first = arguments
                processes.start(tuple(key), msgspec.convert(environment, Environment), log, variables, first)
            elif name == "lose_patience":
                forked.STATUS_S = 0.2
            elif name == "close":
                await processes.close()
                relay.tell("closed")
            else:
                getattr(processes, name)(tuple(arguments[0]), *arguments[1:])
    except asyncio.IncompleteReadError:
        await processes.close()
        writer.close()


async def run_hasty_agent(boot: Boot, processes: Processes) -> None:
    """Start workers at once, and listen to nobody."""
    _, writer = await asyncio.open_unix_connection(boot.address)
    processes.listen(Relay(writer))
    for rank in range(2):
        processes.start(("hasty", 0, rank), Environment(), f"{boot.folder}/{rank}.log", {}, b'["brood"]\n')
    await asyncio.Event().wait()


async def _prepare(processes: Processes, relay: Relay, environment: Environment) -> None:
    relay.tell("prepared", await processes.prepare(environment))


class Relay(Listener):
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def tell(self, *values: object) -> None:
        self._writer.write(framed((time.monotonic(), *values)))

    def worker_message(self, key: WorkerKey, message: FromWorker) -> None:
        if isinstance(message, Started):
            self.tell("started", key, message.pid)
        else:
            assert isinstance(message, Return)
            self.tell("said", key, message.value.decode())

    def worker_rows(self, key: WorkerKey, rows: list[bytes]) -> None:
        self.tell("rows", key, len(rows))

    def worker_exited(self, key: WorkerKey, exit: WorkerExit) -> None:  # noqa: A002
        self.tell("exited", key, exit)


class Voice:
    """A worker's side of its socket."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._file = stream.makefile("rb")

    def say(self, value: object) -> None:
        self.stream.sendall(frames.frame(Return(json.dumps(value).encode(), b"")))

    def hear(self) -> str:
        return self._file.readline().decode().strip()

    def wait_for_ever(self) -> None:
        while True:
            signal.pause()


def run_worker(stream: socket.socket) -> int:
    """Do what the first line says: the name of a behaviour and its arguments."""
    voice = Voice(stream)
    stream.sendall(frames.frame(Started(os.getpid())))
    name, *arguments = json.loads(voice.hear())
    behaviour: Callable[..., int | None] = globals()[name]
    return behaviour(voice, *arguments) or 0


# Behaviours


def leave(voice: Voice, code: int) -> int:
    return code


def leave_by_exception(voice: Voice) -> int:
    raise ValueError("no good")


def leave_by_sys_exit(voice: Voice, code: object) -> int:
    sys.exit(code)  # type: ignore[arg-type]


def idle(voice: Voice) -> None:
    voice.wait_for_ever()


def echo(voice: Voice) -> None:
    while heard := voice.hear():
        voice.say(heard)


def say_and_die(voice: Voice, count: int) -> None:
    """The last words, then at once death."""
    voice.stream.sendall(b"".join(frames.row_frame(b"{}") for _ in range(count)))
    voice.say("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def print_and_die(voice: Voice) -> None:
    print("printed by Python")
    sys.stderr.write("written to stderr\n")
    subprocess.run(["echo", "printed by a subprocess"], check=True)
    ctypes.CDLL(None).dprintf(1, b"printed by C\n")
    print("the last line")
    os.kill(os.getpid(), signal.SIGKILL)


def look_around(voice: Voice, module: str) -> None:
    """What this worker finds in itself."""
    loaded = sys.modules.get(module)
    import numpy

    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and _open(int(fd))]
    voice.say(
        {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "preloaded": loaded is not None,
            "seen_at_import": getattr(loaded, "SEEN", None),
            "variables": {name: os.environ[name] for name in os.environ if name.startswith("MINE_")},
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "random": random.random(),
            "numpy": float(numpy.random.random()),
            "group": os.getpgid(0),
            "descriptors": links,
            "sigterm_is_default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        }
    )


def _open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def flood(voice: Voice, count: int) -> None:
    """Send rows for as long as the agent takes them, and say how far that was."""
    voice.stream.settimeout(0.2)
    row = frames.row_frame(b"x" * 1000)
    sent = 0
    try:
        while sent < count:
            voice.stream.sendall(row)
            sent += 1
    except TimeoutError:
        pass
    print("sent", sent)


def garbage(voice: Voice) -> None:
    voice.stream.sendall(b"\xff" * 100)
    voice.wait_for_ever()


def brood(voice: Voice, state: str = "running") -> None:
    """Start every kind of descendant that training code starts, then say so and go into a state."""
    for _ in range(2):
        if os.fork() == 0:
            voice.wait_for_ever()  # a data loader; it holds the worker's socket too
    context = multiprocessing.get_context("fork")
    context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    subprocess.Popen(["sleep", "1000"])
    script = "trap '' TERM INT HUP; sleep 1000 & sleep 1000 & echo; wait"
    shell = subprocess.Popen(["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    assert shell.stdout is not None
    shell.stdout.readline()
    _daemonise()
    voice.say("bred")
    if state == "native":
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL
    elif state == "leaving":
        os._exit(0)
    voice.wait_for_ever()


def _daemonise() -> None:
    """The classic double fork, which leaves the process group, the session and the parent."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1000)
        os._exit(0)
    os.waitpid(middle, 0)


def main() -> None:
    """A driver of its own: start a janitor as the boot on standard input says, in a thread that ends at once, and
    live.
    """
    from holdfast.engine.launch import spawn_janitor

    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=Boot)
    boot = msgspec.structs.replace(boot, driver_pid=os.getpid())
    held = []
    thread = threading.Thread(target=lambda: held.append(spawn_janitor(boot)))
    thread.start()
    thread.join()
    print(held[0].pid, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
