"""From a journal back to a state: the newest sound snapshot, then ``apply`` of every fact after it. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from holdfast.journal.facts import RunFact, decode
from holdfast.journal.log import Replay

S = TypeVar("S")


def fold(replay: Replay, state_type: type[S], new_state: Callable[[], S], apply: Callable[[S, object], None]) -> S:
    """The state that a replay leads to. Recovery never decides again what was decided."""
    snapshot = replay.snapshot
    state = new_state() if snapshot is None else msgspec.json.decode(snapshot.state, type=state_type)
    for record in replay.records:
        apply(state, decode(record))
    return state


def read_facts(records: Iterable[bytes]) -> Iterable[RunFact]:
    return map(decode, records)
