"""The functions that the tests' workers run, and what an undisturbed run of them comes to.

Zygotes import this module, so it imports nothing that a worker does not need.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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


def raise_without_stderr() -> None:
    sys.stderr.close()
    raise Boom("nobody can print this")


class Poison:
    """Pickles in the driver and cannot be loaded anywhere."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (importlib.import_module, ("surely_not_installed",))


def lose_a_peer(config: dict[str, Any]) -> None:
    """Rank 1 is killed with data unread in its socket; rank 0 sees a reset connection and says so before it ends."""
    announce(Path(config["pids"], str(train.get_context().get_world_rank())))
    if train.get_context().get_world_rank() == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            Path(config["port_file"] + ".new").write_text(str(server.getsockname()[1]))
            os.rename(config["port_file"] + ".new", config["port_file"])
            peer, _ = server.accept()
            peer.recv(1, socket.MSG_PEEK)
            meet(f"{config['gate']}.1")
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


def report_files(metrics: dict[str, Any], files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))


def bring(config: dict[str, Any]) -> None:
    """One report in which each rank brings the files that are named for it."""
    rank = train.get_context().get_world_rank()
    files = config["files"].get(str(rank), {})
    if files or config.get("always"):
        report_files({"rank": rank}, files)
    else:
        train.report({"rank": rank})


def look_after_report(config: dict[str, Any]) -> list[list[Any]]:
    """What lies in storage right after each report has returned."""
    context = train.get_context()
    run = Path(context.get_storage())
    found = []
    for step in range(config["steps"]):
        report_files({"step": step}, {f"rank_{context.get_world_rank()}": str(step)})
        directory = f"checkpoint_{step:06d}"
        journal = b"".join(path.read_bytes() for path in sorted((run / "journal").iterdir()))
        committed = b'"CheckpointCommitted"' in journal and directory.encode() in journal
        found.append([directory, (run / directory / ".manifest.json").is_file(), committed])
    return found


def look_while_training(config: dict[str, Any]) -> list[str | None]:
    """The newest checkpoint before the first report, and after each."""
    context = train.get_context()
    found = [_newest_name()]
    for step in range(config["steps"]):
        if context.get_world_rank() == 0:
            report_files({"step": step}, {"model": str(step)})
        else:
            train.report({"step": step})
        found.append(_newest_name())
    return found


def _newest_name() -> str | None:
    checkpoint = train.get_checkpoint()
    return None if checkpoint is None else Path(checkpoint.path).name


def climb_and_look(config: dict[str, Any]) -> float:
    """``climb``, but each step starts from the newest checkpoint, as it lies in storage."""
    step, weight = load(0)
    while step < config["steps"]:
        step += 1
        weight = advance(weight, step)
        save(0, step, weight)
        if step == config["gate_step"]:
            meet(f"{config['gate']}.0")
        step, weight = load(0)
    return weight


def report_what_was_loaded() -> None:
    report_files({}, {"a": "first"})
    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    with tempfile.TemporaryDirectory() as directory:
        with checkpoint.as_directory() as loaded:
            shutil.copytree(loaded, directory, dirs_exist_ok=True)
        train.report({}, checkpoint=train.Checkpoint.from_directory(directory))


def score(config: dict[str, Any]) -> None:
    for accuracy in config["scores"]:
        report_files({"acc": accuracy, "eval": {"acc": accuracy}}, {"score": str(accuracy)})


def many_files(config: dict[str, Any]) -> None:
    for _ in range(config["steps"]):
        report_files({}, {f"part_{number}": "" for number in range(config["files"])})


def grow(config: dict[str, Any]) -> list[int]:
    """A checkpoint of each of these sizes, then the sizes of all that were saved."""
    saved = _sizes()
    for size in config["sizes"][len(saved) :]:
        saved = [*saved, size]
        report_files({"size": size}, {"saved.json": json.dumps(saved), "data": "x" * size})
    return _sizes()


def _sizes() -> list[int]:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as directory:
        found: list[int] = json.loads(Path(directory, "saved.json").read_text())
        return found


