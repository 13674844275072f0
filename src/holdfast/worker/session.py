"""The worker's side of the wire: blocking calls made by the user's function, answered by the agent.

There is no thread here: a worker's process may be forked by data loaders at any time, so the session reads its socket
only inside its own calls. A metrics-only report has left the process when it returns.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from holdfast import faultpoints
from holdfast.errors import DamagedError, NotInWorkerError, ReportError
from holdfast.wire import messages as m
from holdfast.wire.frames import FrameReader, frame, row_frame
from holdfast.worker.files import scan

CHUNK = 1 << 16


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
        self._settled_call = 0
        self._refusal = ""
        self._fetched: m.Fetched | None = None

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

    def report(self, metrics: bytes, directory: Path | None) -> None:
        """One call: a row, or, with a directory, a checkpoint that is committed when this returns."""
        with self._lock:
            self._check_process()
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
                self._write(frame(m.Declare(call, metrics, str(directory), files)))
                self._calls = call
                faultpoints.reach("report.declared", rank=self.context.rank, call=call)
                self._await_commit(call)
            faultpoints.reach("report.after", rank=self.context.rank, call=call)

    def newest_checkpoint(self) -> m.CheckpointRef | None:
        """The newest commit that has been told to this rank."""
        with self._lock:
            self._check_process()
            while select.select([self._stream], [], [], 0)[0]:
                self._receive()
            return self._newest

    def fetch(self, checkpoint: m.CheckpointRef) -> Path:
        """Where the checkpoint's verified files lie on this node."""
        with self._lock:
            self._check_process()
            self._fetched = None
            self._write(frame(m.Fetch(checkpoint)))
            self._receive_until(lambda: self._fetched is not None)
            answer: m.Fetched | None = self._fetched
            assert answer is not None
        if answer.error:
            raise DamagedError(answer.error)
        return Path(answer.path)

    def _await_commit(self, call: int) -> None:
        self._receive_until(lambda: self._settled_call >= call)
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            raise ReportError(refusal)

    def _receive_until(self, satisfied: Callable[[], bool]) -> None:
        while not satisfied():
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
            self._settled_call = max(self._settled_call, message.call)
        elif isinstance(message, m.Advance):
            self._floor = message.floor
        elif isinstance(message, m.Refused):
            self._refusal = message.error
            self._settled_call = max(self._settled_call, message.call)
        elif isinstance(message, m.Fetched):
            self._fetched = message
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
