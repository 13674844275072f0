"""The public names of a training script.

Importing this package starts nothing and loads neither the controller nor any store, for workers import it too.
"""

from __future__ import annotations

from holdfast.errors import (
    ControllerError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)
from holdfast.train.callbacks import TrainRunContext, UserCallback
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from holdfast.train.context import (
    CheckpointUploadMode,
    TrainContext,
    get_checkpoint,
    get_context,
    heartbeat,
    report,
)
from holdfast.train.result import Result
from holdfast.train.trainer import DataParallelTrainer

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointUploadMode",
    "ControllerError",
    "DataParallelTrainer",
    "FailureConfig",
    "PreemptionError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "TrainRunContext",
    "TrainingFailedError",
    "UserCallback",
    "WorkerGroupError",
    "get_checkpoint",
    "get_context",
    "heartbeat",
    "report",
]
