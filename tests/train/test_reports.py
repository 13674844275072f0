"""Reports: every row is kept, what was superseded is left out, and nobody waits for ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from holdfast import train
from holdfast.control import failures
from holdfast.control.group import FLOOR_STEP
from holdfast.journal import facts as f
from tests.train import loops, runs

RUN_AHEAD = 1000


def test_every_row_of_every_rank_is_in_the_journal(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_rows, {"rows": 5000}, workers=3)
    for rank in range(3):
        assert runs.rows(result.path, rank) == [{"row": n, "rank": rank} for n in range(5000)]
    assert result.metrics_rows() == [{"row": n, "rank": 0} for n in range(5000)]
    assert result.metrics == {"row": 4999, "rank": 0}
    assert result.checkpoint is None


@pytest.mark.parametrize("rows", [1, 777])
def test_rows_reported_right_before_a_sigkill_are_kept(rows: int, tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="was killed by SIGKILL"):
        runs.fit(tmp_path, loops.report_rows, {"rows": rows, "then": "sigkill"})
    assert runs.rows(tmp_path / "run", 0) == [{"row": n, "rank": 0} for n in range(rows)]
    (ended,) = runs.facts(tmp_path / "run", f.AttemptEnded)
    assert ended.calls == (rows,)
    assert train.Result.from_path(tmp_path / "run").metrics == {"row": rows - 1, "rank": 0}


def test_rows_that_a_restart_superseded_are_left_out(tmp_path: Path) -> None:
    faults = [{"at": "working", "step": 3, "ranks": [1], "how": "sigkill", "once": str(tmp_path / "once")}]
    config = {"steps": 4, "plain_rows": 3, "faults": faults}
    result = runs.fit(tmp_path, loops.climb_after_rows, config, workers=2, max_failures=1)
    kept = result.metrics_rows()
    assert [(row["step"], row.get("part")) for row in kept] == [
        (step, part) for step in range(1, 5) for part in (0, 1, 2, None)
    ]
    everything = runs.rows(result.path, 0)
    assert len(everything) > len(kept)
    superseded = [row for row in everything if row["attempt"] == 1 and row["step"] == 3]
    assert superseded
    assert not [row for row in kept if row["attempt"] == 1 and row["step"] == 3]
    assert result.metrics == kept[-1]


def test_a_run_that_starts_over_counts_its_last_attempt_alone(tmp_path: Path) -> None:
    config = {"rows": 10, "then": "sigkill", "once": str(tmp_path / "once")}
    result = runs.fit(tmp_path, loops.report_rows, config, max_failures=1)
    assert len(runs.rows(result.path, 0)) == 20
    assert result.metrics_rows() == [{"row": n, "rank": 0} for n in range(10)]


def test_numbers_that_json_does_not_know_and_numpys_survive(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_odd_numbers)
    plain, in_checkpoint = result.metrics_rows()
    for row in (plain, in_checkpoint, result.metrics, result.best_checkpoints[0][1]):
        assert row is not None
        assert math.isnan(row["nan"])
        assert (row["inf"], row["nested"]["minus"]) == (math.inf, -math.inf)
        assert (row["float32"], row["int64"], row["bool"]) == (0.5, 7, True)
        assert row["list"] == [1.5, {"deep": 2}]
        assert type(row["int64"]) is int
    again = train.Result.from_path(result.path)
    assert again.metrics is not None
    assert math.isnan(again.metrics["nan"])
    assert again.metrics["float32"] == 0.5


def test_a_rank_that_ends_early_while_others_bring_a_checkpoint_is_an_error_that_names_the_ranks(
    tmp_path: Path,
) -> None:
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, loops.end_early, {"reports": {"0": 3, "1": 1}}, workers=2)
    text = str(caught.value)
    assert text.startswith("rank 1 ended after 1 report while rank 0 went on to report 2")
    assert "every rank must call report the same number of times" in text
    assert [root.kind for root in runs.roots(tmp_path / "run")] == [failures.MISMATCH]
    assert len(runs.facts(tmp_path / "run", f.CheckpointCommitted)) == 1


def test_a_rank_runs_a_thousand_reports_ahead_of_the_slowest_and_no_further(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(1)
    progress = tmp_path / "progress"
    config = {"rows": 5000, "gate": meeting.path, "progress": str(progress)}

    def ahead() -> int:
        return int(progress.read_text().split()[0])

    def reported() -> int:
        told = progress.read_text().split() if progress.exists() else []
        return int(told[1]) if told else 0

    with runs.fitting(tmp_path, loops.run_ahead, config, workers=2) as running:
        meeting.wait(1)
        runs.wait_until(lambda: reported() >= RUN_AHEAD and psutil.Process(ahead()).status() == psutil.STATUS_SLEEPING)
        made = reported()
        assert RUN_AHEAD <= made <= RUN_AHEAD + FLOOR_STEP
        meeting.open(1)
        result = running.result()
    assert len(runs.rows(result.path, 0)) == len(runs.rows(result.path, 1)) == 5000


def test_metrics_of_a_run_that_never_ended_are_there(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0, 1)
    with runs.Driver(tmp_path, config={"steps": 3, "plain_rows": 2, "gate": meeting.path, "gate_step": 2}) as driver:
        for rank in (0, 1):
            meeting.wait(rank)
        result = train.Result.from_path(tmp_path / "run")
        assert [row["step"] for row in result.metrics_rows()] == [1, 1, 1, 2, 2, 2]
        assert result.error is None
        driver.kill()
    result = train.Result.from_path(tmp_path / "run")
    assert result.metrics == {"step": 2, "weight": loops.undisturbed_weight(0, 2)}
    assert result.checkpoint is not None


def test_the_return_value_is_rank_zeros_and_what_lies_in_storage_is_text(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.return_something, workers=2)
    assert result.return_value == loops.Gift("rank 0")
    assert train.Result.from_path(result.path).return_value == repr(loops.Gift("rank 0"))
    (ended,) = runs.facts(result.path, f.RunEnded)
    assert bytes(ended.return_value) == b"\"Gift('rank 0')\""


def test_the_result_of_a_failed_run_holds_its_error(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError):
        runs.fit(tmp_path, config={"steps": 2, "faults": [{"at": "working", "step": 2, "how": "exception"}]})
    result = train.Result.from_path(tmp_path / "run")
    assert isinstance(result.error, train.TrainingFailedError)
    assert "max_failures=0" in str(result.error)
    assert result.metrics == {"step": 1, "weight": loops.undisturbed_weight(0, 1)}


def test_a_forked_child_of_a_worker_may_not_report_and_does_not_disturb_it(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_in_a_forked_child)
    assert "this is a process that it has forked" in result.return_value["report"]
    assert "this is a process that it has forked" in result.return_value["get_checkpoint"]
    assert result.metrics_rows() == [{"step": 1}, {"step": 2}]


def test_threads_of_a_worker_may_report(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_in_threads, {"threads": 4, "rows": 200})
    rows = result.metrics_rows()
    for thread in range(4):
        assert [row["row"] for row in rows if row["thread"] == thread] == list(range(200))
