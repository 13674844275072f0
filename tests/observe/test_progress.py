"""What a person at a terminal sees while a run goes on, taken from a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

from tests.train import runs

COLUMNS = 100


def on_a_terminal(storage: Path, **asked: Any) -> str:
    """Everything that a training script writes to its terminal, escape sequences too."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join((str(runs.ROOT), *sys.path))}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, runs.SCRIPT, json.dumps({"storage": str(storage), **asked})],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while data := os.read(ours, 65536):
                seen += data
        os.close(ours)
    assert process.returncode == 0, seen.decode()
    return seen.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def progress_lines(seen: str) -> list[str]:
    """Each state in which the progress line was drawn."""
    return re.findall(r"attempt \d+ \w+ · [^\r\n]*", plain(seen))


def test_the_line_has_the_attempt_the_metrics_and_the_checkpoint(tmp_path: Path) -> None:
    seen = on_a_terminal(tmp_path, workers=1, config={"steps": 3})
    last = progress_lines(seen)[-1]
    assert re.fullmatch(
        r"attempt 1 finished · 0:00:\d\d · 3 reports( · [\d.e+]+/s)? · step=3, weight=5.0625 · checkpoint_000002", last
    )
    assert max(map(len, progress_lines(seen))) <= COLUMNS


def test_lines_are_printed_whole_above_the_progress_line(tmp_path: Path) -> None:
    seen = plain(on_a_terminal(tmp_path, workers=2, config={"steps": 2}))
    lines = [line.rpartition("\r")[2] for line in seen.replace("\r\n", "\n").splitlines()]
    assert "(rank 0) rank 0 begins attempt 1" in lines
    assert len([line for line in lines if line.startswith("holdfast: run 'run': 2 workers on local")]) == 1
    assert lines[-2].startswith("holdfast: finished with step=2, weight=2.75, newest checkpoint checkpoint_000001; ")
    assert json.loads(lines[-1])["return_value"] == 2.75


def test_the_progress_line_is_gone_and_the_cursor_there_at_the_end(tmp_path: Path) -> None:
    seen = on_a_terminal(tmp_path, workers=1, config={"steps": 1})
    assert seen.rindex("\x1b[2K") > seen.rindex("attempt 1")
    assert seen.count("\x1b[?25h") >= seen.count("\x1b[?25l")
    assert "\x1b[?25l\x1b[?25h" in seen, "a killed driver would leave the terminal without a cursor"


def test_a_run_of_several_attempts_ends_with_a_table_of_them(tmp_path: Path) -> None:
    faults = [{"at": "working", "step": 2, "how": "sigkill", "once": str(tmp_path / "once")}]
    seen = plain(on_a_terminal(tmp_path, workers=1, config={"steps": 2, "faults": faults}, max_failures=1))
    failed = re.search(r"^ 1 .* failed +rank 0 was killed", seen, re.MULTILINE)
    finished = re.search(r"^ 2 .* finished", seen, re.MULTILINE)
    assert failed
    assert finished
    assert failed.start() < finished.start() < seen.index("holdfast: finished with")
    assert len(re.findall(r"holdfast: attempt 1 failed", seen)) == 1


def test_a_run_of_one_attempt_ends_without_a_table(tmp_path: Path) -> None:
    seen = plain(on_a_terminal(tmp_path, workers=1, config={"steps": 1}))
    assert "outcome" not in seen


def test_nothing_is_drawn_where_nobody_looks(tmp_path: Path) -> None:
    driver = runs.drive(tmp_path, workers=1, config={"steps": 1})
    assert "\x1b" not in driver.output
    assert "attempt 1" not in driver.output.replace("rank 0 begins attempt 1", "")
