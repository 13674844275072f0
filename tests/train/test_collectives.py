"""Ranks meet, or are told who is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import train
from tests.train import runs


def pass_on(config: dict[str, Any]) -> list[Any]:
    rank = train.get_context().get_world_rank()
    found = []
    for value in ("first", {"second": [1, 2]}):
        found.append(train.collective.broadcast_from_rank_zero(value if rank == 0 else "mine"))
        train.collective.barrier()
    Path(config["folder"], str(rank)).write_text(repr(found))
    return found


def nobody_is_ahead(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    for step in range(20):
        Path(config["folder"], f"{rank}_{step}").touch()
        train.collective.barrier()
        there = [Path(config["folder"], f"{other}_{step}").exists() for other in range(3)]
        assert all(there)


def stay_away(config: dict[str, Any]) -> None:
    if train.get_context().get_world_rank() == 1:
        if config["how"] == "end":
            return
        if config["how"] == "broadcast":
            train.collective.broadcast_from_rank_zero(1)
        else:
            Path(config["gate"]).read_text()
    train.collective.barrier(timeout_s=0.2 if config["how"] == "late" else None)


def test_every_rank_gets_what_rank_zero_had(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, pass_on, {"folder": str(tmp_path)}, workers=3)
    assert result.return_value == ["first", {"second": [1, 2]}]
    assert {(tmp_path / str(rank)).read_text() for rank in range(3)} == {repr(result.return_value)}


def test_a_barrier_holds_every_rank_until_the_last_has_come(tmp_path: Path) -> None:
    runs.fit(tmp_path, nobody_is_ahead, {"folder": str(tmp_path)}, workers=3)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("end", r"CollectiveError: rank 1 ended before collective call 1, a barrier that all must make"),
        (
            "broadcast",
            r"CollectiveError: the ranks do not meet for the same: rank [02] is at a barrier and rank 1 is at",
        ),
        ("late", r"CollectiveError: rank 1 did not come to the barrier \(collective call 1\) in time"),
    ],
)
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, gate: Any, how: str, said: str) -> None:
    meeting = gate(1)
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, stay_away, {"how": how, "gate": f"{meeting.path}.1.go"}, workers=3)
    assert re.search(said, str(caught.value)), caught.value


def test_collectives_belong_into_a_worker() -> None:
    for call in (train.collective.barrier, lambda: train.collective.broadcast_from_rank_zero(1)):
        with pytest.raises(RuntimeError, match="can only be called inside the function"):
            call()
