"""What the storm rages against: a small deterministic training, and the driver that runs it.

Each rank moves its own weights, and starts every step from all ranks' weights of the newest checkpoint, so that a
lost, torn or mixed-up checkpoint changes the result. Workers import this module: it imports nothing of the storm.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast import train

WORKERS = 3
WIDTH = 64
PLAIN_ROWS = 2
KEEP = 3


def train_loop(config: dict[str, Any]) -> list[float]:
    """Train, with two plain reports and one checkpoint for each step."""
    rank = train.get_context().get_world_rank()
    step, everybody = load(train.get_checkpoint())
    while step < config["steps"]:
        step += 1
        mine = advance(rank, step, everybody)
        for part in range(PLAIN_ROWS):
            train.report({"step": step, "part": part, "first": mine[0]})
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank_{rank}.json").write_text(json.dumps({"step": step, "weights": mine}))
            train.report({"step": step, "first": mine[0]}, checkpoint=train.Checkpoint.from_directory(folder))
        _, everybody = load(train.get_checkpoint())
    return everybody[0]


def load(checkpoint: train.Checkpoint | None) -> tuple[int, list[list[float]]]:
    """The step that a checkpoint ends, and every rank's weights; without one, the beginning."""
    if checkpoint is None:
        return 0, [[float(rank + column) for column in range(WIDTH)] for rank in range(WORKERS)]
    with checkpoint.as_directory() as folder:
        found = [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(WORKERS)]
    return found[0]["step"], [saved["weights"] for saved in found]


def advance(rank: int, step: int, everybody: list[list[float]]) -> list[float]:
    mean = [sum(column) / WORKERS for column in zip(*everybody, strict=True)]
    return [
        0.7 * own + 0.3 * shared + 1.0 / (step + rank + 1) for own, shared in zip(everybody[rank], mean, strict=True)
    ]


def drive(name: str, storage: str, steps: int) -> None:
    """Be the driver."""
    train.DataParallelTrainer(
        train_loop,
        train_loop_config={"steps": steps},
        scaling_config=train.ScalingConfig(num_workers=WORKERS),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=KEEP),
            worker_output="none",
        ),
    ).fit()


def main() -> None:
    drive(sys.argv[1], sys.argv[2], int(sys.argv[3]))
