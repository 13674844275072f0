"""The user's callbacks, called with what the facts of a run add up to.

``observe`` belongs to the event loop and only puts changes into a queue. One thread takes them out, lines up the ranks'
calls and calls the callbacks, so that a slow one holds up nobody. It must never fail a run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.observe.console import say
from holdfast.train.callbacks import TrainRunContext, UserCallback
from holdfast.train.checkpoint import Checkpoint
from holdfast.wire.metrics import decode_metrics

BEHIND = 10_000
"""How many reports of each rank may wait for the callbacks before some are left out."""
PATIENCE_S = 5.0
"""The console says after this long what the end of a run is waiting for."""

_HEARD = (
    f.AttemptStarted,
    f.RowsReported,
    f.CheckpointCommitted,
    f.AttemptEnded,
    v.CommitDeclared,
    v.CommitDropped,
)
Failures = Mapping[int, Callable[[], BaseException]]
ErrorOf = Callable[[int, f.RankFailure], Callable[[], BaseException]]
"""Keeps what is known now of a rank's failure in an attempt, and gives the way to its exception."""


class Audience:
    """The callbacks of one run: an observer of its facts, and a context that is left when all of them were told."""

    def __init__(
        self,
        callbacks: Sequence[UserCallback],
        context: TrainRunContext,
        directory: str,
        error_of: ErrorOf,
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._context = context
        self._directory = directory.rstrip("/")
        self._error_of = error_of
        self._queue: queue.SimpleQueue[tuple[object, Failures]] = queue.SimpleQueue()
        self._calls = Calls()
        self._reported: set[int] = set()
        self._ranks = 1
        self._put = self._taken = 0  # rows; each is changed by one thread alone
        self._missed: collections.Counter[int] = collections.Counter()  # rows of each rank
        self._abandoned = False
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._serve, name="holdfast-callbacks", daemon=True)

    def observe(self, change: object) -> None:
        """Take in a change of the run's state. Never waits."""
        if not self._callbacks or not isinstance(change, _HEARD):
            return
        failures: Failures = {}
        if isinstance(change, f.RowsReported):
            if self._put - self._taken >= BEHIND * self._ranks:
                self._miss(change)
                return
            self._put += change.count
        elif isinstance(change, f.AttemptStarted):
            self._ranks = change.world_size
        elif isinstance(change, f.AttemptEnded):
            failures = {failure.rank: self._error_of(change.attempt, failure) for failure in change.failures}
        self._queue.put((change, failures))

    async def __aenter__(self) -> Audience:
        if self._callbacks:
            self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything was told; not when the run is to end at once."""
        if not self._callbacks:
            return
        self._abandoned = kind is not None and issubclass(kind, asyncio.CancelledError)
        self._queue.put((None, {}))
        if self._abandoned:
            return
        try:
            await self._drained()
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        self._thread.join()
        if self._missed:
            say(f"{max(self._missed.values())} reports were not passed to the callbacks, which were too slow for them")

    async def _drained(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._done), PATIENCE_S)
            return
        left = (self._put - self._taken) // self._ranks
        say(f"waiting for the callbacks, about {left} reports behind; press Ctrl-C twice to end at once")
        await self._done

    def _miss(self, rows: f.RowsReported) -> None:
        if not self._missed:
            say("the callbacks are too slow for the reports; some reports are not passed to them")
        self._missed[rows.rank] += rows.count

    def _serve(self) -> None:
        """In the thread: tell what comes, until the end."""
        try:
            while True:
                change, failures = self._queue.get()
                if change is None:
                    return
                for metrics, directory in self._calls.take(change):
                    checkpoint = Checkpoint(f"{self._directory}/{directory}") if directory else None
                    self._tell("after_report", metrics=metrics, checkpoint=checkpoint)
                if isinstance(change, f.RowsReported):
                    self._taken += change.count
                if failures:
                    errors = {rank: error() for rank, error in failures.items()}
                    self._tell("after_exception", worker_exceptions=errors)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _tell(self, name: str, **what: Any) -> None:
        for number, callback in enumerate(self._callbacks):
            if self._abandoned:
                return
            try:
                getattr(callback, name)(run_context=self._context, **what)
            except BaseException as error:
                if number not in self._reported:
                    self._reported.add(number)
                    text = "".join(traceback.format_exception(error)).rstrip()
                    who = f"{type(callback).__qualname__}.{name}"
                    say(f"the callback {who} raised; the run goes on, and this is said once:\n{text}")


class Calls:
    """Lines up the calls of an attempt's ranks. A call is complete when every rank's row of it is there and, where it
    brings a checkpoint, that was committed or given up.
    """

    def __init__(self) -> None:
        self._rows: list[collections.deque[tuple[int, dict[str, Any]]]] = []
        self._bringing: set[int] = set()
        self._committed: dict[int, str] = {}

    def take(self, change: object) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """The calls that this change completes: the ranks' metrics, and the directory that was committed, if any."""
        if isinstance(change, f.AttemptStarted):
            self._rows = [collections.deque() for _ in range(change.world_size)]
            self._bringing, self._committed = set(), {}
        elif isinstance(change, f.RowsReported):
            self._rows[change.rank].extend(enumerate(decode_metrics(change.rows), change.first))
        elif isinstance(change, v.CommitDeclared):
            self._bringing.add(change.call)
        elif isinstance(change, v.CommitDropped):
            self._bringing.discard(change.call)
        elif isinstance(change, f.CheckpointCommitted):
            self._bringing.discard(change.call)
            self._committed[change.call] = change.directory
        elif isinstance(change, f.AttemptEnded):
            self._bringing.clear()
        yield from self._complete()

    def _complete(self) -> Iterator[tuple[list[dict[str, Any]], str]]:
        while self._rows and all(self._rows):
            call = max(rows[0][0] for rows in self._rows)
            if call in self._bringing:
                return
            for rows in self._rows:  # where a rank's rows were left out, nobody's can be complete
                while rows and rows[0][0] < call:
                    rows.popleft()
            if all(rows and rows[0][0] == call for rows in self._rows):
                yield [rows.popleft()[1] for rows in self._rows], self._committed.pop(call, "")
