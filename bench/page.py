"""From samples to the page: medians, spreads, ratios, and what they were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

Samples = Mapping[str, Mapping[str, list[float]]]


class Row(NamedTuple):
    """A line of the table. A rate is shown as its inverse, per second."""

    title: str
    sample: str
    rate: bool = False
    peer: str = "ray"


ROWS = [
    Row("`fit()` → first line of both workers, first run of the process", "start.cold"),
    Row("the same, with `ray.init()` counted", "start.cold_with_init"),
    Row("the same, second run of the process", "start.warm"),
    Row("SIGKILL of one worker → first line of both workers again", "kill.recovery"),
    Row("metrics reports, per worker, until the last call returned", "metrics.call", rate=True),
    Row("metrics reports, per worker, until `fit()` returned", "metrics.fit", rate=True),
    Row("checkpoints of 2 × 1 KB, until the last is recorded", "small_checkpoints.commit", rate=True),
    Row("1 GiB checkpoint (8 files), until `report()` returned", "large_checkpoint.returned"),
    Row("1 GiB checkpoint (8 files), until it is recorded", "large_checkpoint.recorded"),
    Row("the same, against `cp -r` and `sync` of the copy", "large_checkpoint.recorded", peer="cp"),
]

PAGE = """\
# Benchmarks

Made by `{command}` on {date}.

The same training functions (`bench/body.py`) run on both sides, alternating, each in a fresh process; two workers, no
torch, storage on a local disk. Medians, with the smallest and largest sample and their number in parentheses. The last
column says how many times better Holdfast is; below 1 it is worse.

{table}

| machine | |
| --- | --- |
{facts}

What is measured:

- Both sides run with their defaults. Ray Train is V2 (`RAY_TRAIN_V2_ENABLED=1`) on a local cluster with 4 logical CPUs
  and no dashboard. `ray.init()` is done before the clock starts, except in the line that says so{init}. Holdfast has
  no such step. Importing either library is not counted.
- Recovery: rank 1 notes the time and kills itself when every rank is at work. Ray Train looks at its workers every
  2 s by default; Holdfast is told by the kernel.
- Metrics: Ray Train's `report()` is a barrier, and waits until the controller has taken the result before it, every
  2 s by default; Holdfast's sends and goes on. So Ray Train is asked for {ray_reports} reports only.
- Recorded: with Holdfast the checkpoint is complete, flushed to disk and in the journal when `report()` returns. Ray
  Train's returns when the files are copied, without a flush; the controller records the checkpoint at its next look,
  which `train.get_all_reported_checkpoints()` waits for.
"""


def render(samples: Samples, ray_python: Path, ray_reports: int) -> str:
    lines = [line for row in ROWS if (line := _line(row, samples))]
    table = ["| | Holdfast | peer | times better |", "| --- | ---: | ---: | ---: |", *lines]
    init = [value for name, values in samples["ray"].items() if name.endswith(".init") for value in values]
    return PAGE.format(
        command=" ".join(["make bench", *([f"BENCH_ARGS='{shlex.join(sys.argv[1:])}'"] if sys.argv[1:] else [])]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        table="\n".join(table),
        facts="\n".join(f"| {name} | {value} |" for name, value in _facts(ray_python).items()),
        init=f", and takes {_seconds(median(init))}" if init else "",
        ray_reports=ray_reports,
    )


def _line(row: Row, samples: Samples) -> str | None:
    ours, theirs = samples["holdfast"][row.sample], samples[row.peer][row.sample]
    if not ours and not theirs:
        return None
    peer = {"ray": "Ray Train", "cp": "cp"}[row.peer]
    ratio = f"{_significant(median(theirs) / median(ours))}" if ours and theirs else ""
    return f"| {row.title} | {_spread(ours, row.rate)} | {peer} {_spread(theirs, row.rate)} | {ratio} |"


def _spread(values: list[float], rate: bool) -> str:
    if not values:
        return "not measured"
    show = _rate if rate else _seconds
    low, high = sorted((min(values), max(values)), reverse=rate)
    return f"{show(median(values))} ({show(low)} to {show(high)}, {len(values)})"


def _rate(seconds: float) -> str:
    return f"{_significant(1 / seconds)}/s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{_significant(value * 1e3)} ms"


def _significant(value: float) -> str:
    """Two or three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _facts(ray_python: Path) -> dict[str, str]:
    ray = subprocess.run(
        [ray_python, "-c", "from importlib.metadata import version; print(version('ray'))"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "Holdfast": metadata.version("holdfast"),
        "Ray": ray or "not installed",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
