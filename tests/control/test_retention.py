"""Which checkpoints are kept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.control.retention import Kept, Policy, retire, score


def kept(index: int, *, sound: bool = True, **metrics: Any) -> Kept:
    return Kept(index, sound, msgspec.Raw(json.dumps(metrics).encode()))


def test_without_a_number_all_are_kept() -> None:
    assert retire([kept(n) for n in range(50)], Policy()) == ()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_without_a_score_the_newest_are_kept(number: int) -> None:
    assert retire([kept(n) for n in (4, 0, 9, 7)], Policy(number)) == tuple(sorted([4, 0, 9, 7])[:-number])


def test_no_more_than_the_number_are_left_alone() -> None:
    assert retire([kept(1), kept(2)], Policy(2)) == ()
    assert retire([], Policy(1)) == ()


def test_the_best_are_kept_and_the_newest_beside_them() -> None:
    checkpoints = [kept(n, acc=acc) for n, acc in enumerate([0.5, 0.9, 0.1, 0.8, 0.2])]
    assert retire(checkpoints, Policy(2, "acc")) == (0, 2)
    assert retire(checkpoints, Policy(2, "acc", "min")) == (0, 1, 3)


def test_the_newest_counts_as_one_of_the_best_when_it_is() -> None:
    assert retire([kept(0, acc=1), kept(1, acc=2), kept(2, acc=3)], Policy(1, "acc")) == (0, 1)


def test_of_equal_scores_the_newer_is_kept() -> None:
    assert retire([kept(0, acc=1), kept(1, acc=1), kept(2, acc=0)], Policy(1, "acc")) == (0,)


@pytest.mark.parametrize("missing", [{}, {"acc": None}, {"acc": "high"}, {"acc": True}, {"acc": {"$float": "nan"}}])
def test_a_checkpoint_without_a_score_ranks_last_and_is_no_error(missing: dict[str, Any]) -> None:
    checkpoints = [kept(0, acc=-5), kept(1, **missing), kept(2, acc=-7), kept(3, acc=-9)]
    assert retire(checkpoints, Policy(2, "acc")) == (1,)
    assert retire(checkpoints, Policy(3, "acc", "min")) == (1,)


def test_infinite_scores_are_scores() -> None:
    checkpoints = [kept(0, loss={"$float": "inf"}), kept(1, loss=1), kept(2, loss=2)]
    assert retire(checkpoints, Policy(2, "loss", "min")) == (0,)
    assert retire(checkpoints, Policy(1, "loss", "max")) == (1,)


def test_a_damaged_checkpoint_is_the_first_to_go_and_never_counts_as_the_newest() -> None:
    checkpoints = [kept(0, acc=1), kept(1), kept(2, acc=9, sound=False)]
    assert retire(checkpoints, Policy(2)) == (2,)
    assert retire(checkpoints, Policy(1, "acc")) == (2,)
    assert retire(checkpoints, Policy(2, "acc")) == (2,)


def test_a_nested_score_is_found_by_its_path() -> None:
    metrics = {"eval": {"acc": 0.5, "by": {"class": 3}}, "flat/name": 7, "eval/odd": 1}
    assert score(metrics, "eval/acc") == 0.5
    assert score(metrics, "eval/by/class") == 3.0
    assert score(metrics, "flat/name") == 7.0
    assert score(metrics, "eval/odd") == 1.0
    for nothing in ("eval", "eval/none", "eval/acc/deeper", "none", ""):
        assert score(metrics, nothing) is None
    assert score(None, "acc") is None
