"""Every example runs, as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
TIMEOUT_S = 50


def run(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder of its own, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        cwd=home,
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "demo.py"])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    ended = run(name, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr


def test_the_demo_proves_what_it_says(tmp_path: Path) -> None:
    ended = run("demo.py", tmp_path)
    story = ended.stdout
    assert ended.returncode == 0, story + ended.stderr
    assert "✔ the weights are the same, bit for bit" in story
    assert "✔ the metrics are the same too: 30 rounds, each once" in story
    assert "✔ checkpoint_000020, which was never recorded, is gone" in story
    assert "✔ processes left behind: none" in story
    assert "✘" not in story
    sums = re.findall(r"weights sha256 (\w+)", story)
    assert len(sums) == 2
    assert sums[0] == sums[1]


def test_the_demo_goes_through_every_disaster(tmp_path: Path) -> None:
    story = " ".join(run("demo.py", tmp_path).stdout.replace("│", " ").split())
    assert "rank 2 was killed by SIGKILL, 8 reports into the attempt; resuming from checkpoint_000007" in story
    assert "rank 1 raised RuntimeError: the data server does not answer" in story
    assert "kill -9" in story
    assert "resuming after attempt 3, from checkpoint_000019" in story
    assert "\033" not in story
