"""The worker's side of the wire: blocking calls made by the user's function, answered by the agent.

There is no thread here: a worker's process may be forked by data loaders at any time, so the session reads its socket
only inside its own calls. A metrics-only report has left the process when it returns.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast import faultpoints
from holdfast.errors import CollectiveError, DamagedError, MissingError, NotInWorkerError, ReportError
from holdfast.wire import messages as m
from holdfast.wire.frames import FrameReader, frame, row_frame
from holdfast.worker.files import scan

CHUNK = 1 << 16
HEARTBEAT_S = 0.2
"""A heartbeat that follows the last one sooner is not sent."""
BACKLOG = 2
"""So many checkpoints of a rank may be under way in the background."""

_SYNC = m.Manner()


class Session:
    """One attempt of one rank."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._frames: FrameReader[m.ToWorker] = FrameReader(m.ToWorker)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._begin: m.Begin | None = None
        self._newest: m.CheckpointRef | None = None
        self._calls = 0
        self._floor = 0
        self._unsettled: set[int] = set()
        """Calls that brought files and were neither committed nor refused yet."""
        self._refusal = ""
        self._fetched: m.Fetched | None = None
        self._lists = 0
        self._listed: m.CheckpointList | None = None
        self._meetings = 0
        self._gathered: m.Gathered | None = None
        self._preempt: m.Preempt | None = None
        self._next_heartbeat = 0.0

    def await_begin(self) -> m.Begin:
        """The first message: what to run, and who we are."""
        self._receive_until(lambda: self._begin is not None)
        assert self._begin is not None
        self._newest = self._begin.resume
        return self._begin

    @property
    def context(self) -> m.WorkerContext:
        assert self._begin is not None
        return self._begin.context

    def send(self, message: m.Message) -> None:
        self._write(frame(message))

    def report(self, metrics: bytes, directory: Path | None = None, manner: m.Manner = _SYNC) -> None:
        """One call: a row, or, with a directory, a checkpoint.

        It is committed when this returns, unless its manner is ASYNC: then this waits only while as many others are
        under way as there may be.
        """
        with self._lock:
            self._check_process()
            self._raise_refusal()
            call = self._calls + 1
            if directory is None:
                faultpoints.reach("report.before", rank=self.context.rank, call=call)
                self._write(row_frame(metrics))
                self._calls = call
                if call - self._floor > self.context.run_ahead:
                    self._receive_until(lambda: self._calls - self._floor <= self.context.run_ahead)
            else:
                files = scan(directory)
                faultpoints.reach("report.before", rank=self.context.rank, call=call)
                self._write(frame(m.Declare(call, metrics, str(directory), files, manner)))
                self._calls = call
                self._unsettled.add(call)
                faultpoints.reach("report.declared", rank=self.context.rank, call=call)
                self._settle_down_to(BACKLOG if manner.mode == m.ASYNC else 0)
            faultpoints.reach("report.after", rank=self.context.rank, call=call)

    def next_directory(self) -> str:
        """A name that no other call of any attempt uses, the same on every rank."""
        return f"checkpoint_attempt_{self.context.attempt}_report_{self._calls + 1}"

    def drain(self) -> None:
        """Wait until every checkpoint that this rank has brought is committed."""
        with self._lock:
            self._check_process()
            self._settle_down_to(0)

    def kept_checkpoints(self, timeout_s: float | None) -> tuple[m.KeptCheckpoint, ...]:
        """Every checkpoint that is kept, once those that this rank has brought are committed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._check_process()
            self._receive_until(lambda: not self._unsettled, deadline)
            if self._unsettled:
                calls = ", ".join(map(str, sorted(self._unsettled)))
                raise TimeoutError(f"the checkpoints of report {calls} were not committed within {timeout_s:g} s")
            self._raise_refusal()
            self._lists += 1
            self._write(frame(m.ListCheckpoints(self._lists)))
            self._receive_until(lambda: self._listed is not None and self._listed.number == self._lists)
            assert self._listed is not None
            return self._listed.kept

    def newest_checkpoint(self) -> m.CheckpointRef | None:
        """The newest commit that has been told to this rank."""
        with self._lock:
            self._catch_up()
            return self._newest

    def preemption(self) -> m.Preempt | None:
        """What this rank has been told about nodes that are taken away."""
        with self._lock:
            self._catch_up()
            return self._preempt

    def _catch_up(self) -> None:
        """Take in what has arrived, without waiting for more."""
        self._check_process()
        while select.select([self._stream], [], [], 0)[0]:
            self._receive()

    def fetch(self, checkpoint: m.CheckpointRef) -> Path:
        """Where the checkpoint's verified files lie on this node."""
        with self._lock:
            self._check_process()
            self._fetched = None
            self._write(frame(m.Fetch(checkpoint)))
            self._receive_until(lambda: self._fetched is not None)
            answer: m.Fetched | None = self._fetched
            assert answer is not None
        if not answer.error:
            return Path(answer.path)
        newest = self.newest_checkpoint()
        if newest is not None and newest.index > checkpoint.index:
            raise MissingError(
                f"{checkpoint.directory} was the newest checkpoint when it was asked for, and may have been given up "
                f"since (num_to_keep): {answer.error}. Call get_checkpoint() again: the newest is {newest.directory}."
            )
        raise DamagedError(answer.error)

    def meet(self, what: str, data: bytes, timeout_s: float | None) -> bytes:
        """Wait for every rank at this rank's next meeting; what rank 0 brought to it."""
        with self._lock:
            self._check_process()
            self._meetings += 1
            self._gathered = None
            number = self._meetings
            self._write(frame(m.Meet(number, what, data)))
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            self._receive_until(lambda: self._is_gathered(number), deadline)
            if not self._is_gathered(number):
                self._write(frame(m.Meet(number, what, b"", True)))
                self._receive_until(lambda: self._is_gathered(number))
            answer: m.Gathered | None = self._gathered
            assert answer is not None
        if answer.error:
            raise CollectiveError(answer.error)
        return answer.data

    def _is_gathered(self, number: int) -> bool:
        return self._gathered is not None and self._gathered.number == number

    def _settle_down_to(self, backlog: int) -> None:
        self._receive_until(lambda: len(self._unsettled) <= backlog)
        self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            raise ReportError(refusal)

    def heartbeat(self) -> None:
        """Say that the function is alive; not more often than is of use."""
        now = time.monotonic()
        if now < self._next_heartbeat or not self._lock.acquire(blocking=False):
            return  # who holds the lock is inside a call of ours, which is as good
        try:
            self._check_process()
            self._next_heartbeat = now + HEARTBEAT_S
            self._write(frame(m.Heartbeat()))
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """What takes time in here is ours, and says nothing about the user's function."""
        self._write(frame(m.Inside(True)))
        try:
            yield
        finally:
            self._write(frame(m.Inside(False)))

    def _receive_until(self, satisfied: Callable[[], bool], deadline: float | None = None) -> None:
        if satisfied():
            return
        with contextlib.nullcontext() if self._begin is None else self._inside():
            while not satisfied():
                if deadline is not None:
                    left = max(deadline - time.monotonic(), 0.0)
                    if not select.select([self._stream], [], [], left)[0]:
                        return
                self._receive()

    def _receive(self) -> None:
        data = self._stream.recv(CHUNK)
        if not data:
            _end_with_agent()
        for message in self._frames.feed(data):
            if not isinstance(message, list):
                self._take(message)

    def _take(self, message: m.ToWorker) -> None:
        if isinstance(message, m.Committed):
            self._newest = message.checkpoint
            self._unsettled.discard(message.call)
        elif isinstance(message, m.Advance):
            self._floor = message.floor
        elif isinstance(message, m.Refused):
            self._refusal = message.error
            self._unsettled.discard(message.call)
        elif isinstance(message, m.Fetched):
            self._fetched = message
        elif isinstance(message, m.Preempt):
            self._preempt = message
        elif isinstance(message, m.Gathered):
            self._gathered = message
        elif isinstance(message, m.CheckpointList):
            self._listed = message
        else:
            self._begin = message

    def _write(self, data: bytes) -> None:
        try:
            self._stream.sendall(data)
        except OSError:
            _end_with_agent()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise NotInWorkerError(
                "report and get_checkpoint belong to the worker process; this is a process that it has forked"
            )


def _end_with_agent() -> None:
    """The agent has gone, so nothing that this process does can be kept: end at once."""
    os._exit(1)


_current: Session | None = None


def open_session(session: Session) -> None:
    global _current
    _current = session


def current(call: str) -> Session:
    """The session of this process, for the public function named ``call``."""
    if _current is None:
        raise NotInWorkerError(
            f"{call} can only be called inside the function that a trainer runs (train_loop_per_worker), "
            "not in the script that calls fit()"
        )
    return _current


def in_worker() -> bool:
    return _current is not None
