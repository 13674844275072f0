"""Which rank is whose neighbour. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Place(msgspec.Struct, frozen=True):
    """Where one rank stands among the ranks of its node, and its node among the nodes."""

    local_rank: int
    local_world_size: int
    node_rank: int


def places(nodes: Sequence[str]) -> tuple[Place, ...]:
    """Each rank's place, from each rank's node."""
    order = list(dict.fromkeys(nodes))
    seen = dict.fromkeys(order, 0)
    found = []
    for node in nodes:
        found.append((seen[node], node))
        seen[node] += 1
    return tuple(Place(local, seen[node], order.index(node)) for local, node in found)
