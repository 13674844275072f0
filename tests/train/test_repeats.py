"""The same exception at the same step twice in a row is not bad luck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import train
from holdfast.control import failures
from holdfast.control import vocabulary as v
from holdfast.control.failures import signature
from holdfast.journal import facts as f
from holdfast.train import machine as m
from tests.train import ordeals, runs
from tests.train.test_machine import Run

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/script.py", line 10, in train_loop
    step()
  File "/home/me/script.py", line {line}, in step
    tensor.add(1)
  File "/venv/lib/python3.11/site-packages/torch/tensor.py", line {deep}, in add
ValueError: no
"""


def failure(**what: Any) -> f.RankFailure:
    defaults = {"rank": 1, "kind": failures.EXCEPTION, "message": "no", "error": "ValueError", "calls": 3}
    return f.RankFailure(**{**defaults, "traceback": TRACEBACK.format(line=20, deep=7), **what})


def test_an_exception_is_known_by_class_message_place_rank_and_step() -> None:
    known = signature(failure(), 2)
    assert signature(failure(calls=1), 4) == known
    assert signature(failure(traceback=TRACEBACK.format(line=20, deep=8)), 2) == known
    for other in (
        failure(error="KeyError"),
        failure(message="yes"),
        failure(rank=0),
        failure(calls=4),
        failure(traceback=TRACEBACK.format(line=21, deep=7)),
    ):
        assert signature(other, 2) != known
    assert signature(failure(kind=failures.KILLED, error=""), 2) == ""


def test_addresses_of_objects_do_not_tell_exceptions_apart() -> None:
    first = failure(message="bad <Thing object at 0x7f0012345678>")
    assert signature(first, 0) == signature(failure(message="bad <Thing object at 0x7fab12345678>"), 0)


def repeating(**limits: int) -> Run:
    run = Run(**{failures.MAX_FAILURES: 5, **limits})
    run.machine = m.TrainMachine(m.Settings(1, {failures.MAX_FAILURES: 5}, stop_on_repeat=True))
    return run


def raise_and_end(run: Run, message: str = "no") -> list[f.Fact]:
    run.rank(v.RankRaised, error="ValueError", message=message, traceback="", started=True)
    return run.rank(v.RankExited, status=1)[0]


def test_a_step_is_the_same_when_it_is_reached_from_a_newer_checkpoint() -> None:
    run = repeating()
    run.arrive()
    run.commit(1)
    run.rank(v.RowsArrived, first=2, count=1, rows=b"{}")
    raise_and_end(run)
    run.arrive()
    run.commit(1)
    (ended, over) = raise_and_end(run)
    assert isinstance(ended, f.AttemptEnded)
    assert ended.charge == failures.MAX_FAILURES
    assert isinstance(over, f.RunEnded)
    assert over.status == m.FAILED
    assert over.reason.startswith("stop_on_repeat: the same exception")


def test_what_was_raised_is_remembered_over_a_driver_that_dies() -> None:
    run = repeating()
    run.arrive()
    raise_and_end(run)
    run.arrive()
    run.crash()
    run.open()
    run.arrive()
    assert isinstance(raise_and_end(run)[-1], f.RunEnded)


def test_other_failures_in_between_and_a_fresh_start_are_not_repeats() -> None:
    run = repeating()
    for message in ("a", "b", "a"):
        run.arrive()
        assert isinstance(raise_and_end(run, message)[-1], f.AttemptStarted)
    run.arrive()
    assert isinstance(raise_and_end(run, "a")[-1], f.RunEnded)
    run.open()
    run.arrive()
    assert isinstance(raise_and_end(run, "a")[-1], f.AttemptStarted)


@pytest.mark.parametrize("period", [1, 2])
def test_a_run_that_repeats_itself_stops_with_its_budget_left(period: int, tmp_path: Path) -> None:
    config = {"steps": 6, "at": 4, "ranks": [1], "message": "poisoned {object}", "period": period}
    with pytest.raises(train.WorkerGroupError, match="stop_on_repeat: the same exception was raised at") as caught:
        runs.fit(tmp_path, ordeals.stumble, config, workers=2, max_failures=5, failure={"stop_on_repeat": True})
    assert "poisoned" in str(caught.value.worker_failures[1])
    assert runs.charges(tmp_path / "run") == [failures.MAX_FAILURES] * 2


def test_different_messages_are_different_failures(tmp_path: Path) -> None:
    config = {"steps": 3, "at": 2, "ranks": [0], "message": "attempt {attempt}", "attempts": 3}
    result = runs.fit(tmp_path, ordeals.stumble, config, max_failures=5, failure={"stop_on_repeat": True})
    assert result.metrics is not None
    assert result.metrics["step"] == 3
    assert runs.charges(tmp_path / "run") == [failures.MAX_FAILURES] * 3


def test_without_the_option_a_run_repeats_itself_until_its_budget_is_used_up(tmp_path: Path) -> None:
    config = {"steps": 3, "at": 2, "ranks": [0], "message": "always"}
    with pytest.raises(train.WorkerGroupError, match="max_failures=2 allows no further restart"):
        runs.fit(tmp_path, ordeals.stumble, config, max_failures=2)
