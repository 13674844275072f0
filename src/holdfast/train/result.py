"""What came of a run, read from its journal: JSON and text, never unpickled."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, TrainingFailedError
from holdfast.train.checkpoint import Checkpoint
from holdfast.wire.metrics import decode_metrics

if TYPE_CHECKING:
    import pandas

    from holdfast.journal.facts import RunFact
    from holdfast.observe.history import History
    from holdfast.storage.store import Store


@dataclasses.dataclass
class Result:
    """The outcome of a run.

    ``metrics`` are rank 0's last, ``checkpoint`` is the newest, ``best_checkpoints`` all that are kept, with rank 0's
    metrics, in the order of their commits. ``path`` is the run's directory.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: TrainingFailedError | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = dataclasses.field(default_factory=list)
    return_value: Any = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """The result of the run that lies under ``path``, finished or not."""
        from holdfast.storage.store import open_store

        store = open_store(os.fspath(path))
        return read_result(store)

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
    return result_of(history, store.uri)


def result_of(history: History, uri: str) -> Result:
    """The result that a run's history leads to."""
    root = uri.rstrip("/")
    kept = [
        (Checkpoint(f"{root}/{commit.directory}"), decode_metrics(commit.metrics) or {})
        for commit in history.kept_checkpoints()
    ]
    error = TrainingFailedError(history.reason) if history.status == "FAILED" else None
    return Result(
        metrics=history.last_metrics(),
        checkpoint=kept[-1][0] if kept else None,
        path=uri,
        error=error,
        best_checkpoints=kept,
        return_value=decode_metrics(history.return_value),
    )


def _facts(store: Store) -> Iterable[RunFact]:
    from holdfast.journal.fold import read_facts
    from holdfast.journal.open import read_records

    return read_facts(read_records(store))
