"""Injected faults, for tests of your own training: kill a rank at a step, fail an upload, kill the driver.

::

    from holdfast.testing.faults import Faults

    with Faults().kill(rank=1, step=3) as faults:
        result = trainer.fit()
    assert faults.fired == ("kill(rank=1, step=3)",)

A step is a rank's n-th call of ``train.report`` within an attempt, counted from 1. The fault happens when the call is
made and before anything of it has left the worker: with ``step=3`` two calls have counted. Attempts are counted from 1
over the whole life of a run, in whichever driver; a fault belongs to attempt 1 unless ``attempt`` names another, or is
None for any. It happens at most ``times`` times over all processes and drivers; ``times=None`` means always. With
``rank=None`` it hits the rank that gets there first.

For a script in a process of its own, ``environment()`` gives what ``subprocess.run(env=…)`` needs. A driver can only be
killed there: in a test's own process, the driver is the test.

Nothing is injected where nobody asked for it: outside the ``with`` block, the same ``fit()`` runs undisturbed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from holdfast import faultpoints
from holdfast.errors import ConfigurationError


class Faults:
    """A list of faults, made longer by each call; see the module's docstring."""

    def __init__(self) -> None:
        self._asked: list[tuple[str, str]] = []
        self._folder = ""
        self._before: str | None = None
        self._entered = False
        self._fired: tuple[str, ...] = ()

    def kill(self, *, rank: int | None, step: int, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """SIGKILL the worker."""
        return self._at_report("kill", "kill", rank, step, attempt, times)

    def raise_at(self, *, rank: int | None, step: int, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """Raise ``faultpoints.InjectedFault`` out of ``report``."""
        return self._at_report("raise_at", "raise", rank, step, attempt, times)

    def hang(self, *, rank: int | None, step: int, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """Stand still for ever."""
        return self._at_report("hang", "hang", rank, step, attempt, times)

    def exit(self, *, rank: int | None, step: int, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """Leave the process with code 17, without a word."""
        return self._at_report("exit", "exit", rank, step, attempt, times)

    def kill_agent(self, *, step: int, rank: int | None = 0, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """SIGKILL the agent of the rank's node: what the run sees is a lost node."""
        return self._at_report("kill_agent", "kill_agent", rank, step, attempt, times)

    def kill_driver(self, *, step: int, rank: int | None = 0, attempt: int | None = 1, times: int | None = 1) -> Faults:
        """SIGKILL the process that called ``fit()``. Only with ``environment()``."""
        return self._at_report("kill_driver", "kill_driver", rank, step, attempt, times)

    def slow_storage(self, *, seconds: float) -> Faults:
        """Let each file of a checkpoint take so much longer to be stored."""
        if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
            raise ConfigurationError(f"slow_storage(seconds={seconds!r}): give a number above 0")
        return self._add(f"slow_storage(seconds={seconds})", f"upload.file:sleep:seconds={seconds},times=0")

    def fail_upload(self, *, times: int | None = 1) -> Faults:
        """Let storage refuse a file of a checkpoint, so many times. It is tried again until ``storage_timeout_s``."""
        _check("fail_upload", "times", times)
        return self._add(f"fail_upload(times={times})", f"upload.file:raise:times={times or 0}")

    def environment(self) -> dict[str, str]:
        """This process's environment variables, with these faults added to what ``HOLDFAST_FAULTS`` holds already."""
        if self._entered:
            return dict(os.environ)
        return {**os.environ, faultpoints.VARIABLE: self.text()}

    def text(self) -> str:
        """What ``HOLDFAST_FAULTS`` holds for these faults, and for those that it holds already."""
        if not self._folder:
            place = tempfile.gettempdir()
            if set(place) & set(",;"):
                raise ConfigurationError(
                    f"faults are kept in {place}, whose name holds a comma or semicolon; set TMPDIR"
                )
            self._folder = tempfile.mkdtemp(prefix="holdfast-faults-")
            atexit.register(self._remove)
        ours = (f"{text},once={self._place(number)}" for number, (_, text) in enumerate(self._asked))
        return ";".join(filter(None, (os.environ.get(faultpoints.VARIABLE, ""), *ours)))

    @property
    def fired(self) -> tuple[str, ...]:
        """The faults that have happened, at least once each, in the order in which they were asked for."""
        if not self._folder:
            return self._fired
        return tuple(call for number, (call, _) in enumerate(self._asked) if os.path.exists(self._place(number)))

    def __enter__(self) -> Faults:
        if any(call.startswith("kill_driver") for call, _ in self._asked):
            raise ConfigurationError(
                "kill_driver would kill this process, which is the one that calls fit(); run the script in a process "
                "of its own, as subprocess.run(…, env=faults.environment())"
            )
        if self._entered:
            raise ConfigurationError("these faults are in use already; make another Faults()")
        self._before = os.environ.get(faultpoints.VARIABLE)
        os.environ[faultpoints.VARIABLE] = self.text()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        if self._before is None:
            del os.environ[faultpoints.VARIABLE]
        else:
            os.environ[faultpoints.VARIABLE] = self._before
        faultpoints.follow(os.environ)
        self._remove()

    def __repr__(self) -> str:
        return ".".join(("Faults()", *(call for call, _ in self._asked)))

    def _at_report(
        self, method: str, action: str, rank: int | None, step: int, attempt: int | None, times: int | None
    ) -> Faults:
        _check(method, "rank", rank, least=0)
        _check(method, "step", step, optional=False)
        _check(method, "attempt", attempt)
        _check(method, "times", times)
        where = {"rank": rank, "call": step, "attempt": attempt, "times": times or 0}
        options = ",".join(f"{key}={value}" for key, value in where.items() if value is not None)
        told = {"rank": rank, "step": step}
        told |= {"attempt": attempt} if attempt != 1 else {}
        told |= {"times": times} if times != 1 else {}
        call = f"{method}({', '.join(f'{key}={value}' for key, value in told.items())})"
        return self._add(call, f"report.before:{action}:{options}")

    def _add(self, call: str, text: str) -> Faults:
        if self._folder:
            raise ConfigurationError(f"{call}: these faults are in use already; make another Faults()")
        self._asked.append((call, text))
        return self

    def _place(self, number: int) -> str:
        return os.path.join(self._folder, str(number))

    def _remove(self) -> None:
        self._fired = self.fired
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = ""
        atexit.unregister(self._remove)


def _check(method: str, name: str, value: object, *, least: int = 1, optional: bool = True) -> None:
    if value is None and optional:
        return
    if type(value) is not int or value < least:
        other = ", or None" if optional else ""
        raise ConfigurationError(f"{method}({name}={value!r}): give a whole number of at least {least}{other}")
