"""The public names of a training script.

Importing this package starts nothing and loads neither the controller nor any store, for workers import it too.
"""

from __future__ import annotations

from holdfast.errors import (
    CollectiveError,
    ControllerError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)
from holdfast.train import collective
from holdfast.train.callbacks import TrainRunContext, UserCallback
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.config import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from holdfast.train.context import (
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    PreemptionInfo,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    TrainContext,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_preemption_info,
    heartbeat,
    report,
)
from holdfast.train.result import Result
from holdfast.train.trainer import DataParallelTrainer

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "CollectiveError",
    "ControllerError",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "PreemptionError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "UserCallback",
    "WorkerGroupError",
    "collective",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_preemption_info",
    "heartbeat",
    "report",
]
