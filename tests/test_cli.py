"""The ``holdfast`` command, as a process of its own, over runs that have finished, failed, are live, or lost their
driver.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import shutdown, train
from tests.train import loops, runs


def holdfast(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def told(*arguments: str | Path) -> Any:
    """What a command that succeeds tells as JSON."""
    ended = holdfast(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def finish(storage: Path, name: str = "done", **config: Any) -> Path:
    return Path(runs.fit(storage, config={"steps": 2, **config}, name=name).path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage path with the finished run ``done``, for tests that only look."""
    storage = tmp_path_factory.mktemp("finished")
    finish(storage)
    shutdown()
    return storage


def stumble(storage: Path, name: str = "bumpy", keep: train.CheckpointConfig | None = None) -> Path:
    """A run that finishes in its second attempt."""
    faults = [{"at": "working", "step": 3, "ranks": [1], "how": "exception", "once": str(storage / "once")}]
    result = runs.fit(storage, config={"steps": 4, "faults": faults}, workers=2, max_failures=3, name=name, keep=keep)
    return Path(result.path)


def give_up(storage: Path, name: str = "bad") -> Path:
    with pytest.raises(train.WorkerGroupError):
        runs.fit(storage, config={"steps": 2, "faults": [{"at": "working", "step": 2, "how": "exception"}]}, name=name)
    return storage / name


@contextmanager
def live(storage: Path, name: str = "live") -> Iterator[tuple[runs.Driver, runs.Gate]]:
    """A run whose worker waits after its first step, and its driver."""
    gate = runs.Gate(storage / f"gate-{name}")
    config = {"steps": 2, "gate": gate.path}
    with runs.Driver(storage, workers=1, name=name, config=config) as driver:
        gate.wait()
        yield driver, gate


def test_ls_lists_the_runs_below_a_path(tmp_path: Path) -> None:
    finish(tmp_path)
    give_up(tmp_path)
    (tmp_path / "no-run" / "epochs").mkdir(parents=True)
    ended = holdfast("ls", tmp_path)
    assert ended.returncode == 0
    header, bad, done = (line.split() for line in ended.stdout.splitlines())
    assert header == ["name", "status", "attempts", "failures", "checkpoint", "metrics", "age"]
    assert bad[:7] == ["bad", "FAILED", "1", "1", "checkpoint_000000", "step=1,", "weight=1"]
    assert done[:7] == ["done", "FINISHED", "1", "0", "checkpoint_000001", "step=2,", "weight=2.75"]


def test_ls_as_json(finished: Path) -> None:
    (run,) = told("ls", finished)
    assert (run["name"], run["status"], run["attempts"], run["failures"]) == ("done", "FINISHED", 1, 0)
    assert run["path"] == str(finished / "done")
    assert run["metrics"] == {"step": 2, "weight": 2.75}
    assert run["driver"]["pid"] == os.getpid()
    assert run["driver"]["live"] is False
    assert told("ls", finished / "done") == [{**run, "age_s": pytest.approx(run["age_s"], abs=30)}]


def test_ls_of_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    assert told("ls", tmp_path) == []
    assert holdfast("ls", tmp_path).stderr == f"holdfast: no runs below {tmp_path}\n"


def test_a_run_whose_journal_is_damaged_is_listed_as_such(tmp_path: Path) -> None:
    finish(tmp_path)
    (journal,) = (finish(tmp_path, "hurt") / "journal").glob("*.log")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"rubbish\n", *lines[3:]]))
    done, hurt = told("ls", tmp_path)
    assert (done["status"], hurt["status"]) == ("FINISHED", "UNREADABLE")
    assert "journal" in hurt["reason"]
    assert holdfast("show", tmp_path / "hurt").returncode == 1


def test_a_live_run_names_its_driver(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, gate):
        (run,) = told("ls", tmp_path)
        assert run["status"] == "RUNNING"
        assert run["driver"]["pid"] == driver.process.pid
        assert run["driver"]["live"] is True
        assert f"RUNNING (pid {driver.process.pid} on " in holdfast("ls", tmp_path).stdout
        (attempt,) = told("show", tmp_path / "live")["attempt_list"]
        assert (attempt["outcome"], attempt["ended_at"]) == ("running", None)
        gate.open()
        assert driver.wait() == 0
    assert [run["status"] for run in told("ls", tmp_path)] == ["FINISHED"]