def report_rows(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    for row in range(config["rows"]):
        train.report({"row": row, "rank": rank})
    if "then" in config and ("once" not in config or create(config["once"])):
        WAYS[config["then"]](config)


def climb_after_rows(config: dict[str, Any]) -> None:
    """``climb``, with rows that tell their attempt; rank 1 fails only when rank 0 has reported its rows of that
    step.
    """
    context = train.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    step, weight = load(rank)
    while step < config["steps"]:
        step += 1
        for part in range(config["plain_rows"]):
            train.report({"step": step, "part": part, "attempt": attempt})
        marks = Path(config["faults"][0]["once"]).parent
        create(f"{marks}/rows.{attempt}.{step}.{rank}")
        if rank == 1:
            while not os.path.exists(f"{marks}/rows.{attempt}.{step}.0"):
                time.sleep(0.001)
        fail(config, "working", step)
        report_files(
            {"step": step, "attempt": attempt}, {f"rank_{rank}.json": json.dumps({"step": step, "weight": weight})}
        )


def report_odd_numbers() -> None:
    import numpy

    metrics = {
        "nan": math.nan,
        "inf": math.inf,
        "nested": {"minus": -math.inf},
        "float32": numpy.float32(0.5),
        "int64": numpy.int64(7),
        "bool": numpy.bool_(True),
        "list": [numpy.float64(1.5), {"deep": numpy.array(2)}],
    }
    train.report(metrics)
    report_files(metrics, {"a": ""})


def end_early(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    for number in range(config["reports"][str(rank)]):
        if number == 0 and rank % 2:
            train.report({})
        else:
            report_files({}, {f"rank_{rank}": ""})


def run_ahead(config: dict[str, Any]) -> None:
    """Rank 1 waits before its first report; rank 0 tells how far it has come."""
    if train.get_context().get_world_rank() == 1:
        meet(f"{config['gate']}.1")
        for row in range(config["rows"]):
            train.report({"row": row})
        return
    progress = os.open(config["progress"], os.O_CREAT | os.O_WRONLY)
    for row in range(config["rows"]):
        train.report({"row": row})
        os.pwrite(progress, f"{os.getpid()} {row + 1:6}".encode(), 0)


class Gift:
    """Something that JSON cannot hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Gift({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gift) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


def return_something() -> Gift:
    return Gift(f"rank {train.get_context().get_world_rank()}")


def report_in_a_forked_child() -> dict[str, str]:
    train.report({"step": 1})
    said = {}
    for name, call in (("report", lambda: train.report({"step": 99})), ("get_checkpoint", train.get_checkpoint)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                call()
                os.write(writing, b"nothing was said")
            except RuntimeError as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said[name] = os.read(reading, 4096).decode()
    train.report({"step": 2})
    return said


def report_in_threads(config: dict[str, Any]) -> None:
    def go(number: int) -> None:
        for row in range(config["rows"]):
            train.report({"thread": number, "row": row})

    threads = [threading.Thread(target=go, args=(number,)) for number in range(config["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def talk_and_climb(config: dict[str, Any]) -> None:
    context = train.get_context()
    rank = context.get_world_rank()
    print(f"out of rank {rank} in attempt {context.get_attempt()}")
    print(f"err of rank {rank} in attempt {context.get_attempt()}", file=sys.stderr)
    subprocess.run(["echo", f"from below rank {rank}"], check=True)
    sys.stdout.write(f"without a newline {rank}")
    sys.stdout.flush()
    everybody_has(config, context)
    climb(config)


def everybody_has(config: dict[str, Any], context: train.TrainContext) -> None:
    """Return when every rank of this attempt has called this."""
    folder = context.get_storage()
    create(f"{folder}/here.{context.get_attempt()}.{context.get_world_rank()}")
    while not all(
        os.path.exists(f"{folder}/here.{context.get_attempt()}.{rank}") for rank in range(context.get_world_size())
    ):
        time.sleep(0.001)


def report_badly(config: dict[str, Any]) -> None:
    train.report({"before": True})
    WRONG[config["what"]]()


def _array() -> None:
    import numpy

    train.report({"loss": numpy.zeros(2)})


def _tensor() -> None:
    tensor = type("Tensor", (), {"__module__": "torch"})
    train.report({"eval": {"loss": tensor()}})


def _checkpoint_at(make: Callable[[Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "place")
        make(place)
        train.report({}, checkpoint=train.Checkpoint(place))


def _holding(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def fill(place: Path) -> None:
        place.mkdir()
        make(place / "odd")

    return fill


WRONG: dict[str, Callable[[], Any]] = {
    "array": _array,
    "tensor": _tensor,
    "set": lambda: train.report({"labels": [1, {2}]}),
    "object": lambda: train.report({"thing": Gift("x")}),
    "bytes": lambda: train.report({"raw": b"x"}),
    "key": lambda: train.report({("a", "b"): 1}),  # type: ignore[dict-item]
    "list": lambda: train.report([1]),  # type: ignore[arg-type]
    "none": lambda: train.report(None),  # type: ignore[arg-type]
    "path": lambda: train.report({}, checkpoint="/tmp"),  # type: ignore[arg-type]
    "missing directory": lambda: _checkpoint_at(lambda place: None),
    "file": lambda: _checkpoint_at(lambda place: place.write_text("")),
    "pipe": lambda: _checkpoint_at(_holding(os.mkfifo)),
    "link to nowhere": lambda: _checkpoint_at(_holding(lambda place: place.symlink_to("nowhere"))),
    "link to a directory": lambda: _checkpoint_at(_holding(lambda place: place.symlink_to("/tmp"))),
}


def tell_places() -> None:
    context = train.get_context()
    agent = next(parent.pid for parent in psutil.Process().parents() if parent.name() == "hf:agent")
    train.report(
        {
            "rank": context.get_world_rank(),
            "world_size": context.get_world_size(),
            "local_rank": context.get_local_rank(),
            "local_world_size": context.get_local_world_size(),
            "node_rank": context.get_node_rank(),
            "experiment": context.get_experiment_name(),
            "storage": context.get_storage(),
            "attempt": context.get_attempt(),
            "agent": agent,
        }
    )


def raise_odd_text() -> None:
    raise FileNotFoundError("nothing at \udcff")


class _Stubborn:
    def __repr__(self) -> str:
        raise ValueError("not to be shown")


def return_stubborn() -> Any:
    return _Stubborn()


def report_a_relative_path(config: dict[str, Any]) -> None:
    os.chdir(config["folder"])
    os.mkdir("mine")
    Path("mine", "a").write_text("1")
    train.report({}, checkpoint=train.Checkpoint("mine"))


def report_large_rows(config: dict[str, Any]) -> None:
    for step in range(config["rows"]):
        train.report({"step": step, "filler": "x" * config["size"]})
