"""Named places where tests and users may inject a fault. Nothing happens where none is armed.

A place calls ``reach("name", rank=…, call=…)``. A fault is armed with ``arm(name, action, **where)`` in the same
process, or for every process of a job through the environment variable ``HOLDFAST_FAULTS``, whose text is
``name:action[:key=value,…]`` separated by ``;``. Actions:

- ``kill`` (SIGKILL to the own process), ``exit``, ``raise``, ``stop`` (SIGSTOP), ``hang`` (for ever);
- ``sleep``, with ``seconds=…``;
- ``kill_agent`` and ``kill_driver``: SIGKILL to the agent or driver above a worker, which waits until it is dead;
- ``hold`` (say so in the pipe PATH.here and wait for the end of the pipe PATH.go, with ``gate=PATH``);
- or, from Python, any callable.

A fault fires once unless ``times`` says otherwise (0: always). With ``once=PATH`` that is so across all processes: each
firing creates a file, PATH, then PATH.2 and so on. ``holdfast.testing.faults`` writes such text.

This module must never import anything of Holdfast but its errors, and costs one attribute test when nothing is armed.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.errors import ConfigurationError, HoldfastError

VARIABLE = "HOLDFAST_FAULTS"

PLACES = frozenset(
    {
        "ack.before",
        "agent.born",
        "delete.after",
        "delete.before",
        "driver.opened",
        "janitor.ready",
        "journal.claimed",
        "journal.seal",
        "journal.write",
        "journal.written",
        "manifest.after",
        "manifest.before",
        "pristine.ready",
        "report.after",
        "report.before",
        "report.declared",
        "run.ended",
        "start.before",
        "upload.begin",
        "upload.end",
        "upload.file",
        "worker.begin",
        "worker.born",
        "zygote.bearing",
        "zygote.forked",
        "zygote.ready",
    }
)
"""Every place that there is."""


class InjectedFault(HoldfastError):
    """The error that the action ``raise`` raises."""


@dataclass
class _Fault:
    action: Callable[[], None]
    where: dict[str, str] = field(default_factory=dict)
    times: int = 1
    once: str | None = None

    def __post_init__(self) -> None:
        self.always, self.total = self.times == 0, self.times

    def matches(self, found: dict[str, object]) -> bool:
        return all(str(found.get(key)) == value for key, value in self.where.items())

    def fire(self) -> None:
        if self.always:
            if self.once is not None:
                _create(self.once)
        elif self.times <= 0 or (self.once is not None and not self._claim(self.once)):
            return
        self.times -= 1
        self.action()

    def _claim(self, once: str) -> bool:
        """Whether one of the firings was left for this process."""
        return any(_create(once if number == 1 else f"{once}.{number}") for number in range(1, self.total + 1))


def _create(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


_armed: dict[str, list[_Fault]] = {}
_text = ""
_here: dict[str, object] = {}


def reach(name: str, **found: object) -> None:
    """Say that the place ``name`` was reached; fires what is armed for it."""
    if not _armed:
        return
    for fault in _armed.get(name, ()):
        if fault.matches({**_here, **found}):
            fault.fire()


def locate(**here: object) -> None:
    """Say once what holds for every place that this process reaches from now on: its rank, its attempt."""
    _here.update(here)


def arm(
    name: str,
    action: str | Callable[[], None],
    *,
    times: int = 1,
    once: str | None = None,
    gate: str = "",
    seconds: float = 0.0,
    **where: object,
) -> None:
    """Arm a fault at the place ``name``, for this process."""
    if name not in PLACES:
        raise ConfigurationError(
            f"there is no place {name!r} to inject a fault; use one of {', '.join(sorted(PLACES))}"
        )
    texts = {key: str(value) for key, value in where.items()}
    call = _named_action(name, action, gate, seconds) if isinstance(action, str) else action
    _armed.setdefault(name, []).append(_Fault(call, texts, times, once))


def disarm() -> None:
    """Forget every armed fault of this process."""
    global _text
    _armed.clear()
    _text = ""


def arm_from_environment() -> None:
    """Arm what ``HOLDFAST_FAULTS`` asks for; called once by each process of a job as it starts."""
    arm_text(os.environ.get(VARIABLE, ""))


def follow(variables: Mapping[str, str]) -> None:
    """Arm what a job's environment asks for, for a process that outlives the job before; nothing if that is armed."""
    text = variables.get(VARIABLE, "")
    if text != _text:
        arm_text(text)


def arm_text(text: str) -> None:
    """Arm what the text asks for, and nothing else. ConfigurationError, with nothing armed, for one that is wrong."""
    global _text
    disarm()
    try:
        for part in filter(None, map(str.strip, text.split(";"))):
            _arm_one(part)
    except ConfigurationError:
        disarm()
        raise
    _text = text


def _arm_one(text: str) -> None:
    name, _, rest = text.partition(":")
    action, _, listed = rest.partition(":")
    options: dict[str, str] = {}
    for option in filter(None, listed.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigurationError(f"{VARIABLE}: {option!r} in {text!r} is not key=value")
        options[key] = value
    try:
        times, seconds = int(options.pop("times", "1")), float(options.pop("seconds", "0"))
    except ValueError as error:
        raise ConfigurationError(f"{VARIABLE}: times and seconds of {text!r} must be numbers: {error}") from None
    once, gate = options.pop("once", None), options.pop("gate", "")
    where: dict[str, object] = {**options}
    try:
        arm(name, action, times=times, once=once, gate=gate, seconds=seconds, **where)
    except ConfigurationError as error:
        raise ConfigurationError(f"{VARIABLE}: {text!r}: {error}") from None


def _named_action(name: str, action: str, gate: str, seconds: float) -> Callable[[], None]:
    def raise_fault() -> None:
        raise InjectedFault(f"fault injected at {name}")

    def hang() -> None:
        while True:
            time.sleep(3600)

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
        "hang": hang,
        "sleep": lambda: time.sleep(seconds),
        "kill_agent": lambda: _kill_above("hf:agent", 0),
        "kill_driver": lambda: _kill_above("hf:janitor", 1),
        "hold": hold,
    }
    if action not in actions:
        raise ConfigurationError(f"unknown fault action {action!r} for {name}; use one of {', '.join(actions)}")
    if action == "hold" and not gate:
        raise ConfigurationError(f"the fault hold at {name} needs gate=PATH, with the pipes PATH.here and PATH.go")
    if action == "sleep" and not seconds > 0:
        raise ConfigurationError(f"the fault sleep at {name} needs seconds=SECONDS, above 0")
    return actions[action]


def _kill_above(title: str, further: int) -> None:
    """SIGKILL the process above this one that bears this name, or the one ``further`` above it; wait until it is
    dead."""
    pid = os.getppid()
    while pid > 1 and _stat(pid)[0] != title:
        pid = _stat(pid)[1]
    for _ in range(further):
        pid = _stat(pid)[1]
    if pid <= 1:
        raise InjectedFault(f"there is no process {title} above this one to kill")
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [])
    os.close(pidfd)


def _stat(pid: int) -> tuple[str, int]:
    """A process's name and its parent."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])
