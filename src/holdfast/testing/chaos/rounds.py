"""Round after round: a run is started, tormented until it has come to its end, and audited."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from holdfast import faultpoints, train
from holdfast.journal import facts as f
from holdfast.testing.chaos.audit import Auditor, BrokenPromise, check, median_ms, recoveries
from holdfast.testing.chaos.storm import KINDS, Storm, small_disk

MARK = "HOLDFAST_CHAOS"
ENDING_S = 10.0
STUCK_S = 60.0
_DRIVER = "from holdfast.testing.chaos.training import main; main()"


class Tally:
    """What has happened so far."""

    def __init__(self) -> None:
        self.rounds = self.attempts = self.drivers = self.gave_up = 0
        self.charged: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def lines(self) -> Iterator[str]:
        yield f"{self.rounds} runs, {self.attempts} attempts, {self.drivers} drivers, {self.gave_up} runs given up"
        yield "charged: " + (", ".join(f"{name} {count}" for name, count in sorted(self.charged.items())) or "nothing")
        for name, count in sorted(self.done.items()):
            yield f"  {name}: {count}"
        for kind, times in self.recoveries.items():
            yield f"  all ranks running again after the death of its {kind}, median: {median_ms(times)}"


class Chaos:
    """Everything that one call of the command needs; a folder of its own, and nothing outside it."""

    def __init__(self, seed: int, *, steps: int, mean_gap_s: float, say: Callable[[str], None]) -> None:
        self._seed = seed
        self._steps = steps
        self._gap_s = mean_gap_s
        self._say = say
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._said_before = 0
        self.tally = Tally()
        self.folder = Path(tempfile.mkdtemp(prefix="hf-chaos-", dir="/var/tmp"))

    def rage(self, seconds: float) -> None:
        """Rounds until the time is over, at least one. BrokenPromise at the first thing that is not as promised."""
        for name in ("disk", "tmp", "runtime"):
            (self.folder / name).mkdir()
        storage = self.folder / "disk"
        with small_disk(storage) as may_fill:
            try:
                undisturbed = self._undisturbed(storage)
                storm = Storm(self._seed, storage, self.folder / "tmp", small_disk=may_fill)
                self.tally.done = storm.done
                deadline = time.monotonic() + seconds
                while not self.tally.rounds or time.monotonic() < deadline:
                    self._round(storm, storage, undisturbed)
            except BaseException:
                shutil.copytree(storage, self.folder / "kept", symlinks=True)
                raise

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _undisturbed(self, storage: Path) -> train.Result:
        driver = self._launch("undisturbed", storage, "")
        check(driver.wait() == 0, f"the undisturbed run has failed: {self._output()}")
        self._nothing_left()
        return train.Result.from_path(storage / "undisturbed")

    def _round(self, storm: Storm, storage: Path, undisturbed: train.Result) -> None:
        name = f"run_{self.tally.rounds}"
        auditor = Auditor(storage / name)
        deaths = {kind: len(moments) for kind, moments in storm.deaths.items()}
        code = 1
        while code != 0:
            driver = self._launch(name, storage, storm.faults())
            self.tally.drivers += 1
            code = self._torment(storm, driver)
            self._nothing_left()
            if code > 0:
                self._check_excuse()
            auditor.look()
        facts = auditor.finish(undisturbed)
        self._count(facts, {kind: moments[deaths[kind] :] for kind, moments in storm.deaths.items()})
        shutil.rmtree(storage / name)

    def _torment(self, storm: Storm, driver: subprocess.Popen[bytes]) -> int:
        """Strike until the driver has ended; its exit code."""
        stuck = time.monotonic() + STUCK_S
        try:
            while True:
                try:
                    return driver.wait(timeout=0.02 + storm.chance.expovariate(1 / self._gap_s))
                except subprocess.TimeoutExpired:
                    check(time.monotonic() < stuck, f"the run stands still: {self._output()}")
                storm.strike(driver)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()

    def _check_excuse(self) -> None:
        """A driver may end by itself only where its disk was full, or where it was told that its machine goes."""
        output = self._output()
        excused = any(text in output for text in ("is full", "No space left on device", "PreemptionError"))
        check(excused, f"a driver failed: {output}")
        self.tally.gave_up += "given up" in output

    def _launch(self, name: str, storage: Path, faults: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            MARK: self._mark,
            "HOLDFAST_RUNTIME_DIR": str(self.folder / "runtime"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            faultpoints.VARIABLE: faults,
        }
        with open(self.folder / "output", "ab") as output:
            self._said_before = output.tell()
            return subprocess.Popen(
                [sys.executable, "-c", _DRIVER, name, str(storage), str(self._steps)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _output(self) -> str:
        """The last words of the newest driver."""
        with open(self.folder / "output", errors="replace") as output:
            output.seek(self._said_before)
            return output.read()[-4000:]

    def _nothing_left(self) -> None:
        """No process that descends from a driver, and nothing in the runtime folder."""
        deadline = time.monotonic() + ENDING_S
        while left := [*self._processes(), *map(str, (self.folder / "runtime").iterdir())]:
            if time.monotonic() > deadline:
                raise BrokenPromise(f"left behind by a dead driver: {', '.join(left)}")
            time.sleep(0.005)

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"{process.pid} {process.name()}"

    def _count(self, facts: list[f.RunFact], deaths: dict[str, list[float]]) -> None:
        self.tally.rounds += 1
        for fact in facts:
            self.tally.attempts += isinstance(fact, f.AttemptStarted)
            if isinstance(fact, f.AttemptEnded) and fact.charge:
                self.tally.charged[fact.charge] += 1
        for kind, moments in deaths.items():
            self.tally.recoveries[kind] += recoveries(facts, moments)
        self._say(
            f"run {self.tally.rounds}: sound after {self.tally.attempts} attempts and {self.tally.drivers} drivers"
        )
