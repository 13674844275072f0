from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.testing import simulate

SEEDS = 3000


@pytest.mark.timeout(240)
def test_every_promise_is_kept_in_three_thousand_seeds() -> None:
    workers = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "holdfast.testing.simulate", "--seeds", str(SEEDS), "--workers", str(workers)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{SEEDS} seeds" in ended.stdout


def test_a_seed_always_leads_to_the_same_run() -> None:
    here = [simulate.live(seed).digest for seed in range(40)]
    assert [simulate.live(seed).digest for seed in range(40)] == here
    assert len(set(here)) == len(here)
    script = "from holdfast.testing import simulate\nprint(*(simulate.live(seed).digest for seed in range(40)))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # another process hashes strings differently
    elsewhere = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert elsewhere.stdout.split() == here


def test_the_command_line_tells_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "20"]) == 0
    assert "20 seeds" in capsys.readouterr().out


def test_the_command_line_traces_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seed", "3", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "launch driver 1" in told
    assert "every promise was kept" in told


def test_the_command_line_tells_what_an_event_costs_a_large_gang(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--gang", "1000"]) == 0
    assert "1000 workers" in capsys.readouterr().out
