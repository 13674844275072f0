"""Which checkpoints to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast.wire.metrics import decode_metrics


class Kept(msgspec.Struct, frozen=True):
    """A committed checkpoint as retention sees it: its index, whether it is sound, and its metrics as JSON."""

    index: int
    sound: bool
    metrics: msgspec.Raw


class Policy(msgspec.Struct, frozen=True):
    """``num_to_keep`` None keeps all; without a score attribute the newest are kept."""

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"


def score(metrics: object, attribute: str) -> float | None:
    """The value under ``attribute``, which may be a path such as ``eval/acc``; None where there is no such number."""
    if isinstance(metrics, dict) and attribute in metrics:
        return _number(metrics[attribute])
    value = metrics
    for part in attribute.split("/"):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return _number(value)


def retire(checkpoints: Sequence[Kept], policy: Policy) -> tuple[int, ...]:
    """The indices to give up. The newest sound one is never among them: a restart would use it."""
    if policy.num_to_keep is None or len(checkpoints) <= policy.num_to_keep:
        return ()
    newest = max((kept.index for kept in checkpoints if kept.sound), default=-1)
    keep = {kept.index for kept in ranked(checkpoints, policy)[-policy.num_to_keep :]} | {newest}
    return tuple(sorted(kept.index for kept in checkpoints if kept.index not in keep))


def ranked(checkpoints: Sequence[Kept], policy: Policy) -> list[Kept]:
    """From the worst to the best: by score where the policy names one, else, and where scores are equal, by age."""
    return sorted(checkpoints, key=lambda kept: _rank(kept, policy))


def _rank(kept: Kept, policy: Policy) -> tuple[bool, float, int]:
    if policy.score_attribute is None:
        return (kept.sound, 0.0, kept.index)
    value = score(decode_metrics(kept.metrics), policy.score_attribute)
    if value is None:
        return (kept.sound, -math.inf, kept.index)
    return (kept.sound, value if policy.score_order == "max" else -value, kept.index)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
