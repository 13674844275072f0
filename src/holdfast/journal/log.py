"""The contract of a journal: numbered records, one writer, and a way back to them after any crash.

A record is one JSON object as bytes, without a newline. Records have positions 1, 2, 3 … over the whole life of a run,
across drivers. ``append`` only buffers; ``sync`` makes everything appended so far durable, *then* checks that no newer
driver has taken over, and only then tells the new durable position. So a driver that lost its epoch learns it before it
acts on anything that its successor has not folded.

``append`` and ``position`` belong to the event loop's thread; ``sync``, ``snapshot``, ``confirm`` and ``renew`` block
and are called from a worker thread, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import msgspec


class Holder(msgspec.Struct, frozen=True):
    """Who drives a run: the content of its epoch record."""

    host: str
    boot_id: str
    pid: int
    pid_namespace: str
    start_time: str
    """The kernel's start time of the process, so that a reused pid is not mistaken for it."""
    started_at: float
    lease_s: float
    token: str = ""
    """Drawn anew for each opening, so that a driver knows its own claim."""


class Snapshot(msgspec.Struct, frozen=True):
    """A folded state as JSON, and the last position that went into it."""

    position: int
    state: bytes


class Log(ABC):
    """One driver's end of a run's journal. Opened by ``open_log``; see the module's docstring."""

    epoch: int
    position: int
    """The position of the last appended record."""
    durable: int
    """The position up to which everything is durable and was confirmed as ours."""
    protection: Literal["fence", "lease"] = "fence"
    """What keeps two drivers apart: "lease" where the store ignores create-if-absent, which the user must be told."""

    @abstractmethod
    def append(self, record: bytes) -> int:
        """Buffer one record; its position."""

    @abstractmethod
    def sync(self) -> int:
        """Make durable what was appended before this call, confirm the epoch, and return the new durable position.

        FencedError when another driver has taken over; JournalError when it cannot be written, after which every
        further call fails the same way.
        """

    @abstractmethod
    def confirm(self) -> None:
        """FencedError when another driver has taken over. Called before anything is deleted."""

    @abstractmethod
    def renew(self) -> None:
        """Renew the lease. Called every third of it."""

    @abstractmethod
    def snapshot(self, snapshot: Snapshot) -> None:
        """Keep a durable state. The newest two are kept; a damaged one falls back to the one before, or to none.

        Only a position that ``sync`` has returned may be kept, so that even a snapshot which a fenced driver writes
        late holds nothing but what every later driver has folded too. JournalError when it cannot be written; the
        journal goes on without it.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the run, so that the next driver need not wait. What was not synced is lost."""


class Replay(msgspec.Struct, frozen=True):
    """What a journal holds: the newest sound snapshot, and the records after it, lazily and in order."""

    snapshot: Snapshot | None
    records: Iterator[bytes]
