"""Training functions that bring their checkpoints in every manner."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from holdfast import train

ASYNC, NO_UPLOAD = train.CheckpointUploadMode.ASYNC, train.CheckpointUploadMode.NO_UPLOAD


def resumed() -> int:
    """The step of the checkpoint that this attempt starts from, 0 for none."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, f"rank_{train.get_context().get_world_rank()}").read_text())


def folder_with(step: int, parent: str | None = None) -> str:
    folder = tempfile.mkdtemp(dir=parent)
    Path(folder, f"rank_{train.get_context().get_world_rank()}").write_text(str(step))
    return folder


def in_background(config: dict[str, Any]) -> list[str]:
    """Reports each step in the background; says where the files lay and how far it got."""
    rank, folders = train.get_context().get_world_rank(), []
    for step in range(resumed() + 1, config["steps"] + 1):
        folders.append(folder_with(step, config["scratch"]))
        train.report(
            {"step": step},
            checkpoint=train.Checkpoint.from_directory(folders[-1]),
            checkpoint_upload_mode=ASYNC,
            delete_local_checkpoint_after_upload=config.get("delete"),
        )
        Path(config["scratch"], f"reported_{rank}_{step}").touch()
        if step == config.get("die_after") and train.get_context().get_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return folders


def named(config: dict[str, Any]) -> None:
    for step, name in enumerate(config["names"], start=1):
        checkpoint = train.Checkpoint.from_directory(folder_with(step, config["scratch"]))
        train.report({"step": step}, checkpoint=checkpoint, checkpoint_dir_name=name)


def in_place(config: dict[str, Any]) -> None:
    """Writes its files where they are to stay."""
    storage = Path(train.get_context().get_storage())
    for step, name in enumerate(config["names"], start=1):
        folder = (storage / name).resolve() if not name.startswith("/") else Path(name)
        folder.mkdir(exist_ok=True)
        (folder / f"rank_{train.get_context().get_world_rank()}").write_text(str(step))
        train.report({"step": step}, checkpoint=train.Checkpoint(folder), checkpoint_upload_mode=NO_UPLOAD)


def with_own_upload(config: dict[str, Any]) -> None:
    storage = Path(train.get_context().get_storage())

    def upload(checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
        return train.Checkpoint(shutil.copytree(checkpoint.path, storage / name, dirs_exist_ok=True))

    for step in (1, 2):
        checkpoint = train.Checkpoint.from_directory(folder_with(step, config["scratch"]))
        train.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_fn=upload)


def at_odds(config: dict[str, Any]) -> None:
    """Rank 1 brings its files in another manner than rank 0."""
    mode = ASYNC if train.get_context().get_world_rank() else train.CheckpointUploadMode.SYNC
    train.report(
        {}, checkpoint=train.Checkpoint.from_directory(folder_with(1, config["scratch"])), checkpoint_upload_mode=mode
    )
    train.report({})


def step_by_step(config: dict[str, Any]) -> list[bool]:
    """Rank 0 notes after each of its reports whether rank 1 had come to that report."""
    rank, seen = train.get_context().get_world_rank(), []
    for step in range(1, 21):
        mark = Path(config["folder"], f"step_{step}")
        if rank == 1:
            mark.touch()
        train.report({"step": step})
        if rank == 0:
            seen.append(mark.exists())
    return seen


def uneven(config: dict[str, Any]) -> None:
    for _ in range(config["reports"][train.get_context().get_world_rank()]):
        train.report({})


def look_back(config: dict[str, Any]) -> list[Any]:
    """What is kept, as each attempt sees it after its reports."""
    for step in range(resumed() + 1, config["steps"] + 1):
        checkpoint = train.Checkpoint.from_directory(folder_with(step, config["scratch"]))
        train.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=ASYNC)
        if step == 2 and train.get_context().get_attempt() == 1:
            train.get_all_reported_checkpoints()
            raise RuntimeError("once")
    found = []
    for kept in train.get_all_reported_checkpoints(timeout_s=30):
        with kept.checkpoint.as_directory() as folder:
            found.append((kept.metrics["step"], int(Path(folder, "rank_0").read_text()), kept.status.name))
    return found
