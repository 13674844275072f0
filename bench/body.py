"""The training functions. One text for both sides: only the import differs, as it would in a user's script."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.marks import mark, read

if os.environ.get("BENCH_SIDE") == "ray":
    from ray import train as train
else:
    from holdfast import train as train

WORKERS = 2


def start(config: dict[str, Any]) -> None:
    """Only be there."""
    mark(config["marks"], "first_line", train.get_context().get_world_rank())


def kill(config: dict[str, Any]) -> None:
    """Rank 1 kills itself as soon as every rank is at work, `kills` times; nobody else ends before that."""
    rank = train.get_context().get_world_rank()
    lives = len(read(config["marks"], "killed")) + 1
    mark(config["marks"], "first_line", rank)
    if lives > config["kills"]:
        return
    while rank != 1:
        time.sleep(60)
    while len(read(config["marks"], "first_line")) < lives * WORKERS:
        time.sleep(0.001)
    mark(config["marks"], "killed", rank)
    os.kill(os.getpid(), signal.SIGKILL)


def metrics(config: dict[str, Any]) -> None:
    """Report and report."""
    rank = train.get_context().get_world_rank()
    mark(config["marks"], "begin", rank)
    for step in range(config["reports"]):
        train.report({"step": step, "loss": 1.0 / (step + 1)})
    mark(config["marks"], "end", rank)


def small_checkpoints(config: dict[str, Any]) -> None:
    """Every rank brings a file of 1 KB to every checkpoint."""
    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory(dir=config["scratch"]) as folder:
        Path(folder, f"rank_{rank}.bin").write_bytes(os.urandom(1024))
        mark(config["marks"], "begin", rank)
        for step in range(config["commits"]):
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))
        recorded()
        mark(config["marks"], "recorded", rank)


def large_checkpoint(config: dict[str, Any]) -> None:
    """One checkpoint from a directory that is already there."""
    checkpoint = train.Checkpoint.from_directory(config["source"])
    mark(config["marks"], "begin")
    train.report({"step": 0}, checkpoint=checkpoint)
    mark(config["marks"], "returned")
    recorded()
    mark(config["marks"], "recorded")


def recorded() -> None:
    """Block until the controller knows every checkpoint that was reported: Ray Train's report returns before that."""
    wait = getattr(train, "get_all_reported_checkpoints", None)
    if wait is not None:
        wait()
