"""What the user's function calls: ``report``, ``get_checkpoint`` and ``get_context``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.train.checkpoint import Checkpoint
from holdfast.wire.messages import WorkerContext
from holdfast.wire.metrics import encode_metrics
from holdfast.worker import session


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics, and optionally a checkpoint. Every rank must call it the same number of times.

    Without a checkpoint it returns as soon as the metrics have left this process. With one it returns when the
    checkpoint is complete in storage and recorded: whatever dies after that, the next attempt starts from it or a newer
    one. The files of all ranks that bring some to the same call become one directory; rank 0's metrics stand for it.
    """
    here = session.current("train.report()")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ConfigurationError(
            f"report(checkpoint={checkpoint!r:.80}): pass a Checkpoint, made by Checkpoint.from_directory(path)"
        )
    here.report(encode_metrics(metrics), None if checkpoint is None else Path(checkpoint.path))


def get_checkpoint() -> Checkpoint | None:
    """The newest committed checkpoint of this run, or None before the first."""
    here = session.current("train.get_checkpoint()")
    newest = here.newest_checkpoint()
    return None if newest is None else Checkpoint._of_commit(newest, here.context.storage_uri)


def get_context() -> TrainContext:
    """Who this worker is."""
    return TrainContext(session.current("train.get_context()").context)


class TrainContext:
    """Who a worker is: its rank among all, among its node's, and its run."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def get_experiment_name(self) -> str:
        return self._context.run

    def get_world_size(self) -> int:
        return self._context.world_size

    def get_world_rank(self) -> int:
        return self._context.rank

    def get_local_rank(self) -> int:
        return self._context.local_rank

    def get_local_world_size(self) -> int:
        return self._context.local_world_size

    def get_node_rank(self) -> int:
        return self._context.node_rank

    def get_storage(self) -> str:
        """The run's own directory."""
        return self._context.storage_uri

    def get_attempt(self) -> int:
        """Which attempt this is, counted from 1 over the whole life of the run."""
        return self._context.attempt
