"""When to take a snapshot: rarely enough that at most a given share of the driver's time goes there.

Pure: whoever asks brings the clock.
"""

from __future__ import annotations


class SnapshotPacer:
    """Says when a snapshot is due, from how long the last one took and how much is new since."""

    def __init__(self, share: float = 0.05, minimum: int = 1000) -> None:
        self._share = share
        self._minimum = minimum
        self._not_before = 0.0
        self._position = 0

    def due(self, now: float, position: int) -> bool:
        """Whether to take one now, with ``position`` the last record that it would hold."""
        return position - self._position >= self._minimum and now >= self._not_before

    def took(self, now: float, seconds: float, position: int) -> None:
        """One was finished ``now``, after ``seconds``, up to ``position``. The one that a run starts from counts."""
        self._position = position
        self._not_before = now + seconds * (1 / self._share - 1)
