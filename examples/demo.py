"""Four workers train a small network while things go wrong: a worker is killed, a worker raises, the driver is killed.

``make demo`` tells the story step by step and ends with the proof: the weights are, bit for bit, those of a run that
nobody disturbed. ``--keep`` keeps the folder with both runs.

The training is local SGD: in each round every rank takes a few steps of gradient descent on its own quarter of the data
and reports its weights; the ranks' files become one checkpoint, and the next round starts from the average of all four.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from holdfast import faultpoints, train

WORKERS, ROUNDS, STEPS, RATE = 4, 30, 40, 0.5
POINTS, HIDDEN = 256, 32

# The bad luck: (attempt, round, rank).
KILLED = (1, 9, 2)
RAISES = (2, 15, 1)
DRIVER_STOPS_AT = 20  # the index of a checkpoint
UNRECORDED = f"checkpoint_{DRIVER_STOPS_AT:06d}"
STOPPED = "demo: stopped"

MARK = "HOLDFAST_DEMO"


# What a user writes: a training function. It saves, and where there is something to load, it loads.


def train_loop(config: dict[str, Any]) -> None:
    context = train.get_context()
    rank = context.get_world_rank()
    points, labels = shard(rank)
    done, weights = load(train.get_checkpoint())
    for number in range(done + 1, ROUNDS + 1):
        if config["disturbed"]:
            misfortune((context.get_attempt(), number, rank))
        for _ in range(STEPS):
            loss, slope = loss_and_gradient(weights, points, labels)
            weights = weights - RATE * slope
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/rank_{rank}.npz", round=number, weights=weights)
            train.report({"round": number, "loss": loss}, checkpoint=train.Checkpoint.from_directory(folder))
        _, weights = load(train.get_checkpoint())


def load(checkpoint: train.Checkpoint | None) -> tuple[int, np.ndarray]:
    """The round that a checkpoint ends, and the average of the ranks' weights; without one, the beginning."""
    if checkpoint is None:
        return 0, first_weights()
    with checkpoint.as_directory() as folder:
        ranks = [dict(np.load(f"{folder}/rank_{rank}.npz")) for rank in range(WORKERS)]
    return int(ranks[0]["round"]), np.mean([saved["weights"] for saved in ranks], axis=0)


def misfortune(now: tuple[int, int, int]) -> None:
    if now == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if now == RAISES:
        raise RuntimeError("the data server does not answer")


# Two half moons, and a network with one hidden layer to tell them apart. Everything follows from the seed and the rank.


