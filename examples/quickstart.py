"""The example of the README. Run it, kill it at any moment, run it again: it goes on where it was."""

import pathlib
import tempfile

from holdfast import train


def train_loop(config):
    checkpoint, step = train.get_checkpoint(), 0
    if checkpoint:  # after a failure, or in a new driver
        with checkpoint.as_directory() as folder:
            step = int(pathlib.Path(folder, "step").read_text())
    while step < config["steps"]:
        step += 1  # your training step
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "step").write_text(str(step))
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))


run = train.RunConfig(name="quickstart", failure_config=train.FailureConfig(max_failures=3))
scaling = train.ScalingConfig(num_workers=2)
trainer = train.DataParallelTrainer(train_loop, train_loop_config={"steps": 20}, scaling_config=scaling, run_config=run)
print(trainer.fit().metrics)
