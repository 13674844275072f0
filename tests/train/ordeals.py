"""Functions for workers that repeat themselves, stand still or are asked to leave.

Zygotes import this module, so it imports nothing that a worker does not need.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from holdfast import train
from tests.train import loops


def stumble(config: dict[str, Any]) -> None:
    """Raise at a step on some ranks, always or for a number of attempts, with a message that may tell the attempts
    apart."""
    context = train.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    step, weight = loops.load(rank)
    while step < config["steps"]:
        step += 1
        if attempt <= config.get("attempts", 100) and rank in config["ranks"] and step == config["at"]:
            raise loops.Boom(config["message"].format(attempt=attempt, object=object()))
        weight = loops.advance(weight, step)
        if step % config.get("period", 1):
            train.report({"step": step, "weight": weight})
        else:
            loops.save(rank, step, weight)


def stand_still(config: dict[str, Any]) -> None:
    """Climb, but for one rank that comes to a stand in the first attempt."""
    context = train.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    step, weight = loops.load(rank)
    while step < config["steps"]:
        step += 1
        if attempt <= config.get("attempts", 1) and rank in config["ranks"] and step == config["at"]:
            STANDS[config["how"]]()
        weight = loops.advance(weight, step)
        loops.save(rank, step, weight)


def wait_in_vain() -> None:
    while True:
        time.sleep(60)


def hold_the_interpreter() -> None:
    """In native code, with the interpreter's lock held, so that no Python code runs in this process any more."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


STANDS: dict[str, Callable[[], None]] = {
    "python": wait_in_vain,
    "native": hold_the_interpreter,
    "stopped": be_stopped,
}


def take_long(config: dict[str, Any]) -> None:
    """One rank works for a long time, and shows that it is alive; the others wait for it in ``report``."""
    rank = train.get_context().get_world_rank()
    if rank == 1:
        until = time.monotonic() + config["seconds"]
        while time.monotonic() < until:
            train.heartbeat()
            time.sleep(0.01)
    loops.save(rank, 1, float(rank))
    with train.get_checkpoint().as_directory():  # type: ignore[union-attr]
        pass


def leave_when_told(config: dict[str, Any]) -> int:
    """Work until somebody says that this is to be taken away, save, and return or go on; the next attempt ends it."""
    rank = train.get_context().get_world_rank()
    step, weight = loops.load(rank)
    if step == 0:
        train.report({"step": 1})
        if "gate" in config:
            loops.meet(f"{config['gate']}.{rank}")
        print("ready")
        while (told := train.get_preemption_info()) is None:
            train.heartbeat()
            time.sleep(0.005)
        weight, left_ms = 2.0, told.deadline_ms - time.time() * 1000
        loops.save(rank, 2, weight)
        train.report({"left_ms": left_ms, "nodes": told.preempted_node_to_ranks})
        if config["then"] == "stay":
            wait_in_vain()
        return -1
    train.report({"step": step + 1})
    return step + 1
