"""One side, one scenario, in a process of its own: `python -m bench.side SCENARIO`, with the options as JSON on stdin.

Prints one JSON object of samples, in seconds, on its last line. Runs in either environment, so it needs nothing but
the framework under test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bench import body
from bench.body import WORKERS, train
from bench.marks import now, read

SIDE = os.environ["BENCH_SIDE"]
Samples = dict[str, list[float]]


def fit(
    function: Callable[[dict[str, Any]], None], name: str, options: dict[str, Any], workers: int = WORKERS
) -> tuple[int, int]:
    """Run a training function; when `fit` was called and when it returned. The marks tell the rest."""
    trainer = _trainer()(
        function,
        train_loop_config=options,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name=name,
            storage_path=options["storage"],
            failure_config=train.FailureConfig(max_failures=options.get("kills", 0)),
        ),
    )
    called = now()
    trainer.fit()
    return called, now()


def _trainer() -> Any:
    if SIDE == "ray":
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        return DataParallelTrainer
    return train.DataParallelTrainer


def start(options: dict[str, Any]) -> Samples:
    """`fit` to the last rank's first line: the first run of this process, and the second."""
    samples: Samples = {}
    for name in ("cold", "warm"):
        here = options | {"marks": f"{options['marks']}-{name}"}
        called, _ = fit(body.start, name, here)
        samples[name] = [(read(here["marks"], "first_line")[-1].ns - called) / 1e9]
    return samples | {"cold_with_init": [samples["cold"][0] + options["init_s"]]}


def kill(options: dict[str, Any]) -> Samples:
    """SIGKILL of rank 1 to the first line of every rank of the next attempt."""
    fit(body.kill, "kill", options)
    lines = read(options["marks"], "first_line")
    killed = read(options["marks"], "killed")
    back = [lines[(life + 1) * WORKERS : (life + 2) * WORKERS] for life in range(len(killed))]
    return {"recovery": [(group[-1].ns - death.ns) / 1e9 for death, group in zip(killed, back, strict=True)]}


def metrics(options: dict[str, Any]) -> Samples:
    """Seconds per report and worker: until the slowest worker's last call returned, and until `fit` did."""
    _, returned = fit(body.metrics, "metrics", options)
    begin = read(options["marks"], "begin")[0].ns
    end = read(options["marks"], "end")[-1].ns
    return {
        "call": [(end - begin) / 1e9 / options["reports"]],
        "fit": [(returned - begin) / 1e9 / options["reports"]],
    }


def small_checkpoints(options: dict[str, Any]) -> Samples:
    """Seconds per commit, until the last one is recorded."""
    fit(body.small_checkpoints, "small", options)
    begin = read(options["marks"], "begin")[0].ns
    end = read(options["marks"], "recorded")[-1].ns
    return {"commit": [(end - begin) / 1e9 / options["commits"]]}


def large_checkpoint(options: dict[str, Any]) -> Samples:
    """Seconds until report returned, and until the checkpoint was recorded."""
    fit(body.large_checkpoint, "large", options, workers=1)
    begin = read(options["marks"], "begin")[0].ns
    return {name: [(read(options["marks"], name)[0].ns - begin) / 1e9] for name in ("returned", "recorded")}


SCENARIOS = {one.__name__: one for one in (start, kill, metrics, small_checkpoints, large_checkpoint)}


def main() -> None:
    scenario, options = SCENARIOS[sys.argv[1]], json.load(sys.stdin)
    if SIDE == "holdfast":
        print("\n" + json.dumps(scenario(options | {"init_s": 0.0})))
        return
    import ray

    begin = now()
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=options["ray_temp"], log_to_driver=False)
    init_s = (now() - begin) / 1e9
    try:
        samples = scenario(options | {"init_s": init_s})
    finally:
        ray.shutdown()
    print("\n" + json.dumps(samples | {"init": [init_s]}))


if __name__ == "__main__":
    main()
