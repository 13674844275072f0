"""The only loop: events in, decisions made, facts remembered, commands let go when what they expose is durable.

``Controller`` holds no decision and no protocol of its own. It must never let a command go before the facts that were
decided with it, and all facts before those, are durable; commands leave in the order in which they were decided.
Where the journal cannot keep up, it has the hands hold back whoever sends events, and never more than that in memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.control import vocabulary as v
from holdfast.errors import FencedError, JournalError
from holdfast.journal.facts import Fact, RowsReported
from holdfast.journal.log import Log
from holdfast.journal.pacer import SnapshotPacer
from holdfast.journal.recorder import Blocking, Recorder

BACKLOG = 64 << 20
"""So many bytes of facts may wait for the journal; then nothing more is heard until half of them are durable."""


class Machine(Protocol):
    """``decide`` holds every decision, ``apply`` every change of state."""

    def decide(self, state: Any, event: v.Event) -> v.Decision: ...

    def apply(self, state: Any, change: object) -> None: ...


class Hands(Protocol):
    """Carries commands out; ``control.dispatch`` has the real ones."""

    def carry_out(self, command: v.Command) -> None: ...

    def hold_back(self, held: bool) -> None:
        """Hear nothing more of what could become an event, or hear it again."""


Observer = Callable[[object], None]


class Controller:
    """One run's loop. ``post`` may be called from the event loop's thread alone."""

    def __init__(
        self,
        machine: Machine,
        state: Any,
        log: Log,
        run: Blocking,
        now: Callable[[], float],
        *,
        observers: Sequence[Observer] = (),
        lease_s: float = 15.0,
    ) -> None:
        self.machine = machine
        self.state = state
        self.now = now
        self.recorder = Recorder(log, run, on_durable=self._release, on_error=self.fail, lease_s=lease_s)
        self.hands: Hands | None = None
        self._observers = tuple(observers)
        self._inbox: deque[v.Event] = deque()
        self._outbox: deque[tuple[int, v.Command]] = deque()
        self._busy = False
        self._held = False
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pacer = SnapshotPacer()
        self._pacer.took(asyncio.get_running_loop().time(), 0.0, log.position)
        self._snapshotting: asyncio.Task[None] | None = None

    def remember(self, fact: Fact) -> None:
        """Apply and journal a fact that was decided before the loop began: that a driver opened the run."""
        self._change(fact)
        self.recorder.flush_soon()

    def post(self, event: v.Event) -> None:
        """Take in an event and everything that follows from it."""
        self._inbox.append(event)
        if self._busy or self._done.done():
            return
        self._busy = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        except BaseException as error:
            self.fail(error)
        finally:
            self._busy = False
        self._release()

    def settle(self) -> None:
        """Begin: what follows from the state as it was recovered?"""
        self.post(v.Settle(at=self.now()))

    def finish(self) -> None:
        """The run is over."""
        if not self._done.done():
            self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nothing more can be decided: the journal, or this code, has failed."""
        self.recorder.abandon()
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Return when the run has finished; raise what made it impossible to go on."""
        await self._done

    async def close(self) -> None:
        if self._snapshotting is not None:
            self._snapshotting.cancel()
            await asyncio.gather(self._snapshotting, return_exceptions=True)
        await self.recorder.close()

    def _step(self, event: v.Event) -> None:
        decision = self.machine.decide(self.state, event)
        while True:
            position = 0
            for change in decision.changes:
                position = max(position, self._change(change))
            for command in decision.commands:
                self._outbox.append((self._due(command, position), command))
            if self._outbox and self._outbox[-1][0] > self.recorder.durable:
                self.recorder.flush_soon()
            decision = self.machine.decide(self.state, v.Settle(at=event.at))
            if not decision:
                return

    def _due(self, command: v.Command, position: int) -> int:
        """The position that must be durable before this command leaves; for a deletion, everything known so far."""
        return self.recorder.log.position if isinstance(command, v.DeleteCheckpoints) else position

    def _change(self, change: object) -> int:
        """Apply one change; the position that must be durable before anybody may see its consequences."""
        self.machine.apply(self.state, change)
        position = 0
        if isinstance(change, RowsReported):
            self.recorder.append(change, urgent=False)
        elif isinstance(change, Fact):
            position = self.recorder.append(change, urgent=False)
        for observer in self._observers:
            observer(change)
        return position

    def _release(self) -> None:
        """Carry out every command whose facts are durable, in order."""
        if self.hands is None or self._busy:
            return
        while self._outbox and self._outbox[0][0] <= self.recorder.durable and not self._done.done():
            self.hands.carry_out(self._outbox.popleft()[1])
        held = self.recorder.backlog > (BACKLOG // 2 if self._held else BACKLOG)
        if held != self._held:
            self._held = held
            self.hands.hold_back(held)
        if not self._done.done():
            self._snapshot_when_due()

    def _snapshot_when_due(self) -> None:
        now = asyncio.get_running_loop().time()
        position = self.recorder.log.position
        if self._snapshotting is None and self._pacer.due(now, position):
            began = now
            state = msgspec.json.encode(self.state)
            self._snapshotting = asyncio.get_running_loop().create_task(self._snapshot(state, position, began))

    async def _snapshot(self, state: bytes, position: int, began: float) -> None:
        try:
            await self.recorder.snapshot(state, position)
        except asyncio.CancelledError:
            raise
        except FencedError as error:
            self.fail(error)
        except JournalError:
            pass  # it saves time, never truth; a log that has failed for good says so at its next sync
        except BaseException as error:
            self.fail(error)
        finally:
            now = asyncio.get_running_loop().time()
            self._pacer.took(now, now - began, position)
            self._snapshotting = None
