"""A rank that stands still is noticed, its stacks are told, and the run goes on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import train
from holdfast.control import failures, hang
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.train import machine as m
from tests.train import ordeals, runs
from tests.train.test_machine import AT, G, Run

LIMIT_S = 0.5


@pytest.mark.parametrize(
    ("how", "frame"),
    [("python", "in wait_in_vain"), ("native", "in hold_the_interpreter"), ("stopped", "")],
)
def test_a_run_outlives_a_rank_that_stands_still(how: str, frame: str, tmp_path: Path) -> None:
    config = {"steps": 4, "at": 3, "ranks": [1], "how": how}
    failure = {"hang_timeout_s": LIMIT_S}
    result = runs.fit(tmp_path, ordeals.stand_still, config, workers=2, max_failures=1, failure=failure)
    assert result.metrics is not None
    assert result.metrics["step"] == 4
    assert runs.charges(result.path) == [failures.MAX_FAILURES]
    (root,) = runs.roots(result.path)
    assert (root.rank, root.kind, root.calls) == (1, failures.HANG, 2)
    assert root.message.startswith("made no progress for 0.")
    logs = Path(result.path, "logs/attempt_1")
    assert "in report" in (logs / "rank_0.log").read_text()
    assert "Stacks of rank 0:" in root.traceback
    assert "in report" in root.traceback
    if frame:
        assert frame in (logs / "rank_1.log").read_text()
        assert root.traceback.startswith("Stacks of rank 1:\n")
        assert frame in root.traceback
    else:
        assert "Rank 1 did not tell its stacks" in root.traceback


def test_the_error_of_a_run_that_hangs_shows_where(tmp_path: Path) -> None:
    config = {"steps": 4, "at": 2, "ranks": [0], "how": "python"}
    with pytest.raises(train.WorkerGroupError, match=r"rank 0 made no progress for 0\.\d+ s, 1 report into") as caught:
        runs.fit(tmp_path, ordeals.stand_still, config, failure={"hang_timeout_s": LIMIT_S})
    assert "in wait_in_vain" in str(caught.value)
    assert "max_failures=0 allows no further restart" in str(caught.value)


def test_the_console_tells_of_a_hang_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"steps": 3, "at": 2, "ranks": [0], "how": "python"}
    runs.fit(tmp_path, ordeals.stand_still, config, workers=2, max_failures=1, failure={"hang_timeout_s": LIMIT_S})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("holdfast: attempt 1 failed (restart 1 of 1): rank 0 made no progress for 0.")


def test_heartbeats_are_progress_and_waiting_in_our_calls_is_no_hang(tmp_path: Path) -> None:
    config = {"seconds": 4 * LIMIT_S}
    result = runs.fit(tmp_path, ordeals.take_long, config, workers=3, failure={"hang_timeout_s": LIMIT_S})
    assert result.checkpoint is not None
    assert runs.outcomes(result.path) == ["finished"]


def test_a_heartbeat_outside_a_worker_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"train.heartbeat\(\) can only be called inside"):
        train.heartbeat()


def watched(setting: float | str | None, world_size: int = 1, **limits: int) -> Run:
    run = Run(world_size, **limits)
    allowed = {failures.MAX_FAILURES: 1, **limits}
    run.machine = m.TrainMachine(m.Settings(world_size, allowed, hang_timeout_s=setting))
    return run


def place(run: Run) -> list[v.Command]:
    nodes = ("n",) * run.world_size
    return run.post(v.GroupPlaced, group=G, attempt=run.state.group.attempt, nodes=nodes)[1]


def test_the_agents_are_told_the_limit_once_the_group_is_placed() -> None:
    assert place(watched(None)) == []
    assert place(watched(3)) == [v.Watch(group=G, attempt=1, seconds=3.0)]


def test_every_rank_is_asked_for_its_stacks_and_the_slowest_is_the_root() -> None:
    run = watched(3, world_size=3)
    place(run)
    run.arrive()
    for rank in (0, 2):
        run.rank(v.RowsArrived, rank, first=1, count=1, rows=b"{}")
    asked = run.rank(v.RankQuiet, 0, seconds=3.5)
    assert asked == ([], [v.DumpStacks(group=G, attempt=1), v.Wait(name="stacks 1", seconds=hang.STACKS_S)])
    assert run.rank(v.RankQuiet, 0, seconds=3.6) == ([], [])
    assert run.rank(v.RankQuiet, 1, seconds=3.25) == ([], [])
    assert run.rank(v.StacksTold, 0, text="barrier") == ([], [])
    assert run.rank(v.StacksTold, 2, text="barrier") == ([], [])
    assert run.rank(v.StacksTold, 1, text="loop") == ([], [v.KillGroup(group=G, attempt=1)])
    for rank in range(3):
        facts, _ = run.rank(v.RankExited, rank, status=-9, ours=True)
    (ended, started) = facts
    assert isinstance(ended, f.AttemptEnded)
    assert ended.charge == failures.MAX_FAILURES
    assert [(failure.rank, failure.message) for failure in ended.failures] == [
        (1, "made no progress for 3.25 s"),
        (0, "made no progress for 3.5 s"),
    ]
    assert ended.failures[0].traceback == "Stacks of rank 1:\nloop\n\nStacks of ranks 0, 2:\nbarrier\n"
    assert isinstance(started, f.AttemptStarted)


def test_stacks_that_are_not_told_are_not_waited_for_for_ever() -> None:
    run = watched(3, world_size=2)
    place(run)
    run.arrive()
    run.rank(v.RankQuiet, 1, seconds=3)
    assert run.post(v.DelayPassed, name="stacks 1") == ([], [v.KillGroup(group=G, attempt=1)])
    assert "did not tell" in run.state.group.failures[0].traceback


def test_a_rank_that_has_returned_cannot_hang() -> None:
    run = watched(3, world_size=2)
    place(run)
    run.arrive()
    run.rank(v.RankReturned, 1, value=b"null")
    assert run.rank(v.RankQuiet, 1, seconds=9) == ([], [])


def reports(run: Run, *times: float) -> list[v.Command]:
    """Rank 0 reports at these times; the commands that follow."""
    commands: list[v.Command] = []
    for time in times:
        rank = run.state.group.ranks[0]
        event = v.RowsArrived(
            at=time, group=G, attempt=run.state.group.attempt, rank=0, first=rank.calls + 1, count=1, rows=b"{}"
        )
        for change in run.machine.decide(run.state, event).changes:
            run.machine.apply(run.state, change)
            run.journal.append(change)
        commands += run.post(v.Settle)[1]
    return commands


def test_auto_learns_the_limit_from_the_longest_interval_and_tells_it_when_it_grows() -> None:
    run = watched("auto")
    assert place(run) == []
    run.arrive()
    assert reports(run, AT + 1, AT + 2, AT + 3, AT + 4) == []
    assert reports(run, AT + 5) == [v.Watch(group=G, attempt=1, seconds=hang.LEAST_S)]
    assert reports(run, AT + 25) == [v.Watch(group=G, attempt=1, seconds=400.0)]
    assert reports(run, AT + 46) == []  # 420 is hardly more
    run.crash()
    run.open()
    assert place(run) == [v.Watch(group=G, attempt=2, seconds=420.0)]
