"""Named places where tests and users may inject a fault. Nothing happens where none is armed.

A place calls ``reach("name", rank=…, call=…)``. A fault is armed with ``arm(name, action, **where)`` in the same
process, or for every process of a job through the environment variable ``HOLDFAST_FAULTS``, whose text is
``name:action[:key=value,…]`` separated by ``;``. Actions: ``kill`` (SIGKILL to the own process), ``exit``, ``raise``,
``stop`` (SIGSTOP), ``hold`` (say so in the pipe PATH.here and wait for the end of the pipe PATH.go, with
``gate=PATH``), or, from Python, any callable. A fault fires once unless ``times`` says otherwise; across processes
"once" is kept by creating the file named by ``once=PATH``.

This module must never import anything of Holdfast but its errors, and costs one attribute test when nothing is armed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import ConfigurationError, HoldfastError

VARIABLE = "HOLDFAST_FAULTS"


class InjectedFault(HoldfastError):
    """The error that the action ``raise`` raises."""


@dataclass
class _Fault:
    action: Callable[[], None]
    where: dict[str, str] = field(default_factory=dict)
    times: int = 1
    once: str | None = None

    def matches(self, found: dict[str, object]) -> bool:
        return all(str(found.get(key)) == value for key, value in self.where.items())

    def fire(self) -> None:
        if self.times <= 0:
            return
        if self.once is not None:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return
        self.times -= 1
        self.action()


_armed: dict[str, list[_Fault]] = {}


def reach(name: str, **found: object) -> None:
    """Say that the place ``name`` was reached; fires what is armed for it."""
    if not _armed:
        return
    for fault in _armed.get(name, ()):
        if fault.matches(found):
            fault.fire()


def arm(
    name: str,
    action: str | Callable[[], None],
    *,
    times: int = 1,
    once: str | None = None,
    gate: str = "",
    **where: object,
) -> None:
    """Arm a fault at the place ``name``, for this process."""
    call = _named_action(name, action, gate) if isinstance(action, str) else action
    texts = {key: str(value) for key, value in where.items()}
    _armed.setdefault(name, []).append(_Fault(call, texts, times, once))


def disarm() -> None:
    """Forget every armed fault of this process."""
    _armed.clear()


def arm_from_environment() -> None:
    """Arm what ``HOLDFAST_FAULTS`` asks for; called once by each process of a job as it starts."""
    disarm()
    for text in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(";"))):
        name, _, rest = text.partition(":")
        action, _, options = rest.partition(":")
        where: dict[str, str] = {}
        for option in filter(None, options.split(",")):
            key, equals, value = option.partition("=")
            if not equals:
                raise ConfigurationError(f"{VARIABLE}: {option!r} in {text!r} is not key=value")
            where[key] = value
        times = int(where.pop("times", "1"))
        once = where.pop("once", None)
        gate = where.pop("gate", "")
        arm(name, action, times=times, once=once, gate=gate, **where)


def _named_action(name: str, action: str, gate: str) -> Callable[[], None]:
    def raise_fault() -> None:
        raise InjectedFault(f"fault injected at {name}")

    def hold() -> None:
        with open(f"{gate}.here", "w") as here:
            here.write(f"{os.getpid()}\n")
        with open(f"{gate}.go") as go:
            go.read()

    actions: dict[str, Callable[[], None]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
        "exit": lambda: os._exit(17),
        "raise": raise_fault,
        "hold": hold,
    }
    if action not in actions:
        raise ConfigurationError(f"unknown fault action {action!r} for {name}; use one of {', '.join(actions)}")
    if action == "hold" and not gate:
        raise ConfigurationError(f"the fault hold at {name} needs gate=PATH, with the pipes PATH.here and PATH.go")
    return actions[action]
