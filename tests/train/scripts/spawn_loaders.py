"""A script whose training function starts processes by spawn and forkserver, with classes that it defines itself."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from holdfast import train


class Squares:
    def __init__(self, count: int) -> None:
        self.count = count

    def items(self) -> list[int]:
        return [number * number for number in range(self.count)]


def load(dataset: Squares, queue: Any) -> None:
    queue.put((type(dataset).__module__, dataset.items()))


def loop(config: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for method in config["methods"]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        loader = context.Process(target=load, args=(Squares(4), queue))
        loader.start()
        found[method] = queue.get()[1]
        loader.join()
        with context.Pool(1) as pool:
            found[f"{method} pool"] = pool.map(Squares.items, [Squares(3)])[0]
    return found


if __name__ == "__main__":
    result = train.DataParallelTrainer(
        loop,
        train_loop_config={"methods": sys.argv[2:]},
        run_config=train.RunConfig(name="loaders", storage_path=sys.argv[1]),
    ).fit()
    print("FOUND", result.return_value)
