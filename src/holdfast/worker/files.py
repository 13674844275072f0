"""What a worker says about the files that it brings: names and sizes, before a byte moves.

This module must never read a file's content: a rank waits while it runs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.wire.messages import FileEntry

RESERVED = ".manifest.json"
"""Our own name at the top of a checkpoint. A directory that was copied from one holds it: it is not the user's file."""


def scan(directory: Path) -> tuple[FileEntry, ...]:
    """Every file below ``directory``, by relative name, sorted; links to files count as files.

    The manifest of an older checkpoint, which a copied directory holds, is left out: it would say that the new one is
    complete before it is.

    ConfigurationError when it is no directory, or holds something that cannot be kept: a pipe, a socket, a link to
    nowhere, a name that is not text.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigurationError(f"the checkpoint directory {str(directory)!r} {what}; give a directory of files")
    return tuple(sorted(_below(str(directory), ""), key=lambda entry: entry.name))


def _below(folder: str, start: str) -> Iterator[FileEntry]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = start + entry.name
            if name == RESERVED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, name + "/")
                continue
            yield FileEntry(_text(name, folder), _size(entry))


def _size(entry: os.DirEntry[str]) -> int:
    try:
        found = entry.stat()
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep {entry.path!r} in a checkpoint: {error.strerror}"
            + ("; it is a link to nowhere" if entry.is_symlink() else "")
        ) from error
    if stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"cannot keep {entry.path!r} in a checkpoint: it is a link to a directory; copy it")
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"cannot keep {entry.path!r} in a checkpoint: it is neither a file nor a directory")
    return found.st_size


def _text(name: str, folder: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"cannot keep {name!r} in {folder!r} in a checkpoint: its name is not UTF-8") from None
    return name
