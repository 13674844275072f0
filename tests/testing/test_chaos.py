"""Real processes are killed and stopped at random for a while, and nothing that was promised is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import train
from holdfast.engine import driver
from holdfast.journal import facts as f
from holdfast.testing.chaos import __main__ as command
from holdfast.testing.chaos import audit, rounds, training
from holdfast.testing.chaos.audit import Auditor, BrokenPromise
from tests.train import runs

SECONDS = 10
SEED = 4


@pytest.mark.timeout(120)
def test_runs_come_through_chaos(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path("/var/tmp").glob("hf-chaos-*"))
    code = command.main(["--minutes", str(SECONDS / 60), "--seed", str(SEED), "--steps", "60", "--gap", "0.15"])
    told = capsys.readouterr().out
    assert code == 0, told
    assert f"seed {SEED}\n" in told
    assert "killed worker" in told
    assert "killed driver" in told
    assert "every promise was kept" in told
    assert set(Path("/var/tmp").glob("hf-chaos-*")) <= before


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    for name in ("run", "undisturbed"):
        script = "from holdfast.testing.chaos.training import main; main()"
        command_line = [sys.executable, "-c", script, name, str(tmp_path), "4"]
        subprocess.run(command_line, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)
    return tmp_path


def test_the_audit_finds_what_is_wrong(finished: Path) -> None:
    undisturbed = train.Result.from_path(finished / "undisturbed")
    facts = Auditor(finished / "run").finish(undisturbed)
    assert sum(isinstance(fact, f.CheckpointCommitted) for fact in facts) == 4

    newest = train.Result.from_path(finished / "run").checkpoint
    assert newest is not None
    damaged = Path(newest.path, "rank_1.json")
    sound = damaged.read_bytes()
    damaged.write_bytes(sound.replace(b"4", b"5"))
    with pytest.raises(BrokenPromise, match="was committed and is not sound"):
        Auditor(finished / "run").look()
    damaged.write_bytes(sound)

    (finished / "run" / "checkpoint_000099").mkdir()
    with pytest.raises(BrokenPromise, match="checkpoint_000099"):
        Auditor(finished / "run").finish(undisturbed)
    (finished / "run" / "checkpoint_000099").rmdir()

    auditor = Auditor(finished / "run")
    auditor.look()
    (journal,) = (finished / "run" / "journal").glob("*.log")
    journal.write_bytes(journal.read_bytes()[:-10])
    with pytest.raises(BrokenPromise, match="the journal has lost"):
        auditor.look()

    shutil.rmtree(newest.path)
    with pytest.raises(BrokenPromise, match="was committed and is gone"):
        Auditor(finished / "run").look()


def test_the_weights_depend_on_every_rank_and_step() -> None:
    _, begin = training.load(None)
    once = [training.advance(rank, 1, begin) for rank in range(training.WORKERS)]
    assert training.advance(0, 2, once) != training.advance(0, 3, once)
    assert training.advance(0, 2, once) != training.advance(0, 2, [once[0], begin[1], once[2]])


def test_a_recovery_is_timed_from_the_death_to_the_first_moment_when_all_run() -> None:
    facts = [f.AttemptRunning(at=at, group="main", attempt=number) for number, at in enumerate((1.0, 3.5), 1)]
    assert audit.recoveries(facts, [0.5, 3.0, 4.0]) == [0.5, 0.5]
    assert audit.median_ms([0.5, 0.5]) == "500 ms"
    assert next(rounds.Tally().lines()) == "0 runs, 0 attempts, 0 drivers, 0 runs given up"


def test_a_node_that_is_lost_takes_the_folder_along_that_a_dying_driver_could_not_remove(tmp_path: Path) -> None:
    runtime = Path(os.environ["HOLDFAST_RUNTIME_DIR"])
    runs.fit(tmp_path, config={"steps": 1})
    agent = driver.current().engine.agent_pid("node-0")
    assert agent is not None
    assert list(runtime.iterdir())
    os.kill(agent, signal.SIGKILL)
    runs.wait_until(lambda: not list(runtime.iterdir()))
    runs.assert_undisturbed(runs.fit(tmp_path, config={"steps": 2}, name="again"), workers=1, steps=2)
