"""Which rank is whose neighbour."""

from __future__ import annotations

from holdfast.control.placement import Place, places


def test_ranks_are_counted_on_their_node_and_nodes_in_the_order_of_their_first_rank() -> None:
    assert places(["b", "b", "a", "b", "c", "a"]) == (
        Place(local_rank=0, local_world_size=3, node_rank=0),
        Place(local_rank=1, local_world_size=3, node_rank=0),
        Place(local_rank=0, local_world_size=2, node_rank=1),
        Place(local_rank=2, local_world_size=3, node_rank=0),
        Place(local_rank=0, local_world_size=1, node_rank=2),
        Place(local_rank=1, local_world_size=2, node_rank=1),
    )


def test_nobody_has_no_place() -> None:
    assert places([]) == ()