def test_a_run_whose_driver_was_killed_is_interrupted(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, _):
        driver.kill()
    run = told("show", tmp_path / "live")
    assert (run["status"], run["driver"]["live"]) == ("INTERRUPTED", False)
    assert run["attempt_list"][0]["outcome"] == "driver_lost"
    assert "run its script again to resume it" in holdfast("show", tmp_path / "live").stdout


def test_a_driver_on_another_machine_is_unknown_until_its_lease_is_watched(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, _):
        driver.kill()
    (record,) = (tmp_path / "live" / "epochs").glob("*.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": "another", "lease_s": 0.1}))
    (run,) = told("ls", tmp_path)
    assert (run["status"], run["driver"]["live"]) == ("UNKNOWN", None)
    (run,) = told("ls", tmp_path, "--wait")
    assert (run["status"], run["driver"]["live"]) == ("INTERRUPTED", False)
    assert holdfast("stop", tmp_path / "live").returncode == 1


def test_show_tells_attempts_with_their_causes_and_prices(tmp_path: Path) -> None:
    path = stumble(tmp_path, keep=train.CheckpointConfig(num_to_keep=1))
    run = told("show", path)
    first, second = run["attempt_list"]
    assert (first["outcome"], first["charge"], first["workers"]) == ("failed", "max_failures", 2)
    assert first["cause"].startswith("rank 1 raised tests.train.loops.Boom: rank 1 had enough")
    assert first["away_s"] == pytest.approx(second["running_at"] - first["ended_at"])
    assert 0 <= first["reports_redone"] <= 1
    assert "traceback" not in first["failures"][0]
    assert (second["outcome"], second["resumed_from"], second["away_s"]) == ("finished", 1, None)
    assert [checkpoint["state"] for checkpoint in run["checkpoints"]] == ["retired"] * 3 + ["kept"]
    assert run["checkpoints"][-1]["bytes"] > 0
    assert run["return_value"] == loops.undisturbed_weight(0, 4)
    parts = run["goodput"]
    assert parts["wall"] == pytest.approx(sum(parts[part] for part in ("useful", "redone", "starting", "down")))
    text = holdfast("show", path).stdout
    assert "rank 1 had enough" in text
    assert "1 of max_failures" in text
    assert "Traceback" not in text


def test_show_has_the_traceback_of_the_root_when_asked(tmp_path: Path) -> None:
    path = give_up(tmp_path)
    text = holdfast("show", path, "--traceback").stdout
    assert "run 'bad': FAILED: max_failures=0 allows no further restart\n" in text
    assert "attempt 1, rank 0:\nTraceback (most recent call last):\n" in text
    assert "in climb" in told("show", path, "--traceback")["attempt_list"][0]["failures"][0]["traceback"]


def test_logs_are_those_of_rank_zero_in_the_last_attempt(tmp_path: Path) -> None:
    path = stumble(tmp_path)
    assert holdfast("logs", path).stdout == "rank 0 begins attempt 2\n"
    assert holdfast("logs", path, "--rank", "1", "--attempt", "1", "-n", "1").stdout == (
        "tests.train.loops.Boom: rank 1 had enough\n"
    )
    assert holdfast("logs", path, "--rank", "all", "-n", "1").stdout == (
        "(rank 0) rank 0 begins attempt 2\n(rank 1) rank 1 begins attempt 2\n"
    )
    assert told("logs", path) == [{"attempt": 2, "rank": 0, "text": "rank 0 begins attempt 2"}]
    assert holdfast("logs", path, "-n", "0").stdout == ""


