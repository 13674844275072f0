"""Follows a worker's log file, for the console. The file itself is written by the worker, so nothing printed is
lost.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LIMIT = 1 << 16
"""How much of what was printed since the last look is passed on; the file has the rest."""
LONGEST_LINE = 1 << 14
"""An unfinished line that is longer is passed on in pieces."""

_RETURN = re.compile(rb"(?:^|(?<=[\r\n]))\r(?!\n)")
"""A carriage return that ends an empty line: many bars begin with one."""


class LogTail:
    """Gives lines as they are written, and the unfinished one at the end. A carriage return ends a line too, so that
    a progress bar is seen to move.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def read(self, *, last: bool) -> str:
        """What was printed since the last call; with ``last``, an unfinished line too."""
        try:
            with self._path.open("rb") as file:
                skipped = os.fstat(file.fileno()).st_size - LIMIT - self._position
                if skipped > 0:
                    self._position += skipped
                file.seek(self._position)
                data = file.read(LIMIT)
                self._position += len(data)
        except FileNotFoundError:
            return ""
        note = b""
        if skipped > 0:
            note, self._rest = b"%s\n\xe2\x80\xa6 %d bytes skipped\n" % (self._rest, skipped), b""
        data, self._rest = self._rest + data, b""
        if not last:
            end = _end_of_lines(data)
            if len(data) - end <= LONGEST_LINE:
                data, self._rest = data[:end], data[end:]
        return (note.removeprefix(b"\n") + _RETURN.sub(b"", data)).decode(errors="replace")


def _end_of_lines(data: bytes) -> int:
    """Where the last whole line ends. A carriage return at the very end may belong to a newline that follows."""
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