def shard(rank: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng([2024, rank])
    labels = draw.integers(0, 2, POINTS)
    angle = draw.uniform(0, np.pi, POINTS)
    across = np.where(labels == 0, np.cos(angle), 1 - np.cos(angle))
    up = np.where(labels == 0, np.sin(angle), 0.5 - np.sin(angle))
    return np.stack([across, up], axis=1) + draw.normal(0, 0.15, (POINTS, 2)), labels


def first_weights() -> np.ndarray:
    return np.random.default_rng(7).normal(0, 0.5, 4 * HIDDEN + 1)


def parts(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    return (
        weights[: 2 * HIDDEN].reshape(2, HIDDEN),
        weights[2 * HIDDEN : 3 * HIDDEN],
        weights[3 * HIDDEN : -1],
        weights[-1],
    )


def predict(weights: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    into, bias, out, level = parts(weights)
    hidden = np.tanh(points @ into + bias)
    return hidden, 1 / (1 + np.exp(-(hidden @ out + level)))


def loss_and_gradient(weights: np.ndarray, points: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    hidden, chance = predict(weights, points)
    loss = -np.mean(np.log(np.where(labels == 1, chance, 1 - chance)))
    error = (chance - labels) / len(labels)
    back = np.outer(error, parts(weights)[2]) * (1 - hidden**2)
    return float(loss), np.concatenate([(points.T @ back).ravel(), back.sum(axis=0), hidden.T @ error, [error.sum()]])


# The driver: the process that calls fit(). It runs as a process of its own, because it is going to be killed.


def drive(name: str, folder: str) -> None:
    if name == "disturbed":
        # Half way through a commit: the files and their manifest are in storage, the journal does not know of it yet.
        faultpoints.arm("manifest.after", stop, index=DRIVER_STOPS_AT, once=f"{folder}/the driver was stopped")
    train.DataParallelTrainer(
        train_loop,
        train_loop_config={"disturbed": name == "disturbed"},
        scaling_config=train.ScalingConfig(num_workers=WORKERS),
        run_config=train.RunConfig(
            name=name, storage_path=folder, failure_config=train.FailureConfig(max_failures=3), worker_output="none"
        ),
    ).fit()


def stop() -> None:
    print(STOPPED, flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread stops right here, and the others with it


# The story.

EXPLAINED = {
    "attempt 1 ": "That was the SIGKILL. The kernel told of the death, the other ranks were stopped, and all four were "
    "forked anew and went on from the newest checkpoint. Nothing polls, and nothing is imported again.",
    "attempt 2 ": "That was the exception: one line with its cause, its cost and what happens next. The whole "
    "traceback is in the journal, and in the error that fit() raises when it gives up.",
    "resuming after": "The new driver found everything in the run's own folder. The checkpoint that was never recorded "
    "is swept away, its name is not used again, and its round is trained once more.",
}


class Stage:
    """What the demo prints: its own words, and those of Holdfast in a frame."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._colour = stream.isatty() and "NO_COLOR" not in os.environ
        self._width = min(shutil.get_terminal_size((100, 24)).columns, 100)

    def heading(self, text: str) -> None:
        self._print(f"\n{self._paint('1', text)}")

    def say(self, text: str) -> None:
        self._wrap(text, "  ", "")

    def explain(self, text: str) -> None:
        self._wrap(text, "    ", "2")

    def quote(self, line: str) -> None:
        colour = "33" if " failed: " in line else "36"
        for part in self._lines(line, self._width - 4, "", "    "):
            self._print(f"  {self._paint('36', '│')} {self._paint(colour, part)}")

    def verdict(self, good: bool, text: str) -> None:
        self._print(f"  {self._paint('32' if good else '31', '✔' if good else '✘')} {text}")

    def _wrap(self, text: str, indent: str, code: str) -> None:
        for part in self._lines(text, self._width, indent, indent):
            self._print(self._paint(code, part) if code else part)

    def _lines(self, text: str, width: int, first: str, rest: str) -> list[str]:
        return textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour else text

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def tell(stage: Stage, folder: Path) -> bool:
    began = time.monotonic()
    stage.say(
        f"{WORKERS} workers train a small network for {ROUNDS} rounds, with a checkpoint after each. "
        f"Everything lies in {folder}."
    )

    stage.heading("1. A run that nobody disturbs, to compare with")
    play(stage, "undisturbed", folder)

    stage.heading("2. The same training, with bad luck")
    stage.say(
        f"Rank {KILLED[2]} will be killed in round {KILLED[1]}, rank {RAISES[2]} will raise in round {RAISES[1]}, and "
        f"the driver will be killed while it commits round {DRIVER_STOPS_AT + 1}."
    )
    if not play(stage, "disturbed", folder):
        sys.exit("the driver was to be killed, and was not")

    stage.heading("3. The same command again")
    play(stage, "disturbed", folder)

    stage.heading("4. What came of it")
    same = compare(stage, folder)
    swept = not (folder / "disturbed" / UNRECORDED).exists()
    stage.verdict(swept, f"{UNRECORDED}, which was never recorded, is {'gone' if swept else 'STILL THERE'}")
    left = sorted(processes())
    stage.verdict(not left, f"processes left behind: {left or 'none'}")
    stage.say(f"That took {time.monotonic() - began:.1f} s.")
    return same and swept and not left


def play(stage: Stage, name: str, folder: Path) -> bool:
    """Run the driver and tell what it says. When it says that it is half way through a commit, kill it: was it?"""
    command = [sys.executable, os.path.relpath(__file__), "drive", name, str(folder)]
    stage.say(f"$ python {' '.join(command[1:])}")
    environment = os.environ | {
        MARK: str(os.getpid()),
        "TMPDIR": str(scratch(folder)),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        assert driver.stdout is not None
        killed = False
        for line in map(str.rstrip, driver.stdout):
            if line == STOPPED:
                killed = True
                kill(stage, driver.pid, folder / name)
                continue
            stage.quote(line)
            for sign, text in EXPLAINED.items():
                if sign in line:
                    stage.explain(text)
    expected = -signal.SIGKILL if killed else 0
    if driver.returncode != expected:
        sys.exit(f"the driver ended with {driver.returncode}, and not with {expected}")
    return killed


def kill(stage: Stage, driver: int, run: Path) -> None:
    """SIGKILL for the driver, and a look at what becomes of everything that it had started."""
    stage.say(f"$ kill -9 {driver}")
    others = {pid: os.pidfd_open(pid) for pid in processes() if pid != driver}
    began = time.monotonic()
    os.kill(driver, signal.SIGKILL)
    for pidfd in others.values():
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(10_000):
            sys.exit("a process of the dead driver is still there after 10 s")
        os.close(pidfd)
    took = time.monotonic() - began
    newest = train.Result.from_path(run).checkpoint
    if not (run / UNRECORDED / ".manifest.json").exists() or newest is None or Path(newest.path).name == UNRECORDED:
        sys.exit(f"{UNRECORDED} was to be in storage and not in the journal")
    stage.explain(
        f"That was the driver, at a bad moment: {UNRECORDED} lies complete in storage, but it is not in the journal, "
        f"and no worker was told that it is safe. The {len(others)} other processes of the run were gone after "
        f"{took * 1000:.0f} ms."
    )


def processes() -> Iterator[int]:
    """Every process that descends from this one, however it left the family: all inherit a variable."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def scratch(folder: Path) -> Path:
    place = folder / "tmp"
    place.mkdir(exist_ok=True)
    return place


def compare(stage: Stage, folder: Path) -> bool:
    results = {name: train.Result.from_path(folder / name) for name in ("undisturbed", "disturbed")}
    found = {}
    for name, result in results.items():
        assert result.checkpoint is not None
        number, weights = load(result.checkpoint)
        found[name] = weights.tobytes()
        digest = hashlib.sha256(found[name]).hexdigest()
        stage.say(
            f"{name:<11}  {number} rounds, weights sha256 {digest[:32]}…, from {Path(result.checkpoint.path).name}"
        )
    same = found["undisturbed"] == found["disturbed"]
    stage.verdict(
        same, f"the weights are {'the same, bit for bit' if same else 'DIFFERENT'}: {len(found['disturbed'])} bytes"
    )
    rows = {name: result.metrics_rows() for name, result in results.items()}
    alike = rows["undisturbed"] == rows["disturbed"]
    stage.verdict(
        alike, f"the metrics are {'the same too' if alike else 'DIFFERENT'}: {len(rows['disturbed'])} rounds, each once"
    )
    points, labels = (np.concatenate(part) for part in zip(*(shard(rank) for rank in range(WORKERS)), strict=True))
    right = np.mean((predict(np.frombuffer(found["disturbed"]), points)[1] > 0.5) == labels)
    stage.say(f"loss {rows['disturbed'][0]['loss']:.3f} → {rows['disturbed'][-1]['loss']:.3f}, {right:.1%} told apart")
    return same and alike


def main() -> int:
    parser = argparse.ArgumentParser(description="A training run that survives the death of anything.")
    parser.add_argument("--keep", action="store_true", help="keep the folder with both runs")
    keep = parser.parse_args().keep
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    stage = Stage(sys.stdout)
    try:
        return 0 if tell(stage, folder) else 1
    finally:
        if keep:
            stage.say(f"Kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["drive"]:
        drive(*sys.argv[2:])
    else:
        sys.exit(main())
