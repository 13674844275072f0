"""What a person sees: on the console while a run goes on, and in its logs afterwards."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast import train
from tests.train import loops, runs

Capture = pytest.CaptureFixture[str]


def lines(capsys: Capture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_first_line_names_the_run_its_storage_and_the_engine(tmp_path: Path, capsys: Capture) -> None:
    runs.fit(tmp_path, config={"steps": 1}, workers=2)
    assert re.fullmatch(
        rf"holdfast: run 'run': 2 workers on local \(\d+ cores\), storage {tmp_path}/run", lines(capsys)[0]
    )


def test_the_last_line_has_the_result_the_goodput_and_where_the_logs_are(tmp_path: Path, capsys: Capture) -> None:
    runs.fit(tmp_path, config={"steps": 2})
    last = lines(capsys)[-1]
    assert last.startswith("holdfast: finished with step=2, weight=2.75, newest checkpoint checkpoint_000001; goodput ")
    assert re.search(r"goodput \d+\.\d% \(useful [\d.]+ m?s of [\d.]+ m?s, starting [\d.]+ m?s", last)
    assert last.endswith(f"; logs in {tmp_path}/run/logs")


def test_a_failure_is_told_once_with_its_cause_its_cost_and_its_recovery(tmp_path: Path, capsys: Capture) -> None:
    faults = [{"at": "working", "step": 3, "ranks": [1], "how": "exception", "once": str(tmp_path / "once")}]
    config = {"steps": 4, "plain_rows": 2, "faults": faults}
    runs.fit(tmp_path, config=config, workers=2, max_failures=3)
    told = [line for line in lines(capsys) if "failed" in line]
    assert len(told) == 1
    assert re.fullmatch(
        r"holdfast: attempt 1 failed \(restart 1 of 3\): rank 1 raised tests\.train\.loops\.Boom: rank 1 had "
        r"enough, 6 reports into the attempt; resuming from checkpoint_000001, [0-3] reports? redone; "
        r"running again after [\d.]+ m?s",
        told[0],
    )


def test_a_failure_without_a_checkpoint_starts_over(tmp_path: Path, capsys: Capture) -> None:
    config = {"rows": 7, "then": "sigkill", "once": str(tmp_path / "once")}
    runs.fit(tmp_path, loops.report_rows, config, max_failures=-1)
    told = next(line for line in lines(capsys) if "failed" in line)
    assert told.startswith(
        "holdfast: attempt 1 failed (restart 1): rank 0 was killed by SIGKILL, 7 reports into the attempt; "
        "starting over, 7 reports redone; "
        "running again after "
    )


def test_a_run_that_gives_up_says_so_with_its_goodput_and_logs(tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(train.WorkerGroupError):
        runs.fit(tmp_path, config={"steps": 2, "faults": [{"at": "working", "step": 2, "how": "sigkill"}]})
    failed, last = lines(capsys)[-2:]
    assert failed == (
        "holdfast: attempt 1 failed (no restart left, 0 allowed): rank 0 was killed by SIGKILL, "
        "1 report into the attempt"
    )
    assert last.startswith("holdfast: FAILED: max_failures=0 allows no further restart; goodput ")
    assert last.endswith(f"; logs in {tmp_path}/run/logs")


def test_consequences_are_counted_and_not_told_one_by_one(tmp_path: Path, capsys: Capture) -> None:
    runs.lose_a_peer(tmp_path)
    out = "\n".join(line for line in lines(capsys) if line.startswith("holdfast: "))
    assert "rank 1 was killed by SIGKILL (1 other rank failed as a consequence)" in out
    assert "ConnectionResetError" not in out


def test_each_worker_of_each_attempt_has_a_log_of_its_own(tmp_path: Path) -> None:
    faults = [{"at": "begin", "ranks": [1], "how": "sigkill", "once": str(tmp_path / "once")}]
    result = runs.fit(tmp_path, loops.talk_and_climb, {"steps": 1, "faults": faults}, workers=2, max_failures=1)
    logs = Path(result.path, "logs")
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        f"attempt_{attempt}/rank_{rank}.log" for attempt in (1, 2) for rank in (0, 1)
    ]
    for attempt in (1, 2):
        for rank in (0, 1):
            text = (logs / f"attempt_{attempt}" / f"rank_{rank}.log").read_text()
            assert f"out of rank {rank} in attempt {attempt}\n" in text
            assert f"err of rank {rank} in attempt {attempt}\n" in text
            assert f"from below rank {rank}\n" in text
            assert f"without a newline {rank}" in text


@pytest.mark.parametrize(("choice", "ranks"), [(None, {0}), ("rank_zero", {0}), ("all", {0, 1, 2}), ("none", set())])
def test_whose_output_reaches_the_console_can_be_chosen(
    choice: str | None, ranks: set[int], tmp_path: Path, capsys: Capture
) -> None:
    options = {} if choice is None else {"worker_output": choice}
    runs.fit(tmp_path, loops.talk_and_climb, {"steps": 1}, workers=3, **options)
    seen = lines(capsys)
    for rank in range(3):
        for text in ("out of rank", "err of rank"):
            line = f"(rank {rank}) {text} {rank} in attempt 1"
            assert (line in seen) is (rank in ranks)
    assert {line.partition(")")[0] + ")" for line in seen if line.startswith("(rank")} == {f"(rank {n})" for n in ranks}


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path, capsys: Capture) -> None:
    runs.fit(tmp_path, config={"steps": 2})
    runs.fit(tmp_path, config={"steps": 3})
    assert "holdfast: resuming after attempt 1, from checkpoint_000001" in lines(capsys)


def test_a_closed_terminal_does_not_fail_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "terminal", "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
    result = runs.fit(tmp_path, config={"steps": 1})
    runs.assert_undisturbed(result, workers=1, steps=1)


def test_a_group_that_is_larger_than_the_machine_is_told_to_share_it(tmp_path: Path, capsys: Capture) -> None:
    cores = len(os.sched_getaffinity(0))
    runs.fit(tmp_path, config={"steps": 1}, workers=cores + 1)
    assert lines(capsys)[1] == f"holdfast: {cores + 1} workers share {cores} core{'s' if cores != 1 else ''}"
    runs.fit(tmp_path, config={"steps": 1}, workers=cores, name="fits")
    assert not [line for line in lines(capsys) if "share" in line]
