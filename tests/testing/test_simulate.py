from __future__ import annotations

import multiprocessing
import os

import pytest

from holdfast.testing import simulate

SEEDS = 3000


def test_every_promise_is_kept_in_three_thousand_seeds() -> None:
    failures: list[simulate.Failure] = []
    for _, _, found in simulate.survey_all(0, SEEDS, workers=len(os.sched_getaffinity(0))):
        failures += found
    told = [f"{failure.what}\n  replay: {failure.replay}" for failure in failures]
    assert not told, "\n".join(told[:10])


def _digests(seeds: range) -> list[str]:
    return [simulate.live(seed).digest for seed in seeds]


def test_a_seed_always_leads_to_the_same_run() -> None:
    seeds = range(40)
    here = _digests(seeds)
    assert _digests(seeds) == here
    assert len(set(here)) == len(here)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # another process hashes strings differently
        elsewhere = pool.apply(_digests, (seeds,))
        pool.close()
        pool.join()
    assert elsewhere == here


def test_the_command_line_tells_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "20"]) == 0
    assert "20 seeds" in capsys.readouterr().out


def test_the_command_line_traces_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seed", "3", "--trace"]) == 0
    told = capsys.readouterr().out
    assert "launch driver 1" in told
    assert "every promise was kept" in told


def test_a_gang_costs_the_same_per_event_at_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--gang", "1000"]) == 0
    assert "1000 workers" in capsys.readouterr().out
