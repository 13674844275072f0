"""Each injected fault does to a real run what its name says, as often as was asked, and then no more."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast import faultpoints
from holdfast.control import failures
from holdfast.control.failures import MAX_FAILURES
from holdfast.errors import ConfigurationError
from holdfast.journal import facts as f
from holdfast.testing.faults import Faults
from tests.train import runs

STEPS = 5


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert faultpoints.VARIABLE not in os.environ
    assert not list(tmp_path.glob("holdfast-faults-*"))


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (lambda: Faults().kill(rank=1, step=3), failures.KILLED),
        (lambda: Faults().raise_at(rank=1, step=3), failures.EXCEPTION),
        (lambda: Faults().exit(rank=1, step=3), failures.EXITED),
    ],
)
def test_a_rank_fails_at_its_step_and_the_run_outlives_it(
    faults: Callable[[], Faults], kind: str, tmp_path: Path
) -> None:
    with faults() as injected:
        result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=1)
        assert os.environ[faultpoints.VARIABLE]
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    (root,) = runs.roots(result.path)
    assert (root.rank, root.kind, root.calls) == (1, kind, 2)
    assert injected.fired == (repr(injected).removeprefix("Faults()."),)


def test_several_faults_strike_one_after_the_other(tmp_path: Path) -> None:
    faults = Faults().kill(rank=1, step=2).raise_at(rank=0, step=2, attempt=2).exit(rank=1, step=99, attempt=3)
    with faults:
        result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=2)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert [(root.rank, root.kind) for root in runs.roots(result.path)] == [
        (1, failures.KILLED),
        (0, failures.EXCEPTION),
    ]
    assert faults.fired == ("kill(rank=1, step=2)", "raise_at(rank=0, step=2, attempt=2)")


def test_a_fault_of_any_attempt_happens_as_often_as_was_asked(tmp_path: Path) -> None:
    with Faults().kill(rank=0, step=1, attempt=None, times=3):
        result = runs.fit(tmp_path, config={"steps": 2}, workers=1, max_failures=-1)
    assert runs.charges(result.path) == [MAX_FAILURES] * 3
    with Faults().kill(rank=None, step=1, attempt=None, times=None), pytest.raises(Exception, match="SIGKILL"):
        runs.fit(tmp_path, config={"steps": 2}, workers=2, name="always", max_failures=4)
    assert runs.charges(tmp_path / "always") == [MAX_FAILURES] * 5


def test_a_hang_lasts_until_somebody_ends_it(tmp_path: Path) -> None:
    config = {"steps": STEPS, "pids": str(tmp_path)}
    with Faults().hang(rank=1, step=3) as faults:
        with runs.fitting(tmp_path, config=config, workers=2, max_failures=1) as running:
            runs.wait_until(lambda: bool(faults.fired))
            hung = psutil.Process(int((tmp_path / "1").read_text()))
            assert hung.is_running()
            assert not running.done()
            hung.kill()
            result = running.result()
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert [(root.rank, root.calls) for root in runs.roots(result.path)] == [(1, 2)]


def test_a_hang_is_ended_by_the_watchdog_where_there_is_one(tmp_path: Path) -> None:
    with Faults().hang(rank=1, step=3) as faults:
        result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=1, failure={"hang_timeout_s": 1.0})
    assert faults.fired
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert [(root.rank, root.kind) for root in runs.roots(result.path)] == [(1, failures.HANG)]


def test_slow_storage_takes_its_time(tmp_path: Path) -> None:
    with Faults().slow_storage(seconds=0.2) as faults:
        result = runs.fit(tmp_path, config={"steps": 3}, workers=1)
    committed = [fact.at for fact in runs.facts(result.path, f.CheckpointCommitted)]
    assert min(after - before for before, after in itertools.pairwise(committed)) >= 0.19
    assert faults.fired == ("slow_storage(seconds=0.2)",)


def test_a_failed_upload_is_tried_again_at_no_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Faults().fail_upload(times=2) as faults:
        result = runs.fit(tmp_path, config={"steps": STEPS}, workers=1)
    runs.assert_undisturbed(result, workers=1, steps=STEPS)
    assert runs.outcomes(result.path) == ["finished"]
    assert faults.fired == ("fail_upload(times=2)",)
    assert capsys.readouterr().out.count("rank 0's upload failed and is tried again") >= 1


def test_a_killed_agent_is_a_lost_node(tmp_path: Path) -> None:
    with Faults().kill_agent(step=3):
        result = runs.fit(tmp_path, config={"steps": STEPS}, workers=2, max_failures=1)
    runs.assert_undisturbed(result, workers=2, steps=STEPS)
    assert [root.kind for root in runs.roots(result.path)] == [failures.NODE_LOST]


def test_a_killed_driver_is_killed_once_and_the_same_script_goes_on(tmp_path: Path) -> None:
    faults = Faults().kill_driver(step=4).kill_driver(step=1, rank=1, attempt=2)
    asked = {"storage": str(tmp_path), "config": {"steps": STEPS}, "workers": 2}
    codes = []
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, runs.SCRIPT, json.dumps(asked)],
            env={**faults.environment(), "PYTHONPATH": os.pathsep.join((str(runs.ROOT), *sys.path))},
            capture_output=True,
            check=False,
        )
        codes.append(ended.returncode)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert faults.fired == ("kill_driver(rank=0, step=4)", "kill_driver(rank=1, step=1, attempt=2)")
    runs.assert_undisturbed(runs.final(tmp_path / "run"), workers=2, steps=STEPS)
    assert runs.charges(tmp_path / "run") == []
    faults._remove()


def test_once_is_once_over_all_drivers(tmp_path: Path) -> None:
    faults = Faults().kill_driver(step=2, attempt=None)
    codes = []
    for _ in range(2):
        with runs.Driver(tmp_path, faults=faults.text(), config={"steps": STEPS}) as driver:
            codes.append(driver.wait())
    assert codes == [-signal.SIGKILL, 0]
    faults._remove()


def test_the_driver_of_the_test_itself_is_not_killed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"subprocess.run\(…, env=faults.environment\(\)\)"):
        Faults().kill_driver(step=1).__enter__()


def test_a_warm_second_fit_meets_the_faults_too_and_a_third_none(tmp_path: Path) -> None:
    config = {"steps": 2}
    first = runs.fit(tmp_path, config=config, name="first")
    with Faults().fail_upload(times=1).kill(rank=0, step=2) as faults:
        second = runs.fit(tmp_path, config=config, name="second", max_failures=1)
    assert len(faults.fired) == 2
    third = runs.fit(tmp_path, config=config, name="third")
    assert [len(runs.charges(result.path)) for result in (first, second, third)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Faults().kill(rank=-1, step=1), "kill(rank=-1): give a whole number of at least 0, or None"),
        (lambda: Faults().kill(rank=0, step=0), "kill(step=0): give a whole number of at least 1"),
        (lambda: Faults().hang(rank=0, step=True), "hang(step=True)"),
        (lambda: Faults().exit(rank=0, step=1, attempt=0), "exit(attempt=0)"),
        (lambda: Faults().raise_at(rank=0, step=1, times=0), "raise_at(times=0)"),
        (lambda: Faults().slow_storage(seconds=0), "slow_storage(seconds=0)"),
        (lambda: Faults().fail_upload(times=-1), "fail_upload(times=-1)"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_where_it_is_written(make: Callable[[], Faults], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report.befor:kill", "there is no place 'report.befor'"),
        ("report.before:kil", "unknown fault action 'kil'"),
        ("report.before:kill:rank", "'rank' in 'report.before:kill:rank' is not key=value"),
        ("report.before:kill:times=x", "must be numbers"),
        ("upload.file:sleep", "needs seconds=SECONDS"),
        ("report.before:hold", "needs gate=PATH"),
    ],
)
def test_bad_text_in_the_environment_is_refused_before_anything_starts(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(faultpoints.VARIABLE, text)
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            runs.fit(tmp_path, config={"steps": 1})
    assert psutil.Process().children() == []
    assert not (tmp_path / "run").exists()


def test_every_place_is_listed() -> None:
    source = "".join(path.read_text() for path in (runs.ROOT / "src/holdfast").rglob("*.py"))
    assert set(re.findall(r'\breach\(\s*"([\w.]+)"', source)) - {"name"} == faultpoints.PLACES


def test_faults_that_are_in_use_do_not_change() -> None:
    with Faults().kill(rank=0, step=1) as faults:
        with pytest.raises(ConfigurationError, match="in use already"):
            faults.kill(rank=0, step=2)
        assert faults.environment()[faultpoints.VARIABLE] == os.environ[faultpoints.VARIABLE]
    assert faults.fired == ()
