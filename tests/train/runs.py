"""Starting runs, and looking at what became of them."""

from __future__ import annotations

import concurrent.futures
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from holdfast import faultpoints, train
from holdfast.journal import facts as f
from holdfast.journal.fold import read_facts
from holdfast.journal.open import read_records
from holdfast.storage.store import open_store
from tests.train import loops

F = TypeVar("F", bound=f.Fact)
SCRIPT = str(Path(__file__).parent / "scripts" / "climb.py")
ROOT = Path(__file__).parents[2]


def trainer(
    storage: Path,
    loop: Callable[..., Any] = loops.climb,
    config: dict[str, Any] | None = None,
    *,
    workers: int = 1,
    name: str = "run",
    max_failures: int = 0,
    failure: dict[str, Any] | None = None,
    keep: train.CheckpointConfig | None = None,
    **run_options: Any,
) -> train.DataParallelTrainer:
    return train.DataParallelTrainer(
        loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=max_failures, **(failure or {})),
            checkpoint_config=keep,
            **run_options,
        ),
    )


def fit(storage: Path, *arguments: Any, **options: Any) -> train.Result:
    return trainer(storage, *arguments, **options).fit()


@contextmanager
def fitting(storage: Path, *arguments: Any, **options: Any) -> Iterator[concurrent.futures.Future[train.Result]]:
    """A run in another thread, while the test does something to it. It has ended when the block does."""
    asked = trainer(storage, *arguments, **options)
    running: concurrent.futures.Future[train.Result] = concurrent.futures.Future()

    def go() -> None:
        try:
            running.set_result(asked.fit())
        except BaseException as error:
            running.set_exception(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    yield running
    thread.join()


def facts(path: str | Path, kind: type[F] = f.Fact) -> list[F]:  # type: ignore[assignment]
    """What the journal of the run in this directory holds."""
    return [fact for fact in read_facts(read_records(open_store(str(path)))) if isinstance(fact, kind)]


def charges(path: str | Path) -> list[str]:
    """The budgets that paid for the attempts of this run, one for each attempt that was charged."""
    return [ended.charge for ended in facts(path, f.AttemptEnded) if ended.charge]


def outcomes(path: str | Path) -> list[str]:
    return [ended.outcome for ended in facts(path, f.AttemptEnded)]


def roots(path: str | Path) -> list[f.RankFailure]:
    """The root of each failed attempt."""
    return [ended.failures[0] for ended in facts(path, f.AttemptEnded) if ended.failures]


def rows(path: str | Path, rank: int) -> list[dict[str, Any]]:
    """Every row that the journal holds of a rank, superseded ones too."""
    return [row for fact in facts(path, f.RowsReported) if fact.rank == rank for row in json.loads(bytes(fact.rows))]


def directories(path: str | Path) -> list[str]:
    """The checkpoint directories that lie in a run's directory."""
    return sorted(entry.name for entry in Path(path).iterdir() if entry.name.startswith("checkpoint_"))


def content(checkpoint: train.Checkpoint) -> dict[str, bytes]:
    """Every file of a checkpoint, by its name, after it was verified."""
    with checkpoint.as_directory() as top:
        return {
            str(path.relative_to(top)): path.read_bytes()
            for path in sorted(Path(top).rglob("*"))
            if path.is_file() and path.name != ".manifest.json"
        }


def assert_undisturbed(result: train.Result, *, workers: int, steps: int) -> None:
    """The run of ``climb`` has come to what it comes to when nothing fails, and has lost nothing on the way."""
    assert result.return_value == loops.undisturbed_weight(0, steps)
    assert result.error is None
    assert result.checkpoint is not None
    assert {name: json.loads(text) for name, text in content(result.checkpoint).items()} == {
        f"rank_{rank}.json": {"step": steps, "weight": loops.undisturbed_weight(rank, steps)} for rank in range(workers)
    }
    counted = [row for row in result.metrics_rows() if "part" not in row]
    assert [row["step"] for row in counted] == list(range(1, steps + 1))
    assert [row["weight"] for row in counted] == [loops.undisturbed_weight(0, n) for n in range(1, steps + 1)]
    assert_committed_is_forever(result.path)


def assert_committed_is_forever(path: str | Path) -> None:
    """Every checkpoint that was committed and not retired can be loaded; indices only grew; each attempt started from
    the newest checkpoint that was committed before it."""
    sound: dict[int, str] = {}
    indices: list[int] = []
    for fact in facts(path):
        if isinstance(fact, f.CheckpointCommitted):
            sound[fact.index] = fact.directory
            indices.append(fact.index)
        elif isinstance(fact, f.CheckpointDamaged):
            del sound[fact.index]
        elif isinstance(fact, f.CheckpointsRetired):
            assert max(sound) not in fact.indices
            sound = {index: directory for index, directory in sound.items() if index not in fact.indices}
        elif isinstance(fact, f.AttemptStarted):
            assert fact.resume == max(sound, default=None)
    assert indices == sorted(set(indices))
    for directory in sound.values():
        assert content(train.Checkpoint(Path(path, directory))) is not None


class Gate:
    """Where workers that call ``loops.meet`` wait for the test, and the test for them: pipes, so nobody polls."""

    def __init__(self, path: Path, ranks: Iterable[int] = (0,)) -> None:
        self.path = str(path)
        for rank in ranks:
            os.mkfifo(f"{path}.{rank}.here")
            os.mkfifo(f"{path}.{rank}.go")

    def wait(self, rank: int = 0) -> int:
        """Wait until the worker is here; its pid."""
        with open(f"{self.path}.{rank}.here") as here:
            return int(here.readline())

    def open(self, rank: int = 0) -> None:
        """Let the worker go on."""
        with open(f"{self.path}.{rank}.go", "w"):
            pass

    def at(self, rank: int = 0) -> str:
        """The path by which a fault that holds a process finds this gate."""
        return f"{self.path}.{rank}"


class Driver:
    """A training script in a process of its own, to be killed, stopped and launched again."""

    def __init__(self, storage: Path, *, faults: str = "", **asked: Any) -> None:
        environment = {**os.environ, faultpoints.VARIABLE: faults}
        if not faults:
            del environment[faultpoints.VARIABLE]
        asked = {"storage": str(storage), **asked}
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, json.dumps(asked)],
            env={**environment, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. What it printed is in ``output`` then."""
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            self.output += self.process.communicate()[0]
        return self.process.returncode

    def read_until(self, text: str) -> None:
        """Wait until it has printed a line with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"it ended without saying {text!r}:\n{self.output}")

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def told(self) -> dict[str, Any]:
        """What the script printed last: what came of the run."""
        code = self.wait()
        lines = self.output.splitlines()
        assert lines, f"nothing was printed, and it ended with {code}"
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def drive(storage: Path, **asked: Any) -> Driver:
    """Run the script to its end, whichever that is."""
    with Driver(storage, **asked) as driver:
        driver.wait()
    return driver


def final(path: str | Path) -> train.Result:
    return train.Result.from_path(path)


def wait_for_text(capture: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until a run in another thread has printed this; the test's own time-out is the limit."""
    seen = ""
    while text not in seen:
        seen += capture.readouterr().out
        time.sleep(0.005)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for something that nobody announces; the test's own time-out is the limit."""
    while not holds():
        time.sleep(0.005)


def wait_for_end(pid: int) -> None:
    """Wait until this process is dead, whoever's child it is, waited for or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)


def lose_a_peer(folder: Path) -> train.WorkerGroupError:
    """Rank 1 is killed, but rank 0, which it leaves with a reset connection, is the first to be heard of."""
    gate = Gate(folder / "gate", [1])
    config = {"port_file": str(folder / "port"), "pids": str(folder), "gate": gate.path}
    with fitting(folder, loops.lose_a_peer, config, workers=2) as running:
        zygote = psutil.Process(gate.wait(1)).parent()
        assert zygote is not None
        zygote.suspend()  # it is the one who tells of deaths
        survivor = int((folder / "0").read_text())
        gate.open(1)
        wait_for_end(survivor)
        zygote.resume()
        error = running.exception()
    assert isinstance(error, train.WorkerGroupError)
    return error
