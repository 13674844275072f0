"""Tables for people: drawn where there is a terminal, aligned text where there is none, so that it can be cut and
searched. What draws is loaded when something is drawn: a run in a batch job does without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from holdfast.observe.history import History
from holdfast.observe.listing import Price, price_of, reports_made
from holdfast.observe.wording import describe_root, duration, reports

_STYLES = {
    "RUNNING": "cyan", "FINISHED": "green", "FAILED": "bold red", "STOPPED": "yellow", "INTERRUPTED": "yellow",
    "UNREADABLE": "bold red", "running": "cyan", "starting": "cyan", "finished": "green", "failed": "red",
    "damaged": "red", "retired": "dim",
}  # fmt: skip


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream, on a terminal that can move its cursor and show what we draw."""
    try:
        able = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        return able and "utf" in (stream.encoding or "").lower()
    except ValueError:  # closed
        return False


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    if is_terminal(stream):
        draw_table(header, rows, stream)
        return
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        stream.write(line.rstrip() + "\n")


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell.partition(" ")[0], "")) for cell in row))
    Console(file=stream).print(table)


ATTEMPTS = ("attempt", "duration", "reports", "outcome", "cause", "price")


def attempt_rows(history: History, until: float, unfinished: str = "") -> list[tuple[str, ...]]:
    """A run's attempts, one row each; ``unfinished`` is said of one that has not ended."""
    found: list[tuple[str, ...]] = []
    for attempt in history.attempts.values():
        ended = attempt.ended_at if attempt.ended_at is not None else until
        found.append(
            (
                str(attempt.number),
                duration(max(ended - attempt.started_at, 0.0)),
                str(reports_made(history, attempt)),
                attempt.outcome.replace("_", " ") or unfinished,
                describe_root(attempt.failures) if attempt.failures else "",
                price_text(price_of(history, attempt)),
            )
        )
    return found


def price_text(price: Price) -> str:
    """What an attempt's end cost, in one phrase."""
    parts = [f"1 of {price.charge}"] if price.charge else []
    if price.redone is not None:
        parts.append(f"{reports(price.redone)} redone")
    if price.away_s is not None:
        parts.append(f"{duration(price.away_s)} away")
    return ", ".join(parts)
