"""What an agent needs of an operating system to run workers: a port. It must never know how they come to be.

``forked.py`` is the real thing on this machine; the simulator brings another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import msgspec

from holdfast.wire.messages import Environment, FromWorker

WorkerKey = tuple[str, int, int]
"""Group, attempt, rank."""


class WorkerExit(msgspec.Struct, frozen=True):
    """How a worker ended. ``status`` is its exit code, or minus the signal.

    ``ours``: killed by ``kill`` and not by itself before. ``oom``: the kernel's out-of-memory killer was at work.
    ``lost``: its zygote died with it.
    """

    status: int
    ours: bool = False
    oom: bool = False
    lost: bool = False


class Listener(Protocol):
    """Who hears of the workers; called on the event loop."""

    def worker_message(self, key: WorkerKey, message: FromWorker) -> None: ...

    def worker_rows(self, key: WorkerKey, rows: list[bytes]) -> None: ...

    def worker_exited(self, key: WorkerKey, exit: WorkerExit) -> None: ...  # noqa: A002


class Processes(ABC):
    """Starts workers, carries bytes to and messages from them, and tells of their end.

    Every started worker ends in exactly one ``worker_exited``, after its last message, when nothing is left of what it
    had started. A key may be used again after that. Nothing is told after ``close``.
    """

    @abstractmethod
    def listen(self, listener: Listener) -> None:
        """Called once, on the running event loop, before anything else."""

    @abstractmethod
    async def prepare(self, environment: Environment) -> str:
        """Be ready to start workers in this environment at once. Returns a notice for people, or nothing."""

    @abstractmethod
    def start(
        self, key: WorkerKey, environment: Environment, log: str, variables: Mapping[str, str], first: bytes
    ) -> None:
        """Start a worker and send it ``first``. Never raises: a worker that cannot start has exited."""

    @abstractmethod
    def send(self, key: WorkerKey, data: bytes) -> None:
        """Send framed bytes; dropped when the worker is gone."""

    @abstractmethod
    def kill(self, key: WorkerKey) -> None: ...

    @abstractmethod
    def signal(self, key: WorkerKey, number: int) -> None:
        """Send a signal to a worker that is past its birth; nothing happens when it is gone."""

    @abstractmethod
    def pause(self, key: WorkerKey) -> None:
        """Read nothing more from this worker until ``resume``, so that it has to wait. What it said before its death is
        read in any case."""

    @abstractmethod
    def resume(self, key: WorkerKey) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """End every worker and zygote."""
