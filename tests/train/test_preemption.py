"""What is about to be taken away is announced, and the ranks may save before it goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import train
from holdfast.control import failures
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.train import machine as m
from tests.train import ordeals, runs
from tests.train.test_machine import AT, G, Run
from tests.train.test_nodes import agent_of

GRACE_S = 1.0


@pytest.mark.parametrize("then", ["return", "stay"])
def test_a_preempted_driver_gives_its_workers_time_to_save_and_can_be_resumed(then: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "loop": "leave_when_told",
        "config": {"then": then},
        "failure": {"preemption_grace_s": GRACE_S},
    }
    with runs.Driver(tmp_path, **asked) as driver:
        driver.read_until("(rank 0) ready")
        driver.signal(signal.SIGTERM)
        told = driver.told()
    assert told["error"] == "PreemptionError"
    assert told["message"] == "the run was preempted by SIGTERM; run the same script again to resume"
    assert "the driver got SIGTERM and is about to be preempted; the workers have 1.0 s to save" in driver.output
    assert "stopped (preempted by SIGTERM); run the same script again to resume" in driver.output
    row = runs.rows(tmp_path / "run", 0)[-1]
    assert row["nodes"] == {"node-0": [0, 1]}
    assert 0 < row["left_ms"] <= GRACE_S * 1000
    assert runs.charges(tmp_path / "run") == []
    assert runs.drive(tmp_path, **asked).told()["return_value"] == 3
    assert [ended.status for ended in runs.facts(tmp_path / "run", f.RunEnded)] == ["STOPPED", "FINISHED"]
    assert runs.outcomes(tmp_path / "run") == ["stopped", "finished"]


def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    asked = {"loop": "leave_when_told", "config": {"then": "stay"}, "failure": {"preemption_grace_s": 600}}
    with runs.Driver(tmp_path, **asked) as driver:
        driver.read_until("(rank 0) ready")
        driver.signal(signal.SIGTERM)
        driver.read_until("about to be preempted")
        driver.signal(signal.SIGTERM)
        assert driver.told()["error"] == "PreemptionError"


def test_a_handler_of_the_users_own_is_left_alone_and_ours_is_removed(tmp_path: Path) -> None:
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        with runs.fitting(tmp_path, config={"steps": 1}):
            pass
        runs.fit(tmp_path, config={"steps": 1}, name="other")
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    runs.fit(tmp_path, config={"steps": 1}, name="third")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("then", ["return", "stay"])
def test_a_preempted_node_is_left_and_its_ranks_go_on_elsewhere(
    then: str, tmp_path: Path, gate: Callable[..., runs.Gate], capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.init(nodes=2, cpus_per_node=1)
    doors = gate(0, 1)
    config = {"then": then, "gate": doors.path}
    failure = {"preemption_grace_s": GRACE_S}
    with runs.fitting(tmp_path, ordeals.leave_when_told, config, workers=2, failure=failure) as running:
        for rank in (0, 1):
            doors.wait(rank)
        before = agent_of("node-1")
        os.kill(before, signal.SIGTERM)
        for rank in (0, 1):
            doors.open(rank)
        result = running.result()
    assert result.return_value == 3
    assert runs.charges(result.path) == [failures.MAX_PREEMPTIONS]
    (root,) = runs.roots(result.path)
    assert (root.rank, root.kind, root.message) == (1, "preemption", "was preempted with its node node-1")
    assert runs.rows(result.path, 0)[2]["nodes"] == {"node-1": [1]}
    assert agent_of("node-1") != before
    printed = capsys.readouterr().out
    assert "node-1 is about to be preempted; the workers have 1.0 s to save" in printed
    assert "attempt 1 failed (restart 1): rank 1 was preempted with its node node-1" in printed


def test_preemptions_have_a_budget_of_their_own(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    doors = gate(0)
    failure = {"max_preemption_failures": 0, "preemption_grace_s": 0.1}
    config = {"then": "stay", "gate": doors.path}
    with runs.fitting(tmp_path, ordeals.leave_when_told, config, max_failures=5, failure=failure) as running:
        doors.wait()
        os.kill(agent_of("node-0"), signal.SIGTERM)
        doors.open()
        error = running.exception()
    assert isinstance(error, train.PreemptionError)
    assert "max_preemption_failures=0 allows no further restart" in str(error)


def test_a_node_that_goes_before_its_grace_is_over_was_preempted_all_the_same(
    tmp_path: Path, gate: Callable[..., runs.Gate], capsys: pytest.CaptureFixture[str]
) -> None:
    doors = gate(0)
    config = {"then": "stay", "gate": doors.path}
    failure = {"preemption_grace_s": 600}
    with runs.fitting(tmp_path, ordeals.leave_when_told, config, failure=failure) as running:
        doors.wait()
        os.kill(agent_of("node-0"), signal.SIGTERM)
        runs.wait_for_text(capsys, "about to be preempted")
        doors.open()
        runs.wait_until(lambda: len(runs.rows(tmp_path / "run", 0)) == 3)
        os.kill(agent_of("node-0"), signal.SIGKILL)
        assert running.result().return_value == 3
    assert runs.charges(tmp_path / "run") == [failures.MAX_PREEMPTIONS]


def test_outside_a_worker_there_is_no_preemption_info() -> None:
    with pytest.raises(RuntimeError, match=r"train.get_preemption_info\(\) can only be called inside"):
        train.get_preemption_info()


def graceful(world_size: int = 2, grace_s: float = 5.0, **limits: int) -> Run:
    run = Run(world_size, **limits)
    run.machine = m.TrainMachine(m.Settings(world_size, {**limits}, preemption_grace_s=grace_s))
    run.post(v.GroupPlaced, group=G, attempt=1, nodes=tuple(f"n{rank}" for rank in range(world_size)))
    run.arrive()
    return run


def noticed(node: str, deadline: float = AT + 5.0) -> f.PreemptionNoticed:
    return f.PreemptionNoticed(at=AT, group=G, attempt=1, node=node, deadline=deadline)


def tell(**nodes: tuple[int, ...]) -> v.TellPreemption:
    return v.TellPreemption(group=G, attempt=1, deadline_ms=12_000, nodes=nodes)


def test_every_rank_is_told_and_a_second_notice_keeps_the_deadline() -> None:
    run = graceful()
    wait = v.Wait(name="grace 1", seconds=5.0)
    assert run.post(v.PreemptionSeen, node="n1") == ([noticed("n1")], [tell(n1=(1,)), wait])
    assert run.post(v.PreemptionSeen, node="n1") == ([], [])
    assert run.post(v.PreemptionSeen, node="elsewhere") == ([], [])
    assert run.post(v.PreemptionSeen, node="n0") == ([noticed("n0")], [tell(n0=(0,), n1=(1,))])
    _, commands = run.post(v.DelayPassed, name="grace 1")
    assert commands == [v.KillGroup(group=G, attempt=1)]


@pytest.mark.parametrize("node", ["n0", ""])
def test_a_function_that_returns_after_the_notice_has_not_finished(node: str) -> None:
    run = graceful(1)
    run.post(v.PreemptionSeen, node=node)
    assert v.KillGroup(group=G, attempt=1) in run.rank(v.RankReturned, value=b"null")[1]
    facts, _ = run.rank(v.RankExited, status=0)
    assert isinstance(facts[0], f.AttemptEnded)
    if node:
        assert facts[0].charge == failures.MAX_PREEMPTIONS
        assert isinstance(facts[1], f.AttemptStarted)
    else:
        assert facts[0].outcome == "stopped"
        assert facts[1] == f.RunEnded(at=AT, status=m.STOPPED, reason=m.PREEMPTED)


@pytest.mark.parametrize("node", ["n0", ""])
def test_a_notice_after_every_rank_has_returned_changes_nothing(node: str) -> None:
    run = graceful(1)
    run.rank(v.RankReturned, value=b"null")
    assert run.post(v.PreemptionSeen, node=node) == ([], [])
    facts, _ = run.rank(v.RankExited, status=0)
    assert facts[-1] == f.RunEnded(at=AT, status=m.FINISHED, return_value=facts[-1].return_value)  # type: ignore[attr-defined]


def test_what_the_batch_system_kills_on_a_preempted_node_is_preempted() -> None:
    run = graceful()
    run.rank(v.RankExited, 1, status=-15)
    run.post(v.PreemptionSeen, node="n1")
    (ended, started) = run.rank(v.RankExited, 0, status=-9, ours=True)[0]
    assert isinstance(ended, f.AttemptEnded)
    assert ended.charge == failures.MAX_PREEMPTIONS
    assert isinstance(started, f.AttemptStarted)


def test_a_rank_that_dies_while_the_driver_leaves_is_not_restarted() -> None:
    run = graceful()
    run.post(v.PreemptionSeen, node="")
    run.rank(v.RankExited, 1, status=-9)
    facts, _ = run.rank(v.RankExited, 0, status=-9, ours=True)
    assert facts[-1] == f.RunEnded(at=AT, status=m.STOPPED, reason=m.PREEMPTED)


def test_a_driver_that_is_told_to_leave_between_attempts_stops_at_once() -> None:
    run = Run(1, **{failures.CONTROLLER_LIMIT: -1})
    run.rank(v.RankRaised, error="ImportError", message="no", traceback="", started=False)
    run.rank(v.RankExited, status=1)
    assert run.state.waiting
    facts, _ = run.post(v.PreemptionSeen, node="")
    assert facts == [f.RunEnded(at=AT, status=m.STOPPED, reason=m.PREEMPTED)]
