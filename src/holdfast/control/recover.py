"""Taking a run: its journal opened and fenced, its state folded, what a dead driver left behind found.

Blocking; runs in a thread. It decides nothing: what to do about what it finds is the machine's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from holdfast.journal.fold import fold
from holdfast.journal.log import Holder, Log
from holdfast.journal.open import open_log
from holdfast.storage.store import Store

S = TypeVar("S")


class Recovered(msgspec.Struct, Generic[S], frozen=True):
    """A run in our hands."""

    log: Log
    state: S
    directories: tuple[str, ...]
    """Every folder that lies in the run's directory."""


def open_run(
    store: Store,
    holder: Holder,
    state_type: type[S],
    new_state: Callable[[], S],
    apply: Callable[[S, object], None],
    *,
    take_over: bool = False,
    **options: Any,
) -> Recovered[S]:
    """Take the run for this driver. RunIsLiveError when another one holds it."""
    log, replay = open_log(store, holder, take_over=take_over, **options)
    try:
        state = fold(replay, state_type, new_state, apply)
        directories = tuple(store.folders(""))
    except BaseException:
        log.close()
        raise
    return Recovered(log, state, directories)