def test_logs_follow_a_run_across_attempts_until_it_ends(tmp_path: Path) -> None:
    gate = runs.Gate(tmp_path / "gate")
    faults = [{"at": "working", "step": 2, "how": "sigkill", "once": str(tmp_path / "once")}]
    config = {"steps": 2, "gate": gate.path, "faults": faults}
    with runs.Driver(tmp_path, workers=1, config=config, max_failures=1) as driver:
        gate.wait()
        with subprocess.Popen(
            [sys.executable, "-m", "holdfast", "logs", "-f", tmp_path / "run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as following:
            assert following.stdout is not None
            assert following.stdout.readline() == "rank 0 begins attempt 1\n"
            gate.open()
            rest, complaints = following.communicate()
        assert driver.wait() == 0
    assert rest == "rank 0 begins attempt 2\n"
    assert complaints == "holdfast: attempt 2\nholdfast: run 'run': FINISHED\n"
    assert following.returncode == 0


def test_stop_asks_a_live_driver_and_waits_for_it(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, _):
        ended = holdfast("stop", tmp_path / "live", "--wait")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.splitlines()[-1] == "run 'live': STOPPED: asked by `holdfast stop`"
        assert driver.wait() == 0
        assert "holdfast: stopping (asked by `holdfast stop`)\n" in driver.output
        assert "Ctrl-C" not in driver.output
    assert list((tmp_path / "live" / "requests").iterdir()) == []
    assert [run["status"] for run in told("ls", tmp_path)] == ["STOPPED"]


def test_asking_twice_is_asking_once(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, _):
        driver.signal(signal.SIGSTOP)
        assert told("stop", tmp_path / "live")["asked_before"] is False
        assert told("stop", tmp_path / "live")["asked_before"] is True
        driver.signal(signal.SIGCONT)
        assert driver.wait() == 0


def test_a_request_that_came_too_late_does_not_stop_the_next_driver(tmp_path: Path) -> None:
    with live(tmp_path) as (driver, _):
        driver.signal(signal.SIGSTOP)
        told("stop", tmp_path / "live")
        driver.kill()
    again = runs.drive(tmp_path, workers=1, name="live", config={"steps": 2})
    assert again.process.returncode == 0
    assert [run["status"] for run in told("ls", tmp_path)] == ["FINISHED"]


@pytest.mark.parametrize("how", ["finished", "failed", "killed"])
def test_stop_is_refused_without_a_live_driver(how: str, tmp_path: Path) -> None:
    if how == "killed":
        with live(tmp_path) as (driver, _):
            driver.kill()
        path, standing = tmp_path / "live", "INTERRUPTED: its driver, pid "
    else:
        path, standing = (finish(tmp_path), "FINISHED") if how == "finished" else (give_up(tmp_path), "FAILED: max_f")
    ended = holdfast("stop", path)
    assert (ended.returncode, ended.stdout) == (1, "")
    message = f"holdfast: run {path.name!r} has no live driver, so there is nothing to stop: {standing}"
    assert ended.stderr.startswith(message)
    assert not (path / "requests").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "{}/nowhere"], 1, "nowhere does not exist"),
        (["show", "{}"], 1, "holds no run; below it lie: done"),
        (["logs", "{}/done/checkpoint_000000"], 1, "holds no run"),
        (["logs", "{}/done", "--attempt", "7"], 1, "attempt 7 has no logs; there are: 1"),
        (["logs", "{}/done", "--rank", "5"], 1, "rank 5 of attempt 1 has no log; there are: 0"),
        (["logs", "{}/done", "--rank", "first"], 2, "--rank first: give a rank's number, or all"),
        (["logs", "{}/done", "-n", "-1"], 2, "-n -1: give a number of lines"),
        (["ls", "ftp://somewhere"], 2, "ftp:// is not known"),
        (["ls", "{}", "--colour"], 2, "--colour"),
        (["sow", "{}"], 2, "sow"),
        (["show"], 2, "PATH"),
    ],
)
def test_what_cannot_be_done_says_so_on_stderr(arguments: list[str], code: int, message: str, finished: Path) -> None:
    ended = holdfast(*(argument.format(finished) for argument in arguments))
    assert (ended.returncode, ended.stdout) == (code, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_looking_changes_nothing(tmp_path: Path) -> None:
    path = stumble(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in sorted(path.rglob("*"))}
    for command in ("ls", "show", "logs"):
        assert holdfast(command, path).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in sorted(path.rglob("*"))} == before


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    path = finish(tmp_path)
    (path / "logs/attempt_1/rank_0.log").write_text("line\n" * 100_000)
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast", "logs", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.readline()
        reading.stdout.close()
        assert reading.stderr.read() == ""
