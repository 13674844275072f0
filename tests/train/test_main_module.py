"""A worker's ``__main__`` behaves as the user's script would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "spawn_loaders.py"


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_started_by_a_worker_find_the_classes_of_the_script(tmp_path: Path, method: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), method], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"FOUND {{'{method}': [0, 1, 4, 9], '{method} pool': [0, 1, 4]}}" in done.stdout, done.stdout + done.stderr
