"""What the user's function calls: ``report``, ``get_checkpoint`` and ``get_context``."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.train import bringing
from holdfast.train.checkpoint import Checkpoint
from holdfast.wire import messages as m
from holdfast.wire.metrics import decode_metrics, encode_metrics
from holdfast.worker import session


class CheckpointUploadMode(enum.Enum):
    """When ``report`` returns: SYNC after the commit, ASYNC at once. With NO_UPLOAD the files lie in the run's
    directory already.
    """

    SYNC = m.SYNC
    ASYNC = m.ASYNC
    NO_UPLOAD = m.NO_UPLOAD


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
) -> None:
    """Report metrics, and optionally a checkpoint. Every rank must call it the same number of times.

    Without a checkpoint it returns as soon as the metrics have left this process. With one it returns when the
    checkpoint is complete in storage and recorded: whatever dies after that, the next attempt starts from it or a newer
    one. The files of all ranks that bring some to the same call become one directory; rank 0's metrics stand for it.

    ``checkpoint_upload_mode=CheckpointUploadMode.ASYNC`` returns at once: the node's agent uploads while training goes
    on, commits are made in the order of the calls, at most two of a rank's are under way, and all are done before
    ``fit`` returns. The directory must stay until then; it is removed after its upload unless
    ``delete_local_checkpoint_after_upload=False``. With ``NO_UPLOAD`` the files lie in the run's own directory
    (``get_context().get_storage()``) already. ``checkpoint_upload_fn(checkpoint, name)`` puts the files there itself,
    in the folder ``name``, and returns the checkpoint that lies there; whether they last is then the user's care.
    ``checkpoint_dir_name`` is the folder's name; one that was used before gets the checkpoint's index as a suffix.
    """
    here = session.current("train.report()")
    if checkpoint is None:
        here.report(encode_metrics(metrics))
        return
    manner = bringing.manner(
        getattr(checkpoint_upload_mode, "value", ""),
        checkpoint_dir_name,
        delete_local_checkpoint_after_upload,
    )
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigurationError(
            f"report(checkpoint={checkpoint!r:.80}): pass a Checkpoint, made by Checkpoint.from_directory(path)"
        )
    text = encode_metrics(metrics)
    path = Path(os.path.abspath(checkpoint.path))
    if checkpoint_upload_fn is not None:
        name = manner.name or here.next_directory()
        uploaded = checkpoint_upload_fn(checkpoint, name)
        if not isinstance(uploaded, Checkpoint):
            raise ConfigurationError("checkpoint_upload_fn must return the Checkpoint that it has uploaded")
        path, manner = Path(os.path.abspath(uploaded.path)), m.Manner(m.NO_UPLOAD)
    if manner.mode == m.NO_UPLOAD:
        manner = m.Manner(m.NO_UPLOAD, bringing.place(path, here.context.storage_uri))
    here.report(text, path, manner)


def heartbeat() -> None:
    """Tell the watchdog that this rank is alive, in the middle of a step that takes longer than ``hang_timeout_s``.

    It is cheap: call it as often as you like.
    """
    session.current("train.heartbeat()").heartbeat()


@dataclasses.dataclass(frozen=True)
class PreemptionInfo:
    """What is about to be taken away: the nodes, each with its ranks. ``deadline_ms``, in Unix time, is when this
    attempt ends."""

    deadline_ms: int
    preempted_node_to_ranks: dict[str, list[int]]


def get_preemption_info() -> PreemptionInfo | None:
    """What this run has been told to leave, or None. Ask at every step, and save when there is an answer.

    Every rank is told, whichever node is concerned, because all of them start again together; but they may hear of it
    at different steps. A function that returns after it was told is called again later.
    """
    told = session.current("train.get_preemption_info()").preemption()
    if told is None:
        return None
    return PreemptionInfo(told.deadline_ms, {node: list(ranks) for node, ranks in told.nodes.items()})


def get_checkpoint() -> Checkpoint | None:
    """The newest committed checkpoint of this run, or None before the first."""
    here = session.current("train.get_checkpoint()")
    newest = here.newest_checkpoint()
    return None if newest is None else Checkpoint._of_commit(newest, here.context.storage_uri)


class CheckpointConsistencyMode(enum.Enum):
    """What a checkpoint must have been through to be listed: COMMITTED, or VALIDATED as well, where it is validated."""

    COMMITTED = "committed"
    VALIDATED = "validated"


class ReportedCheckpointStatus(enum.Enum):
    COMMITTED = "committed"


@dataclasses.dataclass(frozen=True)
class ReportedCheckpoint:
    """A checkpoint that is kept, with rank 0's metrics."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """Every checkpoint that is kept, the oldest first, also of earlier attempts.

    It waits until those that this rank has reported are committed; TimeoutError after ``timeout_s``. Checkpoints are
    not validated yet, so that both modes list the same.
    """
    here = session.current("train.get_all_reported_checkpoints()")
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise ConfigurationError("consistency_mode must be a CheckpointConsistencyMode: COMMITTED or VALIDATED")
    return [
        ReportedCheckpoint(
            Checkpoint._of_commit(kept.checkpoint, here.context.storage_uri),
            decode_metrics(kept.metrics) or {},
            ReportedCheckpointStatus.COMMITTED,
        )
        for kept in here.kept_checkpoints(timeout_s)
    ]


def get_context() -> TrainContext:
    """Who this worker is."""
    return TrainContext(session.current("train.get_context()").context)


class TrainContext:
    """Who a worker is: its rank among all, among its node's, and its run."""

    def __init__(self, context: m.WorkerContext) -> None:
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
