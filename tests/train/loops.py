"""The functions that the tests' workers run, and what an undisturbed run of them comes to.

Zygotes import this module, so it imports nothing that a worker does not need.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from holdfast import train


class Boom(Exception):
    """A user's own exception, with a value of its own."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


def advance(weight: float, step: int) -> float:
    return weight * 0.75 + step


def undisturbed_weight(rank: int, steps: int) -> float:
    """Where ``climb`` ends."""
    weight = float(rank)
    for step in range(1, steps + 1):
        weight = advance(weight, step)
    return weight


def climb(config: dict[str, Any]) -> float:
    """Train one weight per rank, step by step, each with a checkpoint; fail where ``config["faults"]`` says so."""
    rank = train.get_context().get_world_rank()
    print(f"rank {rank} begins attempt {train.get_context().get_attempt()}")
    if "pids" in config:
        announce(Path(config["pids"], str(rank)))
    step, weight = load(rank)
    fail(config, "begin", step)
    while step < config["steps"]:
        step += 1
        weight = advance(weight, step)
        fail(config, "working", step)
        save(rank, step, weight, plain_rows=config.get("plain_rows", 0))
        fail(config, "reported", step)
        if config.get("gate") and step == config.get("gate_step", 1):
            meet(f"{config['gate']}.{rank}")
    fail(config, "end", step)
    return weight


def load(rank: int) -> tuple[int, float]:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0, float(rank)
    with checkpoint.as_directory() as directory:
        found = json.loads(Path(directory, f"rank_{rank}.json").read_text())
    return found["step"], found["weight"]


def save(rank: int, step: int, weight: float, *, plain_rows: int = 0) -> None:
    for number in range(plain_rows):
        train.report({"step": step, "weight": weight, "part": number})
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank_{rank}.json").write_text(json.dumps({"step": step, "weight": weight}))
        train.report({"step": step, "weight": weight}, checkpoint=train.Checkpoint.from_directory(directory))


def fail(config: dict[str, Any], at: str, step: int) -> None:
    """Do what was ordered for this rank, place and step. An order with ``once`` is carried out once on each rank."""
    rank = train.get_context().get_world_rank()
    for order in config.get("faults", ()):
        if order["at"] != at or rank not in order.get("ranks", (rank,)) or order.get("step", step) != step:
            continue
        if "once" in order and not create(f"{order['once']}.{rank}"):
            continue
        WAYS[order["how"]](config)


def create(path: str) -> bool:
    """Make an empty file; whether it was not there before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def meet(gate: str) -> None:
    """Say that this worker is here, and wait until the test lets it go on. See ``runs.Gate``."""
    with open(f"{gate}.here", "w") as here:
        here.write(f"{os.getpid()}\n")
    with open(f"{gate}.go") as go:
        go.read()


def announce(path: Path) -> None:
    """Leave this worker's pid in a file, which is whole when it is there."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


class Stubborn(Exception):
    """An exception that cannot travel."""

    def __init__(self) -> None:
        super().__init__("holds on to a lock")
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    raise Stubborn


class Poison:
    """Pickles in the driver and cannot be loaded anywhere."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (importlib.import_module, ("surely_not_installed",))


def lose_a_peer(config: dict[str, Any]) -> None:
    """Rank 1 is killed with data unread in its socket; rank 0 sees a reset connection and says so before it ends."""
    if train.get_context().get_world_rank() == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            Path(config["port_file"] + ".new").write_text(str(server.getsockname()[1]))
            os.rename(config["port_file"] + ".new", config["port_file"])
            peer, _ = server.accept()
            peer.recv(1, socket.MSG_PEEK)
            os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(config["port_file"]):
        time.sleep(0.001)
    with socket.create_connection(("127.0.0.1", int(Path(config["port_file"]).read_text()))) as peer:
        peer.sendall(b"gradients that nobody reads")
        peer.recv(1)


def reset_alone() -> None:
    if train.get_context().get_world_rank() == 0:
        raise ConnectionResetError("the parameter server has gone")
    signal.pause()


def _raise(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    raise Boom(f"rank {rank} had enough", code=40 + rank)


def _crash(config: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _eat_memory(config: dict[str, Any]) -> None:
    """Run out of memory: the real kernel's killer in a small control group, where the test could make one."""
    if config["cgroup"]:
        Path(config["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 16)


WAYS = {
    "exception": _raise,
    "exit": lambda config: os._exit(3),
    "exit_zero": lambda config: os._exit(0),
    "sys_exit": lambda config: sys.exit("enough"),
    "sigkill": lambda config: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda config: os.kill(os.getpid(), signal.SIGTERM),
    "segfault": _crash,
    "oom": _eat_memory,
}
