"""Starting runs, and looking at what became of them."""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast import train
from holdfast.journal import facts as f
from holdfast.journal.fold import read_facts
from holdfast.journal.open import read_records
from holdfast.storage.store import open_store
from tests.train import loops

F = TypeVar("F", bound=f.Fact)


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
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        yield thread.submit(asked.fit)


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
    return [
        row for fact in facts(path, f.RowsReported) if fact.rank == rank for row in json.loads(bytes(fact.rows))
    ]


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
        f"rank_{rank}.json": {"step": steps, "weight": loops.undisturbed_weight(rank, steps)}
        for rank in range(workers)
    }
    counted = [row for row in result.metrics_rows() if "part" not in row]
    assert [row["step"] for row in counted] == list(range(1, steps + 1))
    assert [row["weight"] for row in counted] == [loops.undisturbed_weight(0, n) for n in range(1, steps + 1)]
    assert_committed_is_forever(result.path)


def assert_committed_is_forever(path: str | Path) -> None:
    """Every checkpoint that was committed and not retired can be loaded; indices only grew; each attempt started from
    the newest checkpoint that was committed before it."""
    committed = facts(path, f.CheckpointCommitted)
    indices = [fact.index for fact in committed]
    assert indices == sorted(set(indices))
    retired = {index for fact in facts(path, f.CheckpointsRetired) for index in fact.indices}
    damaged = {fact.index for fact in facts(path, f.CheckpointDamaged)}
    for fact in committed:
        if fact.index not in retired | damaged:
            assert content(train.Checkpoint(Path(path, fact.directory))) is not None
    newest: int | None = None
    for fact in facts(path):
        if isinstance(fact, f.CheckpointCommitted):
            newest = fact.index
        elif isinstance(fact, f.CheckpointDamaged):
            newest = max((index for index in indices if index < fact.index and index not in damaged), default=None)
        elif isinstance(fact, f.AttemptStarted):
            assert fact.resume == newest


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
