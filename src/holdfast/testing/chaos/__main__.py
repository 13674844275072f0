"""The command line of the storm."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from holdfast.testing.chaos.audit import BrokenPromise
from holdfast.testing.chaos.rounds import Chaos


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.chaos", description="Torment runs at random.")
    parser.add_argument("--minutes", type=float, default=1.0, help="for how long (%(default)s)")
    parser.add_argument("--seed", type=int, help="make the choices of this seed again")
    parser.add_argument("--steps", type=int, default=150, help="how long each run is (%(default)s)")
    parser.add_argument("--gap", type=float, default=0.25, help="mean seconds between two strikes (%(default)s)")
    asked = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    _say(f"seed {seed}")
    chaos = Chaos(seed, steps=asked.steps, mean_gap_s=asked.gap, say=_say)
    try:
        chaos.rage(asked.minutes * 60)
    except BrokenPromise as broken:
        for line in chaos.tally.lines():
            _say(line)
        _say(f"BROKEN: {broken}\nseed {seed}; what is left lies in {chaos.folder}")
        return 1
    chaos.clean()
    for line in chaos.tally.lines():
        _say(line)
    _say("every promise was kept")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
