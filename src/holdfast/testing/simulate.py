"""The simulator: thousands of runs with faults at every step, each from one seed, on virtual time.

::

    python -m holdfast.testing.simulate --seeds 3000 --workers 2    look for a broken promise
    python -m holdfast.testing.simulate --seed 1234 --trace         live through one seed again, step by step
    python -m holdfast.testing.simulate --gang 10000                what an event costs with so many workers

The controller, dispatcher, recovery, journal, commit protocol, agents and their uploads are the real ones; processes,
links, stores and the clock are not. A seed always leads to the same run. This module must never start anything that
outlives it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.testing.simulation.world import World

CHUNK = 50
LAST_LINES = 40
MOST_TOLD = 10


class Failure(msgspec.Struct, frozen=True):
    """A seed that led to a broken promise."""

    seed: int
    what: str
    lines: tuple[str, ...]
    """The last lines of its trace."""

    @property
    def replay(self) -> str:
        """The line that lives through it again."""
        return f"python -m holdfast.testing.simulate --seed {self.seed} --trace"


class Outcome(msgspec.Struct, frozen=True):
    """What came of one seed."""

    failure: Failure | None
    steps: int
    digest: str


def live(seed: int, *, lines: int = LAST_LINES) -> Outcome:
    """Live through one seed."""
    world = World(seed)
    failure: Failure | None = None
    try:
        world.run()
    except Exception as error:
        told = [f"seed {seed}: {world.scenario}", *(_line(entry) for entry in world.trace[-lines:])]
        failure = Failure(seed, f"{type(error).__name__}: {error}", tuple(told))
    digest = hashlib.blake2b(repr(world.trace).encode(), digest_size=8).hexdigest()
    return Outcome(failure, world.steps, digest)


def survey(seeds: Iterable[int]) -> tuple[int, int, list[Failure]]:
    """Live through several seeds: how many, how many steps they took, and what went wrong."""
    count, steps, failures = 0, 0, []
    collecting = gc.isenabled()
    gc.disable()  # every world is one heap of cycles; they are collected in heaps
    try:
        for count, seed in enumerate(seeds, 1):
            outcome = live(seed)
            steps += outcome.steps
            failures += [outcome.failure] if outcome.failure else []
            if count % 10 == 0:
                gc.collect()
    finally:
        if collecting:
            gc.enable()
    return count, steps, failures


def survey_all(start: int, seeds: int, workers: int) -> Iterator[tuple[int, int, list[Failure]]]:
    """The same over several processes, chunk by chunk."""
    chunks = [range(first, min(first + CHUNK, start + seeds)) for first in range(start, start + seeds, CHUNK)]
    if workers == 1:
        yield from map(survey, chunks)
        return
    # Forked, before there is any thread here: nothing is imported again, and no helper process stays behind.
    pool = multiprocessing.get_context("fork").Pool(workers)
    try:
        yield from pool.imap_unordered(survey, chunks)
        pool.close()
    finally:
        pool.terminate()
        pool.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.testing.simulate", description="Look for broken promises."
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to live through (%(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="over how many processes (%(default)s)")
    parser.add_argument("--seed", type=int, help="live through this one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every step")
    parser.add_argument("--gang", type=int, help="run one undisturbed group of so many workers, and tell the cost")
    asked = parser.parse_args(arguments)
    if asked.gang is not None:
        from holdfast.testing.simulation.gang import measure

        _say(measure(asked.gang))
        return 0
    if asked.seed is not None:
        return _one(asked.seed, trace=asked.trace)
    return _many(asked.start, asked.seeds, asked.workers)


def _one(seed: int, *, trace: bool) -> int:
    if trace:
        world = World(seed)
        _say(f"seed {seed}: {world.scenario}")
    outcome = live(seed, lines=sys.maxsize if trace else LAST_LINES)
    if outcome.failure is None:
        if trace:
            world.run()
            _say(*(_line(entry) for entry in world.trace))
        _say(f"seed {seed}: every promise was kept in {outcome.steps} steps ({outcome.digest})")
        return 0
    _tell(outcome.failure)
    return 1


def _many(start: int, seeds: int, workers: int) -> int:
    began = time.monotonic()
    done = steps = 0
    failures: list[Failure] = []
    told = 0.0
    for count, more, found in survey_all(start, seeds, workers):
        done, steps = done + count, steps + more
        for failure in found[: max(0, MOST_TOLD - len(failures))]:
            _tell(failure)
        failures += found
        if time.monotonic() - told > 2 and done < seeds:
            told = time.monotonic()
            _say(f"{done} of {seeds} seeds, {len(failures)} failed, {done / (told - began):.0f} seeds/s")
    took = time.monotonic() - began
    _say(f"{done} seeds, {steps} steps, {len(failures)} failed, {took:.1f} s, {done / took:.0f} seeds/s")
    return 1 if failures else 0


def _tell(failure: Failure) -> None:
    _say(*failure.lines, f"seed {failure.seed} failed: {failure.what}", f"  replay: {failure.replay}")


def _line(entry: tuple[object, ...]) -> str:
    return f"{entry[0]:>12.6f}  {' '.join(str(part) for part in entry[1:])}"


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
