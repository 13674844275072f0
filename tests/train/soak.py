"""A long training that writes down, as it goes, how much memory and how many descriptors each of its processes has."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from holdfast import train

SAMPLES = 30


def soak(config: dict[str, Any]) -> None:
    """``reports`` rows, over both ranks and all along, and ``checkpoints`` commits; rank 0 looks at everybody."""
    rank = train.get_context().get_world_rank()
    checkpoints = config["checkpoints"]
    rows = config["reports"] // (2 * checkpoints) - 1
    with tempfile.TemporaryDirectory() as folder, open(config["samples"], "a") as samples:
        for number in range(checkpoints):
            for row in range(rows):
                train.report({"number": number, "row": row, "loss": 1.0 / (number + 1)})
            Path(folder, f"rank_{rank}.json").write_text(json.dumps([number] * 100))
            train.report({"number": number}, checkpoint=train.Checkpoint.from_directory(folder))
            newest = train.get_checkpoint()
            assert newest is not None
            with newest.as_directory() as loaded:
                assert json.loads(Path(loaded, f"rank_{rank}.json").read_text())[0] == number
            if rank == 0 and number % (checkpoints // SAMPLES) == 0:
                samples.write(json.dumps({name: measure(process) for name, process in everybody()}) + "\n")
                samples.flush()


def everybody() -> list[tuple[str, psutil.Process]]:
    """Every process of this run, from the driver down, by name."""
    above = psutil.Process().parents()
    janitor = next(place for place, process in enumerate(above) if process.name() == "hf:janitor")
    driver = above[janitor + 1]
    return [("driver", driver), *((f"{p.name()} {p.pid}", p) for p in driver.children(recursive=True))]


def measure(process: psutil.Process) -> tuple[int, int]:
    """Bytes of its own in memory, and open descriptors."""
    return process.memory_full_info().uss, process.num_fds()


def main() -> None:
    storage, reports, checkpoints = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = {"reports": reports, "checkpoints": checkpoints, "samples": f"{storage}/samples"}
    train.DataParallelTrainer(
        soak,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="soak", storage_path=storage, checkpoint_config=train.CheckpointConfig(num_to_keep=2)
        ),
    ).fit()
