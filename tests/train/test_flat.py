"""A long run needs no more memory and no more descriptors at its end than at its beginning, and a wide one fits on one
machine. ``make soak`` runs the long form.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import train
from holdfast.control.failures import MAX_FAILURES
from holdfast.journal import facts as f
from holdfast.observe.history import History, fold_history
from holdfast.testing.faults import Faults
from tests.train import runs, soak

LONG = bool(os.environ.get("HOLDFAST_SOAK"))
REPORTS, CHECKPOINTS = (1_000_000, 10_000) if LONG else (300_000, 1_000)
MAY_GROW = 1_500_000
WIDE = 64


@pytest.mark.timeout(1800 if LONG else 120)
def test_memory_and_descriptors_stay_flat(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "from tests.train.soak import main; main()", tmp_path, str(REPORTS), str(CHECKPOINTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(runs.ROOT), *sys.path))},
        check=True,
    )
    samples = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    assert len(samples) >= soak.SAMPLES
    assert {name.split()[0] for name in samples[-1]} == {
        "driver",
        *(f"hf:{kind}" for kind in ("janitor", "agent", "pristine", "zygote", "worker")),
    }
    third = len(samples) // 3
    for name in samples[-1]:
        early, late = samples[third : 2 * third], samples[-third:]
        grown = statistics.median(s[name][0] for s in late) - statistics.median(s[name][0] for s in early)
        assert grown < MAY_GROW, f"{name} grew by {grown} bytes: {[sample[name][0] for sample in samples]}"
        most = [max(sample[name][1] for sample in part) for part in (early, late)]
        assert most[1] <= most[0] + 2, f"{name} has ever more descriptors: {[sample[name][1] for sample in samples]}"
    result = train.Result.from_path(tmp_path / "soak")
    assert len(runs.directories(result.path)) == 2
    assert result.metrics == {"number": CHECKPOINTS - 1}


def test_a_driver_forgets_checkpoints_that_nobody_can_come_back_to(tmp_path: Path) -> None:
    keep = train.CheckpointConfig(num_to_keep=2)
    with Faults().kill(rank=0, step=6):
        result = runs.fit(tmp_path, config={"steps": 20}, max_failures=1, keep=keep)
    facts = runs.facts(result.path)
    whole, forgetful = fold_history(facts), History()
    forgetful.forgetful = True
    for fact in facts:
        forgetful.apply(fact)
    assert len(whole.commits) == 20
    assert len(forgetful.commits) == 3  # two are kept, and one was begun from
    assert forgetful.lineage() == whole.lineage()
    assert forgetful.kept_checkpoints() == whole.kept_checkpoints()
    assert forgetful.last_metrics() == whole.last_metrics()


def test_a_wide_group_starts_reports_and_recovers(tmp_path: Path) -> None:
    with Faults().kill(rank=WIDE - 1, step=3):
        result = runs.fit(tmp_path, config={"steps": 4}, workers=WIDE, max_failures=1)
    runs.assert_undisturbed(result, workers=WIDE, steps=4)
    assert runs.charges(result.path) == [MAX_FAILURES]
    started = runs.facts(result.path, f.AttemptRunning)
    assert len(started) == 2
