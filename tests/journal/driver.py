"""A driver in a process of its own: obeys lines on its input, answers on its output.

``open [take_over]`` · ``append N`` · ``sync`` · ``arm PLACE ACTION`` · ``close`` · ``race FILE`` · ``run``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast import faultpoints
from holdfast.errors import HoldfastError
from holdfast.journal.epochs import this_process
from holdfast.journal.log import Log, Snapshot
from holdfast.journal.open import open_log
from holdfast.storage.store import Store
from tests.journal.stores import make_store


def record(number: int) -> bytes:
    return b'{"n":%d,"text":"%s"}' % (number, b"x" * (number % 40))


class Driver:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.log: Log | None = None

    def obey(self, order: str, *words: str) -> object:
        if order == "arm":
            return faultpoints.arm(words[0], words[1])
        if order == "open":
            self.log, replay = open_log(self.store, this_process(), take_over="take_over" in words)
            return f"{self.log.epoch} {self.log.position} {sum(1 for _ in replay.records)}"
        if order == "race":
            print("waiting", flush=True)
            while not os.path.exists(words[0]):
                pass
            return self.obey("open")
        assert self.log is not None
        if order == "append":
            return [self.log.append(record(self.log.position + 1)) for _ in range(int(words[0]))][-1]
        if order == "run":
            self.run(self.log)
        return getattr(self.log, order)()

    def run(self, log: Log) -> None:
        """Write without end, telling each position that is safe."""
        while True:
            for _ in range(1 + log.position % 7):
                log.append(record(log.position + 1))
            print(log.sync(), flush=True)
            if log.position % 5 == 0:
                log.snapshot(Snapshot(log.durable, b"%d" % log.durable))


def main() -> None:
    driver = Driver(make_store(sys.argv[1], Path(sys.argv[2])))
    for line in sys.stdin:
        try:
            print("ok", driver.obey(*line.split()), flush=True)
        except HoldfastError as error:
            print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
