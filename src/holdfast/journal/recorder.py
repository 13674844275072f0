"""Facts on their way to the log: appended at once, made durable in groups, and told when they are.

The recorder belongs to one event loop. It decides nothing; it must never tell a position as durable before the log did.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from holdfast.errors import FencedError, JournalError
from holdfast.journal.facts import Fact, encode
from holdfast.journal.log import Log, Snapshot

GROUP_S = 0.1
"""How long metrics may wait for company before they are flushed."""


class Blocking(Protocol):
    """Runs a blocking call somewhere that is not the event loop."""

    def __call__(self, call: Callable[..., Any], /, *arguments: Any) -> Awaitable[Any]: ...


class Recorder:
    """The event loop's end of a log."""

    def __init__(
        self,
        log: Log,
        run: Blocking,
        *,
        on_durable: Callable[[], None],
        on_error: Callable[[BaseException], None],
        lease_s: float,
        group_s: float = GROUP_S,
    ) -> None:
        self.log = log
        self._run = run
        self._on_durable = on_durable
        self._on_error = on_error
        self._lease_s = lease_s
        self._group_s = group_s
        self._turn = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._renewing = asyncio.get_running_loop().create_task(self._renew())
        self._broken = False
        self._wanted = 0
        self._appended = self._settled = 0
        self._marks: deque[tuple[int, int]] = deque()
        """Positions that are not durable yet, each with how many bytes were appended up to it."""

    @property
    def durable(self) -> int:
        return self.log.durable

    @property
    def backlog(self) -> int:
        """How many bytes were appended and are not durable yet."""
        durable = self.log.durable
        while self._marks and self._marks[0][0] <= durable:
            self._settled = self._marks.popleft()[1]
        return self._appended - self._settled

    def append(self, fact: Fact, *, urgent: bool) -> int:
        """Append a fact. Urgent ones are flushed now, others within ``group_s``."""
        record = encode(fact)
        position = self.log.append(record)
        self._appended += len(record)
        self._marks.append((position, self._appended))
        if urgent:
            self.flush_soon()
        else:
            self._flush_later()
        return position

    def flush_soon(self) -> None:
        """Have everything that was appended so far made durable."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wanted = self.log.position
        if self._flushing is None and not self._broken:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def confirm(self) -> None:
        """FencedError when the run is no longer ours."""
        await self._in_turn(self.log.confirm)

    async def snapshot(self, state: bytes, position: int) -> None:
        """Keep the state that the records up to ``position`` lead to, after they are durable themselves."""
        if self.log.durable < position:
            await self._in_turn(self.log.sync)
        await self._in_turn(self.log.snapshot, Snapshot(position, state))

    async def close(self) -> None:
        """Flush what is left, unless the log has failed, and let go of the run."""
        self._renewing.cancel()
        if self._timer is not None:
            self._timer.cancel()
        while self._flushing is not None:
            await self._flushing
        try:
            if not self._broken and self.log.position > self.log.durable:
                await self._in_turn(self.log.sync)
        finally:
            await self._in_turn(self.log.close)

    def abandon(self) -> None:
        """Stop touching the log; for a driver that was fenced or crashed."""
        self._broken = True
        self._renewing.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _flush_later(self) -> None:
        if self._timer is None and self._flushing is None and not self._broken:
            self._timer = asyncio.get_running_loop().call_later(self._group_s, self.flush_soon)

    async def _flush(self) -> None:
        try:
            while not self._broken:
                if self.log.durable < self._wanted:
                    await self._in_turn(self.log.sync)
                self._on_durable()  # a snapshot may have made it durable already, and told nobody
                if self.log.durable >= self._wanted:
                    break
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._flushing = None
        if self.log.position > self.log.durable:
            self._flush_later()

    async def _renew(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._lease_s / 3)
                await self._renew_once()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    async def _renew_once(self) -> None:
        """A store that refuses now may recover before the lease is over; a log that has failed says so at its next
        sync.
        """
        try:
            await self._in_turn(self.log.renew)
        except FencedError:
            raise
        except JournalError:
            return

    def _fail(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = True
            self._on_error(error)

    async def _in_turn(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """One call at a time. Shielded: whoever waits may be cancelled, the call in its thread goes on until it
        ends.
        """
        turn = asyncio.get_running_loop().create_task(self._take_turn(call, *arguments))
        turn.add_done_callback(_heard)
        return await asyncio.shield(turn)

    async def _take_turn(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async with self._turn:
            return await self._run(call, *arguments)


def _heard(turn: asyncio.Task[Any]) -> None:
    """Its error is not lost on whoever waits; where nobody does any more, there is nobody to tell."""
    if not turn.cancelled():
        turn.exception()
