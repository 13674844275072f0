"""Several nodes on one machine, runs that share them, and nodes that are lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import holdfast
from holdfast import train
from holdfast.control import failures, loop
from holdfast.control.failures import MAX_FAILURES
from holdfast.engine import driver
from holdfast.errors import ConfigurationError, ControllerError, EngineError, RunIsLiveError
from holdfast.journal import facts as f
from holdfast.journal.file_log import FileLog
from holdfast.journal.recorder import Recorder
from tests.train import loops, runs

PATIENCE_S = 20.0


def agent_of(node: str) -> int:
    pid = driver.current().engine.agent_pid(node)
    assert pid is not None
    return pid


def test_ranks_fill_one_node_after_the_other(tmp_path: Path) -> None:
    holdfast.init(nodes=3, cpus_per_node=2)
    result = runs.fit(tmp_path, loops.tell_places, workers=5)
    assert [
        (row["rank"], row["node_rank"], row["local_rank"], row["local_world_size"], row["world_size"])
        for rank in range(5)
        for row in runs.rows(result.path, rank)
    ] == [(0, 0, 0, 2, 5), (1, 0, 1, 2, 5), (2, 1, 0, 2, 5), (3, 1, 1, 2, 5), (4, 2, 0, 1, 5)]
    ancestors = [runs.rows(result.path, rank)[0]["agent"] for rank in range(5)]
    assert ancestors[0] == ancestors[1] == agent_of("node-0")
    assert ancestors[2] == ancestors[3] == agent_of("node-1")
    assert ancestors[4] == agent_of("node-2")


def test_a_worker_knows_its_run(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.tell_places, name="v1.2=x", workers=1)
    (row,) = result.metrics_rows()
    assert (row["experiment"], row["storage"], row["attempt"]) == ("v1.2=x", str(tmp_path / "v1.2=x"), 1)


def test_more_workers_than_there_is_room_for_are_refused_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holdfast.init(nodes=3, cpus_per_node=2)
    with pytest.raises(EngineError) as refused:
        runs.fit(tmp_path / "store", config={"steps": 1}, workers=7)
    text = str(refused.value)
    assert "7 workers with 1 CPUs" in text
    assert "there is room for 6" in text
    assert "1 are missing" in text
    assert "node-2: 2 CPUs" in text
    assert "Ask for fewer workers, or give holdfast.init() more nodes or CPUs per node" in text
    assert psutil.Process().children(recursive=True) == []
    assert not (tmp_path / "store" / "run").exists()


def test_without_nodes_a_group_larger_than_the_machine_shares_its_cores(tmp_path: Path) -> None:
    workers = 2 * len(os.sched_getaffinity(0)) + 1
    result = runs.fit(tmp_path, config={"steps": 1}, workers=workers)
    runs.assert_undisturbed(result, workers=workers, steps=1)


def test_the_shape_can_be_chosen_once_until_shutdown(tmp_path: Path) -> None:
    holdfast.init(nodes=2, cpus_per_node=1)
    with pytest.raises(ConfigurationError, match=r"call holdfast\.shutdown\(\) before another init"):
        holdfast.init(nodes=3)
    holdfast.shutdown()
    holdfast.init(nodes=1, cpus_per_node=3)
    result = runs.fit(tmp_path, loops.tell_places, workers=3)
    assert {runs.rows(result.path, rank)[0]["node_rank"] for rank in range(3)} == {0}


def test_shutdown_ends_every_process_and_a_later_fit_starts_new_ones(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 1}, name="a")
    tree = psutil.Process().children(recursive=True)
    assert tree
    holdfast.shutdown()
    assert not any(process.is_running() for process in tree)
    result = runs.fit(tmp_path, config={"steps": 1}, name="b")
    runs.assert_undisturbed(result, workers=1, steps=1)


def test_a_second_fit_finds_the_agents_of_the_first(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 1}, name="a")
    agent = agent_of("node-0")
    result = runs.fit(tmp_path, loops.tell_places, name="b", workers=2)
    assert {runs.rows(result.path, rank)[0]["agent"] for rank in range(2)} == {agent}
    assert agent_of("node-0") == agent


def test_runs_in_several_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    faults = [{"at": "working", "step": 2, "ranks": [1], "how": "sigkill", "once": str(tmp_path / "once")}]

    def one(number: int) -> contextlib.AbstractContextManager[concurrent.futures.Future[train.Result]]:
        config = {"steps": 4 + number, "faults": faults if number == 0 else []}
        return runs.fitting(tmp_path, config=config, name=f"run{number}", workers=2, max_failures=1)

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(one(number)) for number in range(3)]
    for number, result in enumerate(run.result() for run in running):
        runs.assert_undisturbed(result, workers=2, steps=4 + number)
        assert runs.charges(result.path) == [MAX_FAILURES] * (number == 0)


def test_the_same_run_twice_at_once_in_one_process_is_refused(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0)
    with runs.fitting(tmp_path, config={"steps": 2, "gate": meeting.path}) as running:
        meeting.wait(0)
        with pytest.raises(RunIsLiveError, match=f"process {os.getpid()}"):
            runs.fit(tmp_path, config={"steps": 2, "gate": meeting.path})
        meeting.open(0)
        runs.assert_undisturbed(running.result(), workers=1, steps=2)


def test_a_run_that_could_not_be_opened_does_not_hold_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(holdfast.errors.StorageError, match=r"run\.json"):
            runs.fit(tmp_path, config={"steps": 1})
    (tmp_path / "run" / "run.json").rmdir()
    runs.assert_undisturbed(runs.fit(tmp_path, config={"steps": 1}), workers=1, steps=1)


@pytest.mark.parametrize("lost", ["node-0", "node-1"])
def test_a_lost_node_costs_one_failure_and_is_replaced(
    lost: str, tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    holdfast.init(nodes=2, cpus_per_node=1)
    meeting = gate(0, 1)
    config = {"steps": 4, "gate": meeting.path, "gate_step": 2}
    with runs.fitting(tmp_path, config=config, workers=2, max_failures=1) as running:
        for rank in (0, 1):
            meeting.wait(rank)
        before = agent_of(lost)
        os.kill(before, signal.SIGKILL)
        result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=4)
    assert runs.charges(result.path) == [MAX_FAILURES]
    (root,) = runs.roots(result.path)
    assert (root.rank, root.kind) == (int(lost[-1]), failures.NODE_LOST)
    assert f"was lost with node {lost}" in root.message
    assert agent_of(lost) != before


def test_all_nodes_may_be_lost_at_once(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    holdfast.init(nodes=2, cpus_per_node=1)
    meeting = gate(0, 1)
    config = {"steps": 4, "gate": meeting.path, "gate_step": 2}
    with runs.fitting(tmp_path, config=config, workers=2, max_failures=1) as running:
        for rank in (0, 1):
            meeting.wait(rank)
        for pid in (agent_of("node-0"), agent_of("node-1")):
            os.kill(pid, signal.SIGKILL)
        result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=4)
    assert runs.charges(result.path) == [MAX_FAILURES]


def test_a_node_that_is_lost_while_another_one_starts_is_started_again(
    tmp_path: Path, arm: Callable[..., None], gate: Callable[..., runs.Gate]
) -> None:
    holdfast.init(nodes=2, cpus_per_node=1)
    runs.fit(tmp_path, config={"steps": 1}, name="first")
    before = agent_of("node-0")
    meeting = gate(0)
    arm("agent.born", "hold", gate=meeting.at(0))
    with runs.fitting(tmp_path, config={"steps": 2}, workers=2, max_failures=1) as running:
        meeting.wait(0)
        os.kill(before, signal.SIGKILL)
        runs.wait_until(lambda: driver.current().engine.agent_pid("node-0") is None)
        meeting.open(0)
        result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=2)
    assert runs.charges(result.path) == []


def test_a_node_that_cannot_start_at_first_is_tried_again(tmp_path: Path, arm: Callable[..., None]) -> None:
    arm("agent.born", "kill")
    result = runs.fit(tmp_path, config={"steps": 1})
    runs.assert_undisturbed(result, workers=1, steps=1)
    assert set(runs.charges(result.path)) <= {failures.CONTROLLER_LIMIT}


def test_checkpoints_of_ranks_on_several_nodes_are_one(tmp_path: Path) -> None:
    holdfast.init(nodes=3, cpus_per_node=1)
    faults = [{"at": "working", "step": 3, "ranks": [2], "how": "sigkill", "once": str(tmp_path / "once")}]
    result = runs.fit(tmp_path, config={"steps": 4, "faults": faults}, workers=3, max_failures=1)
    runs.assert_undisturbed(result, workers=3, steps=4)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 1]


def test_shutdown_ends_a_run_in_another_thread_which_can_be_resumed(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0)
    config = {"steps": 4, "gate": meeting.path, "gate_step": 2}
    with runs.fitting(tmp_path, config=config) as running:
        meeting.wait(0)
        holdfast.shutdown()
        assert psutil.Process().children(recursive=True) == []
        with pytest.raises(ControllerError, match=r"the run 'run' was ended by holdfast\.shutdown\(\)"):
            running.result(PATIENCE_S)
    result = runs.fit(tmp_path, config={"steps": 4})
    runs.assert_undisturbed(result, workers=1, steps=4)


def test_a_journal_that_stalls_holds_the_workers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, rows, size = 1 << 20, 4000, 5000
    go_on = threading.Event()
    backlogs: list[int] = []
    write, append = FileLog._write, Recorder.append

    def stall(log: FileLog, first: int, records: list[bytes]) -> None:
        if len(backlogs) > 10:
            go_on.wait()
        write(log, first, records)

    def observe(recorder: Recorder, fact: f.Fact, *, urgent: bool) -> int:
        position = append(recorder, fact, urgent=urgent)
        backlogs.append(recorder.backlog)
        return position

    monkeypatch.setattr(loop, "BACKLOG", limit)
    monkeypatch.setattr(FileLog, "_write", stall)
    monkeypatch.setattr(Recorder, "append", observe)
    config = {"rows": rows, "size": size}
    failure = {"hang_timeout_s": 0.4}  # having to wait is no hang
    with runs.fitting(tmp_path, loops.report_large_rows, config, worker_output="none", failure=failure) as running:
        try:
            runs.wait_until(lambda: bool(backlogs) and backlogs[-1] > limit)
            heard = -1
            while heard != len(backlogs):  # what was on its way when the reading stopped
                heard = len(backlogs)
                time.sleep(0.8)
        finally:
            go_on.set()
        result = running.result()
    assert max(backlogs) < 2 * limit
    assert len(runs.rows(result.path, 0)) == rows
