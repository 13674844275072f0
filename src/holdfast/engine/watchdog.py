"""Which workers of a node make no progress, and where they stand. It tells; what follows is the controller's to decide.

Progress is a report or a heartbeat. Time that a worker spends inside calls of ours (waiting for a commit, for slower
ranks, for a checkpoint to load) is not its own and never counts; nor does time before its function began, or during
which this agent itself stood still.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from holdfast.engine.processes import Processes, WorkerKey
from holdfast.wire import messages as m
from holdfast.worker.process import STACKS_SIGNAL

LOOKS = 10
"""How many times within its limit a worker is looked at."""
SHORTEST_PAUSE_S = 0.02
STACKS_S = 0.5
"""How long a worker has to write its stacks."""
STACKS_LIMIT = 16_000
_ADDRESS = re.compile(r"hread 0x[0-9a-f]+")
_OURS = re.compile(
    r'^  File "(.*/holdfast/(engine/|worker/(entry|process)\.py).*|<string>", line 1 in <module>)\n', re.MULTILINE
)
_FIRST = re.compile(r"^(Thread|Current thread) 0x", re.MULTILINE)


class _Watched:
    """When a worker was last known to make progress, and where its log lies."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.since: float | None = None
        self.inside = False
        self.held = False
        self.told = False
        self.dumping = False


class Watchdog:
    """See the module's docstring. ``run`` runs blocking calls, ``spawn`` keeps a task of the agent's."""

    def __init__(
        self,
        send: Callable[[m.Message], None],
        processes: Processes,
        run: Callable[..., Any],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._send = send
        self._processes = processes
        self._run = run
        self._spawn = spawn
        self._workers: dict[WorkerKey, _Watched] = {}
        self._limits: dict[tuple[str, int], float] = {}

    def add(self, key: WorkerKey, log: Path) -> None:
        self._workers[key] = _Watched(log)

    def remove(self, key: WorkerKey) -> None:
        self._workers.pop(key, None)

    def begin(self, key: WorkerKey) -> None:
        """The worker's function is about to run."""
        self._workers[key].since = asyncio.get_running_loop().time()

    def progress(self, key: WorkerKey) -> None:
        watched = self._workers.get(key)
        if watched is not None and watched.since is not None:
            watched.since = asyncio.get_running_loop().time()
            watched.told = watched.dumping = False

    def enter(self, key: WorkerKey, inside: bool) -> None:
        """The worker has gone into one of our calls, or come back from it."""
        self._workers[key].inside = inside
        self.progress(key)

    def hold(self, key: WorkerKey, held: bool) -> None:
        """The worker may have to wait until this agent reads again, or no more."""
        watched = self._workers.get(key)
        if watched is not None:
            watched.held = held
            self.progress(key)

    def end(self, key: WorkerKey) -> None:
        """The worker's function has come to its end."""
        self._workers[key].since = None

    def limit(self, message: m.Watch) -> None:
        """Tell of every worker of this attempt that makes no progress for longer than that."""
        gang = (message.group, message.attempt)
        watching = gang in self._limits
        self._limits[gang] = message.seconds
        if not watching:
            self._spawn(self._watch(gang))

    def dump(self, message: m.DumpStacks) -> None:
        """Have every worker of this attempt write its stacks to its log, and tell them."""
        for key in self._gang((message.group, message.attempt)):
            self._spawn(self._dump(key, self._workers[key]))

    def is_dumping(self, key: WorkerKey) -> bool:
        """Whether what is written to the worker's log now is not the worker's own."""
        watched = self._workers.get(key)
        return watched is not None and watched.dumping

    async def _watch(self, gang: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        while keys := self._gang(gang):
            limit = self._limits[gang]
            pause = max(limit / LOOKS, SHORTEST_PAUSE_S)
            before = loop.time()
            await asyncio.sleep(pause)
            now = loop.time()
            if now - before > pause + limit / 2:  # this agent, and perhaps its workers, did not run at all
                for key in keys:
                    self.progress(key)
            for key in self._gang(gang):
                self._look(key, self._workers[key], now, limit)
        del self._limits[gang]

    def _look(self, key: WorkerKey, watched: _Watched, now: float, limit: float) -> None:
        if watched.since is None or watched.inside or watched.held or watched.told or now - watched.since < limit:
            return
        watched.told = True
        self._send(m.Quiet(*key, now - watched.since))

    async def _dump(self, key: WorkerKey, watched: _Watched) -> None:
        if watched.since is None:
            self._send(m.Stacks(*key, ""))
            return
        before = await self._run(_size, watched.log)
        watched.dumping = True
        self._processes.signal(key, STACKS_SIGNAL)
        await asyncio.sleep(STACKS_S)
        self._send(m.Stacks(*key, _stacks(await self._run(_appended, watched.log, before))))

    def _gang(self, gang: tuple[str, int]) -> list[WorkerKey]:
        return [key for key in self._workers if key[:2] == gang]


def _size(log: Path) -> int:
    try:
        return os.stat(log).st_size
    except OSError:
        return 0


def _appended(log: Path, position: int) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(position)
            return file.read(4 * STACKS_LIMIT).decode(errors="replace")
    except OSError:
        return ""


def _stacks(text: str) -> str:
    """The stacks among what was written, without the frames that start every worker and what tells equal ones apart."""
    first = _FIRST.search(text)
    return _ADDRESS.sub("hread", _OURS.sub("", text[first.start() :]))[:STACKS_LIMIT] if first else ""
