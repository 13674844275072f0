"""What a worker process does: take its orders, run the user's function, say how it ended."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from types import TracebackType

import cloudpickle
import msgspec

from holdfast import faultpoints
from holdfast.errors import MetricsError
from holdfast.wire import messages as m
from holdfast.wire.metrics import encode_value
from holdfast.worker import main_module
from holdfast.worker.session import Session, open_session

MAX_TRACEBACK = 200_000


def run(stream: socket.socket) -> int:
    """Run one attempt of one rank over its socket; the exit code."""
    session = Session(stream)
    begin = session.await_begin()
    open_session(session)
    try:
        faultpoints.locate(rank=begin.context.rank, attempt=begin.context.attempt)
        faultpoints.reach("worker.begin")
        function, arguments = cloudpickle.loads(begin.program)
        main_module.adopt(function)
    except BaseException as error:
        return _raise(session, error, error.__traceback__, started=False)
    session.send(m.Started(os.getpid()))
    try:
        value = function(*arguments)
        session.drain()
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return _raise(session, error, frames, started=True)
    session.send(_returned(value if begin.context.rank == 0 else None))
    return 0


def _raise(session: Session, error: BaseException, frames: TracebackType | None, *, started: bool) -> int:
    """Write the traceback to the worker's own log, then tell of it; the exit code."""
    info = _describe(error, frames)
    with contextlib.suppress(Exception):  # the log's disk may be full, and the user may have closed or replaced it
        sys.stderr.write(info.traceback)
        sys.stderr.flush()
    session.send(m.Raise(info, started))
    return 1


def _returned(value: object) -> m.Return:
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception:
        pickled = b""
    return m.Return(_as_json(value), pickled)


def _as_json(value: object) -> bytes:
    """What a later process may read of a return value: JSON where it fits, text otherwise."""
    try:
        return encode_value(value)
    except MetricsError:
        return msgspec.json.encode(_shown(value)[:10_000])


def _describe(error: BaseException, frames: TracebackType | None) -> m.ErrorInfo:
    kind = type(error)
    text = _printable("".join(traceback.format_exception(kind, error, frames)))
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        pickled = b""
    return m.ErrorInfo(kind=name, message=_message(error), traceback=text[-MAX_TRACEBACK:], pickled=pickled)


def _message(error: BaseException) -> str:
    try:
        return _printable(str(error))
    except Exception:
        return f"<{type(error).__qualname__} that cannot be shown>"


def _shown(value: object) -> str:
    try:
        return _printable(repr(value))
    except Exception:
        return f"<{type(value).__qualname__} that cannot be shown>"


def _printable(text: str) -> str:
    """Text that every encoder takes; a file name that is not UTF-8 keeps its odd bytes as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
