"""Moments, noted by any process of a benchmark in one file and read by the one that judges.

A line is `name rank nanoseconds` of the machine's monotonic clock, which all processes share. Short lines, each
appended in one write, do not mix.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple


class Mark(NamedTuple):
    name: str
    rank: int
    ns: int


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def mark(path: str | Path, name: str, rank: int = 0) -> None:
    """Note this moment; the clock is read before the file is opened."""
    line = f"{name} {rank} {now()}\n".encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def read(path: str | Path, name: str) -> list[Mark]:
    """The marks of that name, oldest first."""
    try:
        lines = Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [Mark(line.split()[0], int(line.split()[1]), int(line.split()[2])) for line in lines]
    return sorted((one for one in found if one.name == name), key=lambda one: one.ns)
