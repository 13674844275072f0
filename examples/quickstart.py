"""The example of the README. Run it, kill it at any moment, run it again: it goes on where it was."""

import json
import pathlib
import tempfile

from holdfast import train


def train_loop(config):
    rank, step, weight = train.get_context().get_world_rank(), 0, 0.0
    if checkpoint := train.get_checkpoint():  # after a failure, or in a new driver
        with checkpoint.as_directory() as folder:
            step, weight = json.loads(pathlib.Path(folder, f"rank_{rank}.json").read_text())
    while step < config["steps"]:
        step, weight = step + 1, weight + 0.1 * (3.0 - weight)  # your training step
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, f"rank_{rank}.json").write_text(json.dumps([step, weight]))
            train.report({"step": step, "weight": weight}, checkpoint=train.Checkpoint.from_directory(folder))


result = train.DataParallelTrainer(
    train_loop,
    train_loop_config={"steps": 20},
    scaling_config=train.ScalingConfig(num_workers=2),
    run_config=train.RunConfig(name="quickstart", failure_config=train.FailureConfig(max_failures=3)),
).fit()
print(result.metrics, "from", result.checkpoint)
