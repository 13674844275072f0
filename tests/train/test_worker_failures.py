"""A worker may die in any way, at any moment, on any rank: the run comes to the same end."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import train
from holdfast.control import failures
from holdfast.control.failures import MAX_FAILURES
from holdfast.engine import driver
from holdfast.journal import facts as f
from tests.train import loops, runs

STEPS = 4


def climbing(tmp_path: Path, **order: Any) -> dict[str, Any]:
    return {"steps": STEPS, "faults": [{"once": str(tmp_path / "once"), **order}]}


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("exception", failures.EXCEPTION, "rank 1 had enough"),
        ("sys_exit", failures.EXCEPTION, "enough"),
        ("exit", failures.EXITED, "exited with code 3 before its function returned"),
        ("exit_zero", failures.EXITED, "exited with code 0 before its function returned"),
        ("sigkill", failures.KILLED, "was killed by SIGKILL"),
        ("sigterm", failures.KILLED, "was killed by SIGTERM"),
        ("segfault", failures.CRASHED, "crashed with SIGSEGV"),
    ],
)
def test_a_run_outlives_a_worker_that_dies_by(how: str, kind: str, message: str, tmp_path: Path) -> None:
    config = climbing(tmp_path, at="working", step=3, ranks=[1], how=how)
    result = runs.fit(tmp_path, config=config, workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    (root,) = runs.roots(result.path)
    assert (root.rank, root.kind, root.message, root.calls) == (1, kind, message, 2)
    if how == "segfault":
        assert "Segmentation fault" in Path(result.path, "logs/attempt_1/rank_1.log").read_text()


def test_a_run_outlives_a_worker_that_the_kernel_killed_for_its_memory(tmp_path: Path, small_memory_group: str) -> None:
    config = climbing(tmp_path, at="working", step=2, ranks=[1], how="oom") | {"cgroup": small_memory_group}
    result = runs.fit(tmp_path, config=config, workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    (root,) = runs.roots(result.path)
    assert root.rank == 1
    if small_memory_group:
        assert root.kind == failures.OOM
        assert "ran out of memory" in root.message
    else:
        assert (root.kind, root.error) == (failures.EXCEPTION, "MemoryError")


@pytest.mark.parametrize("ranks", [[0], [2], [1, 2], [0, 1, 2]])
def test_any_ranks_may_die_and_an_attempt_is_charged_once(ranks: list[int], tmp_path: Path) -> None:
    config = climbing(tmp_path, at="working", step=2, ranks=ranks, how="sigkill")
    result = runs.fit(tmp_path, config=config, workers=3, max_failures=len(ranks))
    runs.assert_undisturbed(result, workers=3, steps=STEPS)
    ended = [fact for fact in runs.facts(result.path, f.AttemptEnded) if fact.failures]
    assert 1 <= len(ended) <= len(ranks)
    assert runs.charges(result.path) == [MAX_FAILURES] * len(ended)
    assert {failure.rank for fact in ended for failure in fact.failures} <= set(ranks)


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("how", ["exception", "sigkill"])
def test_a_worker_may_die_before_its_first_report_and_after_its_last(at: str, how: str, tmp_path: Path) -> None:
    result = runs.fit(tmp_path, config=climbing(tmp_path, at=at, ranks=[1], how=how), workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    started = runs.facts(result.path, f.AttemptStarted)
    last = runs.facts(result.path, f.CheckpointCommitted)[-1]
    assert [fact.resume for fact in started] == [None, None if at == "begin" else last.index]


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("place", ["report.before", "report.declared", "report.after"])
def test_a_worker_may_die_inside_report(place: str, action: str, tmp_path: Path, arm: Callable[..., None]) -> None:
    arm(place, action, rank=1, call=2)
    result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    (root,) = runs.roots(result.path)
    assert root.rank == 1
    if action == "kill":
        assert root.kind == failures.KILLED
    else:  # or that its files have gone with its temporary directory is heard of first
        assert root.kind in (failures.EXCEPTION, failures.FILES)


@pytest.mark.parametrize("call", [1, 2])
def test_what_a_report_has_returned_for_is_never_done_again(
    call: int, tmp_path: Path, arm: Callable[..., None]
) -> None:
    arm("report.after", "kill", rank=0, call=call)
    result = runs.fit(tmp_path, config={"steps": STEPS}, max_failures=1)
    runs.assert_undisturbed(result, workers=1, steps=STEPS)
    assert [row["step"] for row in runs.rows(result.path, 0)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_may_die_while_its_files_are_uploaded(
    victim: int, tmp_path: Path, arm: Callable[..., None], gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0)
    arm("upload.file", "hold", gate=meeting.at(0), file=f"rank_{victim}.json")
    pids = tmp_path / "pids"
    pids.mkdir()
    with runs.fitting(tmp_path, config={"steps": STEPS, "pids": str(pids)}, workers=2, max_failures=1) as running:
        meeting.wait(0)
        os.kill(int((pids / f"{victim}").read_text()), signal.SIGKILL)
        os.remove(pids / f"{victim}")
        wait_for_file(pids / f"{victim}")
        meeting.open(0)  # what the dead attempt still uploads must not get into anything
        result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    assert runs.facts(result.path, f.CheckpointCommitted)[0].index == 1


@pytest.mark.parametrize("place", ["upload.begin", "upload.file", "upload.end"])
def test_the_agent_may_die_during_an_upload(place: str, tmp_path: Path, arm: Callable[..., None]) -> None:
    arm(place, "kill")
    result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [MAX_FAILURES]
    assert [root.kind for root in runs.roots(result.path)] == [failures.NODE_LOST]


def test_an_upload_that_fails_now_and_then_is_tried_again_and_costs_nothing(
    tmp_path: Path, arm: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    arm("upload.file", "raise", file="rank_1.json")
    result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.outcomes(result.path) == ["finished"]
    assert "rank 1's upload failed and is tried again" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["exception", "sigkill"])
def test_a_worker_that_fails_again_and_again_uses_up_the_budget(how: str, tmp_path: Path) -> None:
    config = {"steps": STEPS, "faults": [{"at": "working", "step": 2, "ranks": [1], "how": how}]}
    with pytest.raises(train.WorkerGroupError, match="max_failures=2 allows no further restart"):
        runs.fit(tmp_path, config=config, workers=2, max_failures=2)
    path = tmp_path / "run"
    assert runs.charges(path) == [MAX_FAILURES] * 3
    assert [fact.resume for fact in runs.facts(path, f.AttemptStarted)] == [None, 0, 0]
    assert [fact.status for fact in runs.facts(path, f.RunEnded)] == ["FAILED"]
    runs.assert_committed_is_forever(path)


def test_without_a_limit_failures_are_outlived_as_often_as_they_come(tmp_path: Path) -> None:
    faults = [
        {"at": "working", "step": step, "ranks": [step % 2], "how": "sigkill", "once": str(tmp_path / f"once{step}")}
        for step in range(1, 9)
    ]
    result = runs.fit(tmp_path, config={"steps": 8, "faults": faults}, workers=2, max_failures=-1)
    runs.assert_undisturbed(result, workers=2, steps=8)
    assert len(runs.charges(result.path)) == 8


def test_the_error_of_a_run_that_gives_up_starts_with_the_roots_own_traceback(tmp_path: Path) -> None:
    config = {"steps": STEPS, "faults": [{"at": "working", "step": 2, "ranks": [1], "how": "exception"}]}
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, config=config, workers=2)
    error = caught.value
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 raised tests.train.loops.Boom: rank 1 had enough, 1 report into the attempt"
    assert lines[1] == "Traceback (most recent call last):"
    assert "loops.py" in lines[2]
    assert ", in climb" in lines[2]
    assert "tests.train.loops.Boom: rank 1 had enough" in lines
    assert lines[-2] == "The run has given up: max_failures=0 allows no further restart."
    assert lines[-1] == f"The logs of all workers are in {tmp_path}/run/logs."
    failure = error.worker_failures[1]
    assert isinstance(failure, loops.Boom)
    assert failure.code == 41
    assert error.__cause__ is failure
    assert isinstance(error, train.TrainingFailedError)
    assert isinstance(error, RuntimeError)


def test_the_error_holds_every_failed_rank_and_can_be_pickled(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0, 1, 2)
    config = {"steps": 1, "gate": meeting.path, "faults": [{"at": "end", "how": "exception"}]}
    with runs.fitting(tmp_path, config=config, workers=3) as running:
        workers = [psutil.Process(meeting.wait(rank)) for rank in range(3)]
        agent = driver.current().engine.agent_pid("node-0")
        os.kill(agent, signal.SIGSTOP)  # so that no failure is answered before all have happened
        for rank in range(3):
            meeting.open(rank)
        for worker in workers:
            runs.wait_for_end(worker.pid)
        os.kill(agent, signal.SIGCONT)
        error = running.exception()
    assert isinstance(error, train.WorkerGroupError)
    copy = pickle.loads(pickle.dumps(error))
    for found in (error, copy):
        assert sorted(found.worker_failures) == [0, 1, 2]
        assert [found.worker_failures[rank].code for rank in range(3)] == [40, 41, 42]
        assert {type(failure) for failure in found.worker_failures.values()} == {loops.Boom}
    assert str(copy) == str(error)
    assert runs.charges(tmp_path / "run") == [MAX_FAILURES]


def test_an_exception_that_cannot_be_pickled_is_still_told(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, loops.raise_unpicklable)
    assert "Stubborn: holds on to a lock" in str(caught.value)
    assert ", in raise_unpicklable" in str(caught.value)
    failure = caught.value.worker_failures[0]
    assert isinstance(failure, train.TrainingFailedError)
    assert "holds on to a lock" in str(failure)
    pickle.loads(pickle.dumps(caught.value))


def test_an_exception_is_told_though_it_cannot_be_printed(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, loops.raise_without_stderr)
    assert isinstance(caught.value.worker_failures[0], loops.Boom)


def test_the_root_is_the_rank_that_died_and_not_the_one_that_noticed_first(tmp_path: Path) -> None:
    error = runs.lose_a_peer(tmp_path)
    (ended,) = runs.facts(tmp_path / "run", f.AttemptEnded)
    root, *others = ended.failures
    assert (root.rank, root.kind, root.consequence) == (1, failures.KILLED, False)
    assert [(other.rank, other.error, other.consequence) for other in others] == [(0, "ConnectionResetError", True)]
    first = str(error).splitlines()[0]
    assert first == "rank 1 was killed by SIGKILL (1 other rank failed as a consequence)"
    assert isinstance(error.worker_failures[0], ConnectionResetError)


def test_a_broken_connection_is_the_root_where_nothing_else_has_failed(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="rank 0 raised ConnectionResetError"):
        runs.fit(tmp_path, loops.reset_alone, workers=2)


def test_a_worker_that_cannot_load_its_function_twice_the_same_way_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="a worker could not start, twice with the same error") as caught:
        runs.fit(tmp_path, config={"steps": 1, "poison": loops.Poison()}, max_failures=5)
    assert "ModuleNotFoundError: No module named 'surely_not_installed'" in str(caught.value)
    assert runs.charges(tmp_path / "run") == [failures.CONTROLLER_LIMIT] * 2


def test_a_worker_that_dies_before_the_functions_first_line_is_charged_to_the_start(
    tmp_path: Path, arm: Callable[..., None]
) -> None:
    arm("worker.begin", "kill", rank=0)
    result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert runs.charges(result.path) == [failures.CONTROLLER_LIMIT]
    assert "before the function's first line" in runs.roots(result.path)[0].message


def test_starts_that_fail_are_counted_against_their_own_limit(tmp_path: Path, arm: Callable[..., None]) -> None:
    arm("worker.begin", "kill", once=False, rank=0)
    with pytest.raises(train.WorkerGroupError, match="controller_failure_limit=1 allows no further restart"):
        runs.fit(tmp_path, config={"steps": 1}, max_failures=9, failure={"controller_failure_limit": 1})
    assert runs.charges(tmp_path / "run") == [failures.CONTROLLER_LIMIT] * 2


@pytest.mark.parametrize("victim", ["hf:agent", "hf:zygote", "hf:pristine", "hf:janitor"])
def test_the_processes_above_a_worker_may_be_killed(
    victim: str, tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0, 1)
    config = {"steps": STEPS, "gate": meeting.path, "gate_step": 2}
    with runs.fitting(tmp_path, config=config, workers=2, max_failures=1) as running:
        worker = psutil.Process(meeting.wait(0))
        meeting.wait(1)
        above = {process.name(): process for process in family_of(worker)}
        above[victim].kill()
        if victim == "hf:pristine":  # workers are not its children: they go on, and so does the run
            meeting.open(0)
            meeting.open(1)
        result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    charged = [] if victim == "hf:pristine" else [MAX_FAILURES]
    assert runs.charges(result.path) == charged
    assert [root.kind for root in runs.roots(result.path)] == [failures.NODE_LOST] * len(charged)


def test_the_agents_pid_is_told_for_those_who_want_to_end_it(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0)
    with runs.fitting(tmp_path, config={"steps": 2, "gate": meeting.path}, max_failures=1) as running:
        meeting.wait(0)
        pid = driver.current().engine.agent_pid("node-0")
        assert psutil.Process(pid).name() == "hf:agent"
        os.kill(pid, signal.SIGKILL)
        result = running.result()
    runs.assert_undisturbed(result, workers=1, steps=2)
    assert runs.charges(result.path) == [MAX_FAILURES]


def family_of(worker: psutil.Process) -> list[psutil.Process]:
    """The worker, and every process of ours above it and beside those."""
    janitor = next(parent for parent in worker.parents() if parent.name() == "hf:janitor")
    return [janitor, *janitor.children(recursive=True)]


def wait_for_file(path: Path) -> None:
    """Wait until a worker has made this file; the test's own time-out is the limit."""
    while not path.exists():
        time.sleep(0.005)
