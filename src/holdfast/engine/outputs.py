"""Follows a worker's log file, for the console. The file itself is written by the worker, so nothing printed is
lost.
"""

from __future__ import annotations

from pathlib import Path

LIMIT = 1 << 16
"""How much of what was printed since the last look is passed on; the file has the rest."""


class LogTail:
    """Gives whole lines as they are written, and the unfinished one at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def read(self, *, last: bool) -> str:
        """What was printed since the last call; with ``last``, an unfinished line too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = self._rest + file.read(LIMIT)
                self._position = file.tell()
        except FileNotFoundError:
            return ""
        if last:
            self._rest = b""
            return data.decode(errors="replace")
        whole, newline, self._rest = data.rpartition(b"\n")
        return (whole + newline).decode(errors="replace")
