"""The harm: signals to the processes below one driver of ours, by pid, and a disk that is full for a while.

Nothing is ever touched that does not descend from the driver that was given.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

KINDS = ("worker", "zygote", "pristine", "agent", "janitor", "driver")
WEIGHTS = (10, 2, 1, 3, 2, 3)
PLACES = (
    "manifest.before",
    "manifest.after",
    "ack.before",
    "delete.before",
    "delete.after",
    "journal.written",
    "upload.begin",
    "upload.end",
    "report.declared",
    "report.after",
    "zygote.forked",
    "worker.begin",
)
DISK = "48m"


class Storm:
    """One seed's bad luck."""

    def __init__(self, seed: int, storage: Path, scratch: Path, *, small_disk: bool) -> None:
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.deaths: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._storage = storage
        self._scratch = scratch
        self._small_disk = small_disk
        self._faults = 0

    def faults(self) -> str:
        """Bad luck for the whole life of one driver: uploads that fail, and a death at a named place."""
        found = []
        if self.chance.random() < 0.5:
            times = self.chance.randint(1, 6)
            self.done["failed uploads"] += times
            found.append(f"upload.file:raise:times={times}")
        if self.chance.random() < 0.4:
            self._faults += 1
            place = self.chance.choice(PLACES)
            self.done[f"death at {place}"] += 1
            found.append(f"{place}:kill:once={self._scratch}/fault-{self._faults}")
        return ";".join(found)

    def strike(self, driver: subprocess.Popen[bytes]) -> None:
        """Do one thing, and undo it if it can be undone."""
        luck = self.chance.random()
        if luck < 0.65:
            self._kill(driver)
        elif luck < 0.70:
            self._preempt(driver)
        elif luck < 0.95 or not self._small_disk:
            self._stop(driver)
        else:
            self._fill_disk(self.chance.uniform(0.05, 0.5))

    def _kill(self, driver: subprocess.Popen[bytes]) -> None:
        kind, victim = self._victim(driver)
        if victim is None:
            return
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
            self.done[f"killed {kind}"] += 1
            self.deaths[kind].append(time.time())

    def _preempt(self, driver: subprocess.Popen[bytes]) -> None:
        """Say to an agent or to the driver that its machine goes."""
        kind, victim = self._victim(driver, ("agent", "driver"), (2, 1))
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                victim.send_signal(signal.SIGTERM)
                self.done[f"preempted {kind}"] += 1

    def _stop(self, driver: subprocess.Popen[bytes]) -> None:
        """Stop a process for a while, and maybe kill another one meanwhile."""
        kind, victim = self._victim(driver)
        if victim is None:
            return
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGSTOP)
            self.done[f"stopped {kind}"] += 1
            try:
                time.sleep(self.chance.uniform(0.01, 0.4))
                if self.chance.random() < 0.4:
                    self._kill(driver)
                    time.sleep(self.chance.uniform(0.01, 0.2))
            finally:
                victim.send_signal(signal.SIGCONT)

    def _victim(
        self, driver: subprocess.Popen[bytes], kinds: Sequence[str] = KINDS, weights: Sequence[int] = WEIGHTS
    ) -> tuple[str, psutil.Process | None]:
        kind = self.chance.choices(kinds, weights)[0]
        if kind == "driver":
            return kind, psutil.Process(driver.pid) if driver.poll() is None else None
        found = sorted((process.pid, process) for process in _below(driver.pid) if _name(process) == f"hf:{kind}")
        return kind, self.chance.choice(found)[1] if found else None

    def _fill_disk(self, seconds: float) -> None:
        self.done["filled the disk"] += 1
        filler = self._storage / "filler"
        try:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(_DiskFull):
                while True:
                    _write(file.fileno())
            time.sleep(seconds)
        finally:
            filler.unlink(missing_ok=True)


class _DiskFull(Exception):
    pass


def _write(descriptor: int) -> None:
    for size in (1 << 20, 1 << 12, 1):
        try:
            os.write(descriptor, b"\0" * size)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    raise _DiskFull


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A file system of its own at ``place``, small enough to be filled; False where that may not be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "holdfast-chaos", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
