"""Run every scenario on both sides and write docs/benchmarks.md. `python -m bench --help` lists the options."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from bench import page
from bench.marks import now

ROOT = Path(__file__).resolve().parent.parent
PYTHON = {"holdfast": ROOT / ".venv/bin/python", "ray": ROOT / ".venv-bench-ray/bin/python"}
MARKER = "HOLDFAST_BENCH"
TIMEOUT_S = 600

# What each side is asked for: enough to measure, and no more than its pace allows.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "start": {"holdfast": {}, "ray": {}},
    "kill": {"holdfast": {"kills": 3}, "ray": {"kills": 3}},
    "metrics": {"holdfast": {"reports": 300_000}, "ray": {"reports": 5}},
    "small_checkpoints": {"holdfast": {"commits": 300}, "ray": {"commits": 5}},
    "large_checkpoint": {"holdfast": {}, "ray": {}},
}
LARGE_FILES, LARGE_FILE_BYTES = 8, 128 << 20


class Bench:
    """The rounds, in one scratch folder; what it measured is in `samples[side][scenario.name]`, in seconds."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.samples: page.Samples = defaultdict(lambda: defaultdict(list))
        self.runs = 0

    def side(self, side: str, scenario: str) -> None:
        """One scenario in a fresh process of that side."""
        self.runs += 1
        folder = self.scratch / str(self.runs)
        folder.mkdir()
        options = OPTIONS[scenario][side] | {
            "marks": str(folder / "marks"),
            "storage": str(folder / "storage"),
            "scratch": str(folder),
            "source": str(self.scratch / "source"),
            "ray_temp": str(self.scratch / "ray"),
        }
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
            "BENCH_SIDE": side,
            "PYTHONPATH": str(ROOT),
            MARKER: str(os.getpid()),
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with (folder / "stderr").open("w+") as stderr:
            try:
                done = subprocess.run(
                    [PYTHON[side], "-m", "bench.side", scenario],
                    input=json.dumps(options),
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=env,
                    cwd=folder,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            finally:
                end_leftovers()
            if done.returncode:
                stderr.seek(0)
                raise SystemExit(f"{side} {scenario} ended with {done.returncode}\n{done.stdout}\n{stderr.read()}")
        for name, values in json.loads(done.stdout.splitlines()[-1]).items():
            self._add(side, f"{scenario}.{name}", values)

    def copy(self) -> None:
        """`cp -r` of the large directory, and `sync` of what it made."""
        self.runs += 1
        target = self.scratch / f"{self.runs}-cp"
        begin = now()
        subprocess.run(["cp", "-r", self.scratch / "source", target], check=True)
        subprocess.run(["sync", target, *target.iterdir()], check=True)
        self.samples["cp"]["large_checkpoint.recorded"].append((now() - begin) / 1e9)
        print(
            f"cp        large_checkpoint            {self.samples['cp']['large_checkpoint.recorded'][-1]:.6f}",
            flush=True,
        )

    def large_directory(self) -> None:
        source = self.scratch / "source"
        source.mkdir()
        for number in range(LARGE_FILES):
            (source / f"shard_{number}.bin").write_bytes(os.urandom(LARGE_FILE_BYTES))
        subprocess.run(["sync", source, *source.iterdir()], check=True)

    def _add(self, side: str, sample: str, values: list[float]) -> None:
        self.samples[side][sample] += values
        print(f"{side:9} {sample:28} {' '.join(f'{value:.6f}' for value in values)}", flush=True)


def end_leftovers() -> None:
    """End whatever a side left running; only processes that inherited our marker."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARKER) == str(os.getpid()):
                process.kill()
        except psutil.Error:
            continue


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of Holdfast")
    parser.add_argument("--ray-rounds", type=int, default=3, help="rounds of Ray Train")
    parser.add_argument("--scenarios", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--scratch", default="/var/tmp", help="a folder on the file system to measure, not a tmpfs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks.md", help="where the page goes")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    scratch = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.scratch))
    bench = Bench(scratch)
    try:
        if "large_checkpoint" in options.scenarios:
            bench.large_directory()
        for scenario in options.scenarios:
            for number in range(max(options.rounds, options.ray_rounds)):
                if number < options.rounds:
                    bench.side("holdfast", scenario)
                if number < options.ray_rounds:
                    bench.side("ray", scenario)
                if scenario == "large_checkpoint":
                    bench.copy()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    options.output.write_text(page.render(bench.samples, PYTHON["ray"], OPTIONS["metrics"]["ray"]["reports"]))
    print(options.output.read_text())


if __name__ == "__main__":
    main()
