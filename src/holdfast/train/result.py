"""What came of a run, read from its journal: JSON and text, never unpickled."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import (
    ConfigurationError,
    ControllerError,
    MissingError,
    NoCheckpointError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.options import require
from holdfast.wire.metrics import decode_metrics

if TYPE_CHECKING:
    import pandas

    from holdfast.control.retention import Policy
    from holdfast.journal.facts import RankFailure, RunFact
    from holdfast.observe.history import Commit, History
    from holdfast.storage.store import Store

RUN_FILE = "run.json"
LOGS = "logs"


@dataclasses.dataclass
class Result:
    """The outcome of a run.

    ``metrics`` are rank 0's last, ``checkpoint`` is the newest, ``best_checkpoints`` all that are kept, with rank 0's
    metrics: from the worst to the best by ``CheckpointConfig``'s score, or from the oldest to the newest where it names
    none. ``path`` is the run's directory.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: TrainingFailedError | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = dataclasses.field(default_factory=list)
    return_value: Any = None
    filesystem: None = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """The result of the run that lies under ``path``, finished or not."""
        from holdfast.storage.store import open_store

        store = open_store(os.fspath(path))
        return read_result(store)

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Of the checkpoints that are kept, the one with the highest (``mode="max"``) or lowest (``"min"``) ``metric``.

        ``metric`` may be a path into nested metrics, such as ``eval/acc``. Checkpoints without it do not count.
        """
        from holdfast.control.retention import score

        require(mode in ("max", "min"), "get_best_checkpoint", "mode", mode, "'max' or 'min'")
        if not self.best_checkpoints:
            raise NoCheckpointError(f"{self.path} has no checkpoint")
        best: tuple[float, Checkpoint] | None = None
        for checkpoint, metrics in self.best_checkpoints:
            value = score(metrics, metric)
            if value is not None and (best is None or (value > best[0] if mode == "max" else value < best[0])):
                best = value, checkpoint
        if best is None:
            names = sorted({name for _, metrics in self.best_checkpoints for name in _numbers(metrics, "")})
            raise NoCheckpointError(
                f"no checkpoint of {self.path} has a number under {metric!r}; they have: {', '.join(names) or 'none'}"
            )
        return best[1]

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """Every row that rank 0 reported and that no restart has superseded. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigurationError("metrics_dataframe needs pandas: pip install 'holdfast[pandas]'") from None
        return pandas.json_normalize(self.metrics_rows(), sep="/")

    def metrics_rows(self) -> list[dict[str, Any]]:
        """What ``metrics_dataframe`` holds, as plain dicts."""
        from holdfast.observe.history import fold_history, rows
        from holdfast.storage.store import open_store

        store = open_store(self.path)
        return list(rows(_facts(store), fold_history(_facts(store))))


def read_result(store: Store) -> Result:
    """Fold a run's journal into its result."""
    from holdfast.observe.history import fold_history

    history = fold_history(_facts(store))
    if not history.opened:
        raise ConfigurationError(f"{store.uri} holds no run: its journal is missing or empty")
    return result_of(history, store.uri, _policy(store))


def result_of(history: History, uri: str, policy: Policy) -> Result:
    """The result that a run's history leads to."""
    from holdfast.control.retention import Kept, ranked

    root = uri.rstrip("/")
    commits = {commit.index: commit for commit in history.kept_checkpoints()}
    kept = [Kept(commit.index, True, commit.metrics) for commit in commits.values()]

    def checkpoint(commit: Commit) -> Checkpoint:
        return Checkpoint(f"{root}/{commit.directory}")

    return Result(
        metrics=history.last_metrics(),
        checkpoint=checkpoint(commits[max(commits)]) if commits else None,
        path=uri,
        error=failure_of(history, uri) if history.status == "FAILED" else None,
        best_checkpoints=[
            (checkpoint(commits[one.index]), decode_metrics(one.metrics) or {}) for one in ranked(kept, policy)
        ],
        return_value=decode_metrics(history.return_value),
    )


def rank_error(failure: RankFailure) -> BaseException:
    """An error that says what happened to a rank, where its own exception cannot be had."""
    error = TrainingFailedError(f"rank {failure.rank} {failure.error or ''} {failure.message}".replace("  ", " "))
    if failure.traceback:
        error.add_note(f"On rank {failure.rank}:\n{failure.traceback}")
    return error


def failure_of(
    history: History, uri: str, error_of: Callable[[RankFailure], BaseException] = rank_error
) -> TrainingFailedError:
    """The error of a run that gave up: the root rank's own traceback first."""
    from holdfast.observe.wording import describe_root

    attempt = history.attempts[max(history.attempts)] if history.attempts else None
    where = f"The logs of all workers are in {uri}/{LOGS}."
    if attempt is None or not attempt.failures:
        return ControllerError(f"{history.reason}\n{where}")
    root = attempt.failures[0]
    parts = [describe_root(attempt.failures)]
    if root.traceback:
        parts.append(root.traceback.rstrip())
    parts += [f"The run has given up: {history.reason}.", where]
    if root.kind == "preemption":
        return PreemptionError("\n".join(parts))
    errors = {failure.rank: error_of(failure) for failure in attempt.failures}
    error = WorkerGroupError("\n".join(parts), errors)
    error.__cause__ = errors[root.rank] if root.error else None
    return error


def _policy(store: Store) -> Policy:
    """How the run ranks its checkpoints, as far as it has written that down."""
    from holdfast.control.retention import Policy

    try:
        asked = msgspec.json.decode(store.read(RUN_FILE), type=dict[str, msgspec.Raw])
        return msgspec.json.decode(asked["retention"], type=Policy)
    except (MissingError, KeyError, msgspec.DecodeError):
        return Policy()


def _numbers(metrics: dict[str, Any], path: str) -> Iterable[str]:
    """The paths of all numbers in nested metrics."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, int | float):
            yield f"{path}{name}"


def _facts(store: Store) -> Iterable[RunFact]:
    from holdfast.journal.fold import read_facts
    from holdfast.journal.open import read_records

    return read_facts(read_records(store))
