"""What a result tells, right after ``fit`` and when it is read back later."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from holdfast import train
from holdfast.errors import ConfigurationError, NoCheckpointError
from tests.train import loops, runs

SCORES = [0.1, 0.9, 0.2, 0.8]


def names(result: train.Result) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"checkpoint_score_attribute": "acc"}, [0, 2, 3, 1]),
        ({"checkpoint_score_attribute": "eval/acc", "checkpoint_score_order": "min"}, [1, 3, 2, 0]),
        ({"checkpoint_score_attribute": "no such metric"}, [0, 1, 2, 3]),
        ({"checkpoint_score_attribute": "acc", "checkpoint_score_order": "min", "num_to_keep": 2}, [3, 2, 0]),
    ],
)
def test_the_best_checkpoint_comes_last(keep: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.score, {"scores": SCORES}, keep=train.CheckpointConfig(**keep))
    wanted = [f"checkpoint_{index:06d}" for index in expected]
    assert names(result) == wanted
    assert names(train.Result.from_path(result.path)) == wanted
    assert result.checkpoint == train.Checkpoint(f"{result.path}/checkpoint_000003")
    for checkpoint, metrics in result.best_checkpoints:
        assert runs.content(checkpoint) == {"score": str(metrics["acc"]).encode()}


def test_get_best_checkpoint_by_any_metric_also_a_nested_one(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.score, {"scores": [math.nan, *SCORES]})
    for seen in (result, train.Result.from_path(tmp_path / "run")):
        assert runs.content(seen.get_best_checkpoint("acc", "max")) == {"score": b"0.9"}
        assert runs.content(seen.get_best_checkpoint("eval/acc", mode="min")) == {"score": b"0.1"}
    with pytest.raises(ConfigurationError, match="'max' or 'min'"):
        result.get_best_checkpoint("acc", "best")
    with pytest.raises(NoCheckpointError, match=r"a number under 'loss'; they have: acc, eval/acc") as caught:
        result.get_best_checkpoint("loss", "min")
    assert isinstance(caught.value, RuntimeError)


def test_a_run_without_checkpoints_has_no_best_one(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_rows, {"rows": 1})
    assert result.best_checkpoints == []
    with pytest.raises(NoCheckpointError, match="has no checkpoint"):
        result.get_best_checkpoint("acc", "max")


def test_the_dataframe_has_every_row_that_counts_and_nested_metrics_as_paths(tmp_path: Path) -> None:
    faults = [{"at": "working", "step": 3, "how": "exception", "once": str(tmp_path / "once")}]
    config = {"steps": 4, "plain_rows": 1, "faults": faults}
    result = runs.fit(tmp_path, config=config, max_failures=1)
    for seen in (result, train.Result.from_path(result.path)):
        table = seen.metrics_dataframe
        assert isinstance(table, pandas.DataFrame)
        assert list(table["step"]) == [1, 1, 2, 2, 3, 3, 4, 4]
        assert list(table.columns) == ["step", "weight", "part"]
    nested = runs.fit(tmp_path, loops.score, {"scores": SCORES}, name="nested")
    assert list(nested.metrics_dataframe["eval/acc"]) == SCORES


def test_a_run_without_rows_has_an_empty_dataframe(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_rows, {"rows": 0})
    assert result.metrics is None
    assert result.metrics_dataframe.empty


def test_what_is_read_back_of_a_finished_run_is_what_fit_returned(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, config={"steps": 2})
    assert train.Result.from_path(result.path) == result
    assert result.filesystem is None


def test_the_error_of_a_failed_run_is_read_back_with_the_users_traceback(tmp_path: Path) -> None:
    faults = [{"at": "working", "step": 2, "ranks": [1], "how": "exception"}]
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, config={"steps": 2, "faults": faults}, workers=2)
    result = train.Result.from_path(tmp_path / "run")
    assert isinstance(result.error, train.WorkerGroupError)
    assert str(result.error) == str(caught.value)
    assert "tests.train.loops.Boom: rank 1 had enough" in str(result.error)
    assert set(result.error.worker_failures) == set(caught.value.worker_failures)
    told = result.error.worker_failures[1]
    assert str(told) == "rank 1 tests.train.loops.Boom rank 1 had enough"
    assert "in climb" in told.__notes__[0]


def test_a_run_that_is_being_driven_can_be_looked_at(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    door = gate(0)
    with runs.fitting(tmp_path, config={"steps": 2, "gate": door.path}) as running:
        door.wait()
        seen = train.Result.from_path(tmp_path / "run")
        assert seen.error is None
        assert seen.return_value is None
        assert names(seen) == ["checkpoint_000000"]
        assert seen.metrics == {"step": 1, "weight": loops.undisturbed_weight(0, 1)}
        door.open()
        running.result()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        train.Result.from_path(tmp_path)
    with pytest.raises(ConfigurationError, match="holds no run"):
        train.Result.from_path(tmp_path / "nowhere")
