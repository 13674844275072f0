"""What older scripts call: an error that says what to do instead."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from holdfast import train
from holdfast.errors import ConfigurationError
from tests.train import loops, runs


def test_restore_says_that_a_run_goes_on_by_itself(tmp_path: Path) -> None:
    for call in (train.DataParallelTrainer.restore, train.DataParallelTrainer.can_restore):
        with pytest.raises(ConfigurationError, match=r"the same storage_path and name.*call fit"):
            call(str(tmp_path), train_loop_per_worker=loops.climb)


def test_resume_from_checkpoint_says_where_the_checkpoint_goes_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pass that checkpoint in train_loop_config"):
        train.DataParallelTrainer(loops.climb, resume_from_checkpoint=train.Checkpoint(tmp_path))
    train.DataParallelTrainer(loops.climb, resume_from_checkpoint=None)


def test_a_new_run_can_start_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    """What the errors advise."""

    def fine_tune(config: dict[str, Any]) -> int:
        checkpoint = train.get_checkpoint() or config["start"]
        with checkpoint.as_directory() as folder:
            step: int = json.loads(Path(folder, "rank_0.json").read_text())["step"]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "rank_0.json").write_text(json.dumps({"step": step + 1}))
            train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
        return step + 1

    first = runs.fit(tmp_path, config={"steps": 3}, name="first")
    second = runs.fit(tmp_path, fine_tune, {"start": first.checkpoint}, name="second")
    assert second.return_value == 4
