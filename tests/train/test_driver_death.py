"""The driver may die at any moment: the same script, launched again, goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from holdfast import train
from holdfast.control.failures import MAX_FAILURES
from holdfast.errors import ConfigurationError, RunIsLiveError
from holdfast.journal import facts as f
from tests.train import loops, runs

STEPS = 5
WORKERS = 2
CONFIG = {"steps": STEPS, "plain_rows": 2}


def once(path: Path, *faults: str) -> str:
    """These faults, each of which fires in one process only."""
    return ";".join(
        f"{fault}{',' if fault.count(':') > 1 else ':'}once={path / f'fired-{number}'}"
        for number, fault in enumerate(faults)
    )


def assert_nothing_was_lost(path: Path, *, steps: int = STEPS) -> train.Result:
    result = runs.final(path)
    runs.assert_undisturbed(result, workers=WORKERS, steps=steps)
    assert [row.get("part") for row in result.metrics_rows()] == [0, 1, None] * steps
    return result


@pytest.mark.parametrize(
    "fault",
    [
        "driver.opened:kill",
        "start.before:kill",
        "manifest.before:kill:index=0",
        "manifest.before:kill:index=3",
        "manifest.after:kill:index=0",
        "manifest.after:kill:index=3",
        "ack.before:kill:index=0",
        "ack.before:kill:index=4",
        "delete.before:kill",
        "delete.after:kill",
        "run.ended:kill",
    ],
)
def test_a_driver_may_be_killed_at(fault: str, tmp_path: Path) -> None:
    asked = {"config": CONFIG, "workers": WORKERS, "keep": {"num_to_keep": 2}}
    first = runs.drive(tmp_path, faults=once(tmp_path, fault), **asked)
    assert first.process.returncode == -signal.SIGKILL
    before = runs.facts(tmp_path / "run", f.CheckpointCommitted)
    again = runs.drive(tmp_path, **asked)
    assert again.told() == {"return_value": loops.undisturbed_weight(0, STEPS), "path": str(tmp_path / "run")}
    result = assert_nothing_was_lost(tmp_path / "run")
    assert runs.charges(result.path) == []
    assert runs.facts(result.path, f.CheckpointCommitted)[: len(before)] == before
    assert runs.directories(result.path) == [Path(kept.path).name for kept, _ in result.best_checkpoints]
    assert len(result.best_checkpoints) == 2


def test_a_driver_may_be_killed_again_and_again(tmp_path: Path) -> None:
    places = [f"{place}:kill:index={index}" for index in (0, 11, 22) for place in ("manifest.after", "ack.before")]
    asked = {"config": CONFIG, "workers": WORKERS}
    codes = [runs.drive(tmp_path, faults=once(tmp_path, *places), **asked).process.returncode for _ in range(4)]
    assert codes.count(-signal.SIGKILL) >= 3
    while codes[-1] != 0:
        codes.append(runs.drive(tmp_path, faults=once(tmp_path, *places), **asked).process.returncode)
    assert_nothing_was_lost(tmp_path / "run")
    assert runs.charges(tmp_path / "run") == []


@pytest.mark.parametrize("seed", range(4))
def test_a_driver_may_be_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    asked = {"config": {**CONFIG, "steps": 30}, "workers": WORKERS, "keep": {"num_to_keep": 3}}
    for _ in range(4):
        with runs.Driver(tmp_path, **asked) as driver:
            try:
                driver.process.wait(timeout=chance.uniform(0.1, 0.8))
            except subprocess.TimeoutExpired:
                driver.kill()
    last = runs.drive(tmp_path, **asked)
    assert last.told()["return_value"] == loops.undisturbed_weight(0, 30)
    result = assert_nothing_was_lost(tmp_path / "run", steps=30)
    assert runs.directories(result.path) == [Path(kept.path).name for kept, _ in result.best_checkpoints]
    assert len(result.best_checkpoints) == 3


def test_a_long_run_resumes_from_a_snapshot_of_its_state(tmp_path: Path) -> None:
    asked = {"config": {**CONFIG, "steps": 260}, "workers": WORKERS, "keep": {"num_to_keep": 2}}
    first = runs.drive(tmp_path, faults=once(tmp_path, "ack.before:kill:index=255"), **asked)
    assert first.process.returncode == -signal.SIGKILL
    assert list((tmp_path / "run" / "journal").glob("snapshot-*.json"))
    assert runs.drive(tmp_path, **asked).told()["return_value"] == loops.undisturbed_weight(0, 260)
    result = assert_nothing_was_lost(tmp_path / "run", steps=260)
    assert runs.directories(result.path) == [Path(kept.path).name for kept, _ in result.best_checkpoints]
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 255]


def test_budgets_outlive_the_driver(tmp_path: Path) -> None:
    dies = {"at": "working", "ranks": [1], "how": "sigkill"}
    faults = [{**dies, "step": step, "once": str(tmp_path / f"once{step}")} for step in (1, 3, 4)]
    asked = {"config": {"steps": STEPS, "faults": faults}, "workers": WORKERS, "max_failures": 2}
    first = runs.drive(tmp_path, faults=once(tmp_path, "ack.before:kill:index=1"), **asked)
    assert first.process.returncode == -signal.SIGKILL
    assert runs.charges(tmp_path / "run") == [MAX_FAILURES]
    second = runs.drive(tmp_path, **asked)
    assert second.told()["error"] == "WorkerGroupError"
    assert runs.charges(tmp_path / "run") == [MAX_FAILURES] * 3
    assert "(restart 2 of 2)" in second.output
    assert "(no restart left, 2 allowed)" in second.output


def test_a_run_that_had_failed_is_tried_again_with_a_fresh_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = {"at": "working", "ranks": [1], "how": "sigkill"}
    config = {"steps": STEPS, "faults": [{**dies, "step": n, "once": str(tmp_path / f"once{n}")} for n in (2, 3, 4, 5)]}
    with pytest.raises(train.WorkerGroupError):
        runs.fit(tmp_path, config=config, workers=WORKERS, max_failures=1)
    with pytest.raises(train.WorkerGroupError):
        runs.fit(tmp_path, config=config, workers=WORKERS, max_failures=1)
    result = runs.fit(tmp_path, config=config, workers=WORKERS, max_failures=1)
    runs.assert_undisturbed(result, workers=WORKERS, steps=STEPS)
    assert [fact.fresh_budget for fact in runs.facts(result.path, f.RunOpened)] == [False, True, True]
    assert runs.charges(result.path) == [MAX_FAILURES] * 4
    out = capsys.readouterr().out
    assert out.count("the run had failed; it is tried again with a fresh failure budget") == 2
    assert out.count("(restart 1 of 1)") == 2
    assert out.count("(no restart left, 1 allowed)") == 2


def test_a_finished_run_gives_its_result_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"config": CONFIG, "workers": WORKERS}
    assert runs.drive(tmp_path, **asked).process.returncode == 0
    journal = runs.facts(tmp_path / "run")
    result = runs.fit(tmp_path, config=CONFIG, workers=WORKERS)
    assert psutil.Process().children(recursive=True) == []
    assert list(Path(os.environ["HOLDFAST_RUNTIME_DIR"]).iterdir()) == []
    runs.assert_undisturbed(result, workers=WORKERS, steps=STEPS)
    assert runs.facts(tmp_path / "run") == journal
    assert "run 'run' has finished before; its result is read from" in capsys.readouterr().out


def test_a_changed_config_goes_on_from_the_newest_checkpoint_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.fit(tmp_path, config={"steps": 2}, workers=WORKERS)
    result = runs.fit(tmp_path, config={"steps": 4}, workers=WORKERS)
    runs.assert_undisturbed(result, workers=WORKERS, steps=4)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 1]
    assert "train_loop_config has changed since the last driver" in capsys.readouterr().out


def test_another_function_is_refused_with_both_names(tmp_path: Path) -> None:
    assert runs.drive(tmp_path, config={"steps": 1}).process.returncode == 0
    journal = runs.facts(tmp_path / "run")
    with pytest.raises(ConfigurationError) as refused:
        runs.fit(tmp_path, loops.reset_alone)
    assert "tests.train.loops:climb" in str(refused.value)
    assert "tests.train.loops:reset_alone" in str(refused.value)
    assert "another name" in str(refused.value)
    assert psutil.Process().children(recursive=True) == []
    assert runs.facts(tmp_path / "run") == journal


def test_a_second_driver_on_a_live_run_is_refused_and_told_who_holds_it(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0, 1)
    asked = {"config": {**CONFIG, "gate": meeting.path}, "workers": WORKERS}
    with runs.Driver(tmp_path, **asked) as holder:
        meeting.wait(0)
        meeting.wait(1)
        with pytest.raises(RunIsLiveError) as refused:
            runs.fit(tmp_path, config=asked["config"], workers=WORKERS)
        assert f"process {holder.process.pid} on host {os.uname().nodename}" in str(refused.value)
        assert "take_over=True" in str(refused.value)
        meeting.open(0)
        meeting.open(1)
        assert holder.told()["return_value"] == loops.undisturbed_weight(0, STEPS)
    assert_nothing_was_lost(tmp_path / "run")
    assert len(runs.facts(tmp_path / "run", f.RunOpened)) == 1


def test_who_is_taken_over_while_asleep_wakes_up_fenced(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0, 1)
    asked = {"workers": WORKERS, "keep": {"num_to_keep": 1}}
    with runs.Driver(tmp_path, config={**CONFIG, "gate": meeting.path, "gate_step": 3}, **asked) as loser:
        workers = [psutil.Process(meeting.wait(rank)) for rank in (0, 1)]
        loser.signal(signal.SIGSTOP)
        for rank in (0, 1):
            meeting.open(rank)
        winner = runs.drive(tmp_path, config={**CONFIG, "steps": 8}, take_over=True, **asked)
        assert winner.told()["return_value"] == loops.undisturbed_weight(0, 8)
        journal = runs.facts(tmp_path / "run")
        kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("checkpoint_*/*.json")}
        loser.signal(signal.SIGCONT)
        told = loser.told()
    assert told["error"] == "FencedError"
    assert "another driver has taken over" in told["message"]
    assert not any(worker.is_running() for worker in workers)
    assert runs.facts(tmp_path / "run") == journal
    assert {path: path.read_bytes() for path in kept} == kept
    assert_nothing_was_lost(tmp_path / "run", steps=8)


@pytest.mark.parametrize("after", [3, 20, 60])
def test_who_is_taken_over_at_work_is_fenced_and_the_newcomer_goes_on(tmp_path: Path, after: int) -> None:
    """The holder commits and gives up checkpoints while the newcomer reads, claims and folds."""
    asked = {"workers": 1, "keep": {"num_to_keep": 1}}
    with runs.Driver(tmp_path, config={"steps": 100_000}, **asked) as loser:
        runs.wait_until(lambda: len(commits(tmp_path / "run")) >= after)
        steps = len(commits(tmp_path / "run")) + 500
        winner = runs.drive(tmp_path, config={"steps": steps}, take_over=True, **asked)
        told = loser.told()
    assert told["error"] == "FencedError"
    assert winner.told()["return_value"] == loops.undisturbed_weight(0, steps)


def commits(path: Path) -> list[f.CheckpointCommitted]:
    return runs.facts(path, f.CheckpointCommitted) if (path / "journal").exists() else []


def test_a_killed_driver_leaves_no_process_and_no_folder(tmp_path: Path, gate: Callable[..., runs.Gate]) -> None:
    meeting = gate(0, 1)
    asked = {"config": {**CONFIG, "gate": meeting.path}, "workers": WORKERS, "thread": True}
    with runs.Driver(tmp_path, **asked) as driver:
        pids = [meeting.wait(rank) for rank in (0, 1)]
        tree = psutil.Process(driver.process.pid).children(recursive=True)
        assert {process.pid for process in tree} >= set(pids)
        driver.kill()
        _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []
    result = runs.drive(tmp_path, config=CONFIG, workers=WORKERS, thread=True)
    assert result.told()["return_value"] == loops.undisturbed_weight(0, STEPS)
    assert_nothing_was_lost(tmp_path / "run")


def test_fit_in_a_thread_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    driver = runs.drive(tmp_path, config=CONFIG, workers=WORKERS, thread=True)
    assert driver.process.returncode == 0
    assert_nothing_was_lost(tmp_path / "run")


def test_the_first_ctrl_c_stops_cleanly_and_the_same_script_resumes(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0, 1)
    asked = {"config": {**CONFIG, "gate": meeting.path, "gate_step": 2}, "workers": WORKERS}
    with runs.Driver(tmp_path, **asked) as driver:
        meeting.wait(0)
        meeting.wait(1)
        driver.signal(signal.SIGINT)
        assert driver.wait() in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in driver.output
    assert re.search(r"stopped \(interrupted by Ctrl-C\); run the same script again to resume", driver.output)
    assert [fact.status for fact in runs.facts(tmp_path / "run", f.RunEnded)] == ["STOPPED"]
    assert runs.outcomes(tmp_path / "run") == ["stopped"]
    again = runs.drive(tmp_path, config=CONFIG, workers=WORKERS)
    assert "resuming after attempt 1, from checkpoint_000001" in again.output
    assert_nothing_was_lost(tmp_path / "run")
    assert runs.charges(tmp_path / "run") == []


def test_the_second_ctrl_c_ends_at_once_and_the_same_script_resumes(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0, 1)
    asked = {"config": {**CONFIG, "gate": meeting.path, "gate_step": 2}, "workers": WORKERS}
    with runs.Driver(tmp_path, **asked) as driver:
        meeting.wait(0)
        meeting.wait(1)
        (janitor,) = (p for p in psutil.Process(driver.process.pid).children() if p.name() == "hf:janitor")
        agent = next(process for process in janitor.children() if process.name() == "hf:agent")
        agent.suspend()  # a stop that cannot come to its end
        driver.signal(signal.SIGINT)
        driver.read_until("holdfast: stopping")
        driver.signal(signal.SIGINT)
        assert driver.wait() in (-signal.SIGINT, 130)
    assert runs.drive(tmp_path, config=CONFIG, workers=WORKERS).process.returncode == 0
    assert_nothing_was_lost(tmp_path / "run")
