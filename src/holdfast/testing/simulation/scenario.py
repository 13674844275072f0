"""What a seed stands for: a run, the store that it uses, and the faults that befall it. Pure."""

from __future__ import annotations

import random

import msgspec

from holdfast.control.failures import CONTROLLER_LIMIT, MAX_FAILURES, MAX_PREEMPTIONS
from holdfast.control.retention import Policy
from holdfast.testing.simulation.workers import Plan
from holdfast.train.machine import Settings
from holdfast.wire import messages as m

DISK, BUCKET, LAX_BUCKET = "disk", "bucket", "lax bucket"

FAULTS = {
    "worker killed": 10,
    "worker out of memory": 2,
    "worker crashed": 2,
    "worker exits": 3,
    "worker raises": 6,
    "worker returns early": 2,
    "worker hangs": 6,
    "worker dies at start": 5,
    "zygote lost": 3,
    "node lost": 6,
    "node preempted": 4,
    "no room": 2,
    "driver killed": 14,
    "power lost": 8,
    "driver displaced": 16,
    "second driver": 2,
    "checkpoint damaged": 9,
    "snapshot damaged": 3,
    "call fails": 8,
    "store fails": 5,
    "store fails for long": 2,
    "store is slow": 3,
    "asked to stop": 2,
    "driver preempted": 2,
}
"""How often each fault is drawn, against the others."""


class Fault(msgspec.Struct, frozen=True):
    """``kind`` happens at the first step of the world that is at least ``gap`` after the fault before."""

    gap: int
    kind: str


class Scenario(msgspec.Struct, frozen=True):
    """Everything about a world but its chances."""

    settings: Settings
    plan: Plan
    nodes: int
    store: str
    repeats: float
    """How likely a message to the driver arrives twice."""
    nesting: float
    """How likely another process gets in between two steps of a call to the store."""
    snapshot_every: int
    relaunches: int
    """How often a run that ended FAILED or STOPPED is launched again."""
    faults: tuple[Fault, ...]


def draw(chance: random.Random) -> Scenario:
    """A scenario for these chances."""
    world_size = chance.choice((1, 2, 2, 3, 4))
    plan = _plan(chance, world_size)
    store = chance.choice((DISK, DISK, DISK, BUCKET, BUCKET, LAX_BUCKET))
    return Scenario(
        settings=Settings(
            world_size=world_size,
            limits={
                MAX_FAILURES: chance.choice((2, 0) if plan.conflict else (-1, 3, 2, 1, 0)),
                CONTROLLER_LIMIT: chance.choice((-1, 3, 1)),
                MAX_PREEMPTIONS: chance.choice((-1, -1, 1, 0)),
            },
            retention=_retention(chance),
            hang_timeout_s=chance.choice((None, 10.0, 10.0)),
            preemption_grace_s=chance.choice((0.0, 0.1, 2.0)),
        ),
        plan=plan,
        nodes=chance.choice((1, 1, 2)),
        store=store,
        repeats=chance.choice((0.0, 0.0, 0.05, 0.2)),
        nesting=chance.choice((0.0, 0.1, 0.3)),
        snapshot_every=chance.choice((3, 8, 20, 1000)),
        relaunches=chance.choice((0, 0, 1, 2)),
        faults=_faults(chance, store),
    )


def _retention(chance: random.Random) -> Policy:
    return Policy(
        num_to_keep=chance.choice((None, None, 1, 2, 3)),
        score_attribute=chance.choice((None, None, "score")),
        score_order=chance.choice(("max", "min")),
    )


def _plan(chance: random.Random, world_size: int) -> Plan:
    ranks = list(range(world_size))
    bringers = ranks if chance.random() < 0.6 else chance.sample(ranks, chance.randint(1, world_size))
    return Plan(
        steps=chance.randint(3, 12),
        period=chance.choice((0, 1, 1, 2, 2, 3, 4)),
        bringers=tuple(sorted(bringers)),
        shared=chance.random() < 0.3,
        conflict=len(bringers) > 1 and chance.random() < 0.03,
        pace_s=chance.choice((0.001, 0.01, 0.1)),
        manner=m.Manner(chance.choice((m.SYNC, m.SYNC, m.ASYNC)), chance.choice(("", "", "", "best"))),
    )


def _faults(chance: random.Random, store: str) -> tuple[Fault, ...]:
    kinds = dict(FAULTS)
    if store == LAX_BUCKET:
        del kinds["driver displaced"], kinds["second driver"]  # only the lease keeps two drivers apart there
    count = chance.choice((0, 1, 1, 2, 2, 3, 3, 4, 6))
    drawn = chance.choices(list(kinds), list(kinds.values()), k=count)
    return tuple(Fault(chance.randrange(1, chance.choice((30, 120, 300))), kind) for kind in drawn)
