"""How facts are put into words: causes, counts, times and metrics, alike on the console and the command line."""

from __future__ import annotations

import re
from typing import Any

from holdfast.journal import facts as f
from holdfast.observe.goodput import Goodput


def describe_root(failures: tuple[f.RankFailure, ...]) -> str:
    """One line for the root of an attempt's failures, and a count of its consequences."""
    root = failures[0]
    alike = sorted(failure.rank for failure in failures if says(failure) == says(root))
    said = says(root) if len(alike) == 1 else re.sub(r"^was\b", "were", says(root))
    text = f"rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))} {said}"
    if root.calls:
        text += f", {reports(root.calls)} into the attempt"
    others = [failure.rank for failure in failures if not failure.consequence and failure.rank not in alike]
    followers = len([failure for failure in failures if failure.consequence and failure.rank not in alike])
    if others:
        text += f" (rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} failed too)"
    if followers:
        text += f" ({followers} other rank{'s' if followers > 1 else ''} failed as a consequence)"
    return text


def says(failure: f.RankFailure) -> str:
    """What happened to a rank, in one line."""
    lines = failure.message.strip().splitlines()
    first = lines[0].rstrip(".") if lines else ""
    error = failure.error.removeprefix("holdfast.errors.")
    return f"raised {error}: {first}" if error else first


def account(spent: Goodput) -> str:
    """Where a run's time went, in one phrase."""
    rest = [
        f"{label} {duration(seconds)}"
        for label, seconds in (("redone", spent.redone), ("starting", spent.starting), ("down", spent.down))
        if seconds >= 0.0005
    ]
    detail = f"useful {duration(spent.useful)} of {duration(spent.wall)}"
    return f"goodput {spent.share:.1%} ({', '.join([detail, *rest])})"


def brief(metrics: dict[str, Any], most: int = 6) -> str:
    """The first few metrics."""
    shown = [f"{key}={value_of(value)}" for key, value in list(metrics.items())[:most]]
    return ", ".join(shown) + (", …" if len(metrics) > most else "")


def value_of(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value!s:.40}"


def reports(count: int) -> str:
    return f"{count} report{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def age(seconds: float) -> str:
    """A time in its largest unit, as short as it gets."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def size(count: int) -> str:
    """A number of bytes."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
