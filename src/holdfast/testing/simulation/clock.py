"""A deterministic asyncio loop: time is a number that jumps to the next timer, and callbacks belong to processes.

A callback of a process that was stopped waits until it goes on; one of a process that was killed never runs again, so
that not even its ``finally`` blocks have an effect. The loop must never read a real clock, touch a socket or start a
thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

RUNNING, FROZEN, DEAD = "running", "frozen", "dead"


class Stuck(Exception):
    """Nothing is left that could ever happen, or time has run out."""


class Process:
    """Who a callback belongs to: a driver, an agent or a worker."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self.name = name
        self.epoch = epoch
        self.state = RUNNING
        self.context = contextvars.copy_context()
        self.context.run(_owner.set, self)
        self.stash: list[asyncio.Handle] = []
        self.late_calls = 0
        """How many more calls to a store, already on their way, arrive after its death."""

    def __repr__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:
        return self.state is not DEAD


_owner: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's docstring."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self.broken: BaseException | None = None
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._heard_exception)

    def time(self) -> float:
        return self.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a part of a process."""
        return process.context.run(self.create_task, work)

    def kill(self, process: Process) -> None:
        """Nothing of this process runs any more."""
        process.state = DEAD
        process.stash.clear()

    def freeze(self, process: Process) -> None:
        if process.alive:
            process.state = FROZEN

    def thaw(self, process: Process) -> None:
        if process.state is FROZEN:
            process.state = RUNNING
            self._ready.extend(process.stash)
            process.stash.clear()

    def stop_with(self, error: BaseException) -> None:
        """End the run of this loop with this error, after the running callback."""
        if self.broken is None:
            self.broken = error

    def forget(self) -> list[BaseException]:
        """Take down what is left; the errors of tasks that nobody has asked for."""
        errors: list[BaseException] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what a task was about to start was never awaited
            asyncio._set_running_loop(self)  # what runs in ``finally`` blocks must not make a loop of its own
            try:
                while self._tasks:
                    self._take_down_task(*self._tasks.pop(), errors)
            finally:
                asyncio._set_running_loop(None)
        self._timers.clear()
        self._ready.clear()
        self.close()
        return errors

    def _take_down_task(self, task: asyncio.Task[Any], process: Process | None, errors: list[BaseException]) -> None:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _take_down(task.get_coro())
        elif getattr(task, "_log_traceback", False):
            error = task.exception()
            if error is not None and (process is None or process.alive):
                errors.append(error)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        self._tasks.append((task, _owner.get()))
        return task

    def _heard_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or Stuck(str(context.get("message")))
        self.stop_with(error)

    def _run_once(self) -> None:
        if self.broken is not None:
            raise self.broken
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Stuck("deadlock: nothing is left that could ever happen")
            self.now = max(self.now, timers[0][0])
            if self.now > self._limit_s:
                raise Stuck(f"still not over after {self._limit_s:g} s of simulated time")
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_owner)  # type: ignore[attr-defined]
            if process is not None and process.state is not RUNNING:
                if process.state is FROZEN:
                    process.stash.append(handle)
                continue
            self.callbacks += 1
            handle._run()
            if self.broken is not None:
                raise self.broken

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _take_down(coroutine: Any) -> None:
    """End a coroutine, though it may want to wait for something in each of its ``finally`` blocks."""
    for _ in range(20):
        try:
            coroutine.throw(asyncio.CancelledError())
        except BaseException:
            return
