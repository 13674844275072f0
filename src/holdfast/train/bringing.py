"""In which manner a report's files come to storage, checked before anything is said to anybody."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.wire import messages as m

_OURS = frozenset({"journal", "epochs", "logs", "requests"})


def manner(mode: str, name: str | None, delete: bool | None) -> m.Manner:
    """What ``report``'s options ask for."""
    if mode not in (m.SYNC, m.ASYNC, m.NO_UPLOAD):
        raise ConfigurationError(
            "report(checkpoint_upload_mode=…): pass a CheckpointUploadMode: SYNC, ASYNC or NO_UPLOAD"
        )
    if name is not None:
        _check_name(name)
    if delete is None:
        delete = mode == m.ASYNC
    if mode == m.NO_UPLOAD and delete:
        raise ConfigurationError("with NO_UPLOAD the files are the checkpoint: they cannot be deleted after the upload")
    return m.Manner(mode, name or "", bool(delete))


def place(path: Path, storage: str) -> str:
    """Where a directory lies below the run's own."""
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(storage))
    first = below.partition("/")[0]
    if first in ("..", ".") or first in _OURS or first.startswith("."):
        raise ConfigurationError(
            f"the files must lie in a folder of the run's own directory {storage}, and {str(path)!r} is not one; "
            "write them below get_context().get_storage()"
        )
    return below


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith(".") or name in _OURS:
        raise ConfigurationError(
            f"report(checkpoint_dir_name={name!r}): give the name of one folder, without a slash, not starting with a "
            f"dot, and none of {', '.join(sorted(_OURS))}"
        )
