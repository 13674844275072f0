"""A user's training script: runs ``climb`` as its one argument, a JSON object, says, and prints what came of it."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from holdfast import errors, train
from tests.train import loops, ordeals


def main(asked: dict[str, Any]) -> int:
    keep = asked.get("keep")
    trainer = train.DataParallelTrainer(
        getattr(loops, asked.get("loop", "climb"), None) or getattr(ordeals, asked["loop"]),
        train_loop_config=asked["config"],
        scaling_config=train.ScalingConfig(num_workers=asked.get("workers", 2)),
        run_config=train.RunConfig(
            name=asked.get("name", "run"),
            storage_path=asked["storage"],
            failure_config=train.FailureConfig(max_failures=asked.get("max_failures", 0), **asked.get("failure", {})),
            checkpoint_config=train.CheckpointConfig(**keep) if keep else None,
            take_over=asked.get("take_over", False),
        ),
    )
    try:
        result = trainer.fit()
    except errors.HoldfastError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        return 1
    print(json.dumps({"return_value": result.return_value, "path": result.path}), flush=True)
    return 0


def in_a_thread(asked: dict[str, Any]) -> int:
    """As a notebook does: the thread that calls ``fit`` is not the main one, and ends right after."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(asked)))
    thread.start()
    thread.join()
    return codes[0]


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    sys.exit(in_a_thread(arguments) if arguments.get("thread") else main(arguments))
