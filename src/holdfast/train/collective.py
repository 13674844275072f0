"""Meetings of all workers from inside the training function, for control and small values; not for tensors."""

from __future__ import annotations

from typing import TypeVar

import cloudpickle

from holdfast.errors import ConfigurationError, PicklingError
from holdfast.worker import session

T = TypeVar("T")
TIMEOUT_S = 1800.0


def barrier(timeout_s: float | None = TIMEOUT_S) -> None:
    """Return when every rank is here. CollectiveError names the missing ranks after ``timeout_s`` (None: no limit), and
    at once when one has ended or is at a broadcast."""
    session.current("train.collective.barrier()").meet("barrier", b"", _checked(timeout_s))


def broadcast_from_rank_zero(data: T, timeout_s: float | None = TIMEOUT_S) -> T:
    """Rank 0's ``data``, on every rank; the others' is ignored. It waits, and fails, as ``barrier`` does."""
    here = session.current("train.collective.broadcast_from_rank_zero()")
    body = b""
    if here.context.rank == 0:
        try:
            body = cloudpickle.dumps(data)
        except Exception as error:
            raise PicklingError(f"broadcast_from_rank_zero cannot send a {type(data).__name__}: {error}") from error
    received: T = cloudpickle.loads(here.meet("broadcast", body, _checked(timeout_s)))
    return data if here.context.rank == 0 else received


def _checked(timeout_s: float | None) -> float | None:
    if timeout_s is not None and (isinstance(timeout_s, bool) or not timeout_s > 0):
        raise ConfigurationError(f"timeout_s={timeout_s!r}: give a number of seconds above 0, or None for no limit")
    return timeout_s
