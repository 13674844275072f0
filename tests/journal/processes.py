"""The test's end of a driver process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parents[2]


class DriverProcess:
    def __init__(self, kind: str, root: Path, *before: str) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.journal.driver", kind, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=HERE,
        )

    def send(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, order: str) -> str:
        self.send(order)
        return self.answer()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> list[str]:
        """SIGKILL it; what it had still said."""
        self.process.kill()
        assert self.process.stdout is not None
        said = self.process.stdout.read().splitlines()
        self.process.wait()
        return said


@contextmanager
def driving(kind: str, root: Path, *before: str) -> Iterator[DriverProcess]:
    driver = DriverProcess(kind, root, *before)
    try:
        yield driver
    finally:
        driver.process.kill()
        driver.process.communicate()
