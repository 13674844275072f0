"""The facts that a run remembers. A journal holds these and nothing else; whatever anybody is ever shown is folded from
them. Facts are frozen, carry the wall-clock time at which they were decided, and name things by relative paths, so that
a run's directory can be moved.
"""

from __future__ import annotations

import msgspec

NOTHING = msgspec.Raw(b"null")


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag=True, omit_defaults=True):
    """Base of all facts."""

    at: float


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank failed. ``kind`` is one of ``control.failures``' kinds."""

    rank: int
    kind: str
    message: str
    error: str = ""
    """The exception's class, where there was one."""
    traceback: str = ""
    calls: int = 0
    """How many reports the rank had made."""
    consequence: bool = False
    checkpoint: int | None = None
    """The checkpoint that was found damaged, where that is the failure."""


class RunOpened(Fact, frozen=True, kw_only=True):
    """A driver took the run. ``fresh_budget`` when the run had ended FAILED, ``restarted`` when it had ended at all."""

    epoch: int
    host: str
    pid: int
    function: str
    fingerprint: str
    restarted: bool = False
    fresh_budget: bool = False


class AttemptStarted(Fact, frozen=True, kw_only=True):
    """``resume`` is the index of the checkpoint that every rank starts from."""

    group: str
    attempt: int
    world_size: int
    resume: int | None = None


class AttemptRunning(Fact, frozen=True, kw_only=True):
    """Every rank has reached the first line of the function."""

    group: str
    attempt: int


class RowsReported(Fact, frozen=True, kw_only=True):
    """The calls ``first`` … ``first + count - 1`` of one rank; ``rows`` is the JSON list of their metrics."""

    group: str
    attempt: int
    rank: int
    first: int
    count: int
    rows: msgspec.Raw


class IndicesReserved(Fact, frozen=True, kw_only=True):
    """Checkpoint indices below ``until`` are taken; a driver that follows starts at ``until``."""

    group: str
    until: int


class DirectoryNamed(Fact, frozen=True, kw_only=True):
    """A folder of the user's own naming is taken from now on, whatever becomes of its upload."""

    group: str
    directory: str


class CheckpointCommitted(Fact, frozen=True, kw_only=True):
    """The checkpoint of call ``call`` is complete in storage; ``metrics`` are rank 0's."""

    group: str
    attempt: int
    call: int
    index: int
    directory: str
    size: int
    metrics: msgspec.Raw


class CheckpointDamaged(Fact, frozen=True, kw_only=True):
    group: str
    index: int
    reason: str


class CheckpointsRetired(Fact, frozen=True, kw_only=True):
    """Retention gave these up; their files may be deleted from now on."""

    group: str
    indices: tuple[int, ...]


class PreemptionNoticed(Fact, frozen=True, kw_only=True):
    """This node, or the driver (an empty name), was announced to be taken away; its ranks have until ``deadline``."""

    group: str
    attempt: int
    node: str
    deadline: float


class AttemptEnded(Fact, frozen=True, kw_only=True):
    """``outcome``: finished, failed, stopped or driver_lost. ``charge`` names the budget that pays for it, if any.

    ``failures`` has the root first.
    """

    group: str
    attempt: int
    outcome: str
    charge: str = ""
    failures: tuple[RankFailure, ...] = ()
    calls: tuple[int, ...] = ()
    """How many reports each rank had made."""


class RunEnded(Fact, frozen=True, kw_only=True):
    """``status``: FINISHED, FAILED or STOPPED. ``reason`` is empty when it finished."""

    status: str
    reason: str = ""
    return_value: msgspec.Raw = NOTHING


RunFact = (
    RunOpened
    | AttemptStarted
    | AttemptRunning
    | RowsReported
    | IndicesReserved
    | DirectoryNamed
    | CheckpointCommitted
    | CheckpointDamaged
    | CheckpointsRetired
    | PreemptionNoticed
    | AttemptEnded
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[RunFact] = msgspec.json.Decoder(RunFact)


def encode(fact: Fact) -> bytes:
    return _encoder.encode(fact)


def decode(record: bytes) -> RunFact:
    return _decoder.decode(record)
