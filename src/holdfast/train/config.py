"""What a user asks for, checked as it is written down and before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.train.callbacks import UserCallback
from holdfast.train.options import is_number, is_text, is_whole, options, refuse_unknown, require

DEFAULT_STORAGE = "~/holdfast_results"
WORKER_OUTPUT = ("none", "rank_zero", "all")
_NAME = re.compile(r"[^/\x00-\x1f\\]{1,200}")


@options
class ScalingConfig:
    """How many workers run the function."""

    num_workers: int = 1

    def check(self) -> None:
        require(
            is_whole(self.num_workers) and self.num_workers >= 1,
            "ScalingConfig",
            "num_workers",
            self.num_workers,
            "a whole number of at least 1",
        )


@options
class FailureConfig:
    """How many failures a run outlives, and how long it waits for its storage.

    ``max_failures`` is how often the group is restarted after its workers, or their node, failed (-1: without limit).
    ``controller_failure_limit`` is the same for workers that could not start. ``storage_timeout_s`` is how long a
    report waits for a store that refuses before the run fails. ``stop_on_repeat=True`` ends the run when the same
    exception is raised at the same step in two attempts in a row, whatever is left of the budget.

    ``hang_timeout_s`` is how long a rank may neither report nor call ``heartbeat`` before the group is restarted for
    it; None is for ever. Time inside calls of ours does not count. "auto" learns it from the run: after five reports it
    is 20 times the longest interval between two of rank 0's, and at least 300 seconds.

    A node's agent, or the driver, that gets SIGTERM is about to be taken away: every rank is told, has
    ``preemption_grace_s`` to save, and is then ended. A preempted node costs one of ``max_preemption_failures`` (-1:
    without limit) and nothing else; a preempted driver costs nothing, and its run stops.
    """

    max_failures: int = 0
    controller_failure_limit: int = -1
    storage_timeout_s: float = 300.0
    stop_on_repeat: bool = False
    hang_timeout_s: float | str | None = None
    max_preemption_failures: int = -1
    preemption_grace_s: float = 0.0

    def check(self) -> None:
        for name in ("max_failures", "controller_failure_limit", "max_preemption_failures"):
            value = getattr(self, name)
            require(is_whole(value) and value >= -1, "FailureConfig", name, value, "a whole number, or -1 for no limit")
        value = self.storage_timeout_s
        require(is_number(value) and value > 0, "FailureConfig", "storage_timeout_s", value, "a number of seconds")
        grace = self.preemption_grace_s
        require(
            is_number(grace) and grace >= 0,
            "FailureConfig",
            "preemption_grace_s",
            grace,
            "a number of seconds, or 0 for none",
        )
        repeat = self.stop_on_repeat
        require(isinstance(repeat, bool), "FailureConfig", "stop_on_repeat", repeat, "True or False")
        hang = self.hang_timeout_s
        require(
            hang is None or hang == "auto" or (isinstance(hang, int | float) and is_number(hang) and hang > 0),
            "FailureConfig",
            "hang_timeout_s",
            hang,
            "a number of seconds, 'auto', or None for no limit",
        )


@options
class CheckpointConfig:
    """Which checkpoints are kept: all, or the newest or best ``num_to_keep``, and always the newest.

    ``checkpoint_score_attribute`` is a metric's name, or a path to a nested one such as ``eval/acc``. A checkpoint that
    was reported without it ranks last.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def check(self) -> None:
        keep, attribute, order = self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order
        owner = "CheckpointConfig"
        require(
            keep is None or (is_whole(keep) and keep >= 1),
            owner,
            "num_to_keep",
            keep,
            "a whole number of at least 1, or None for all",
        )
        require(
            attribute is None or is_text(attribute),
            owner,
            "checkpoint_score_attribute",
            attribute,
            "the name of a metric",
        )
        require(order in ("max", "min"), owner, "checkpoint_score_order", order, "'max' or 'min'")


@options
class LoggingConfig:
    """Whose prints reach the console: those of ``rank_zero``, ``all`` or ``none``. The run's ``logs`` keep them all."""

    worker_output: str = "rank_zero"

    def check(self) -> None:
        output = self.worker_output
        require(output in WORKER_OUTPUT, "LoggingConfig", "worker_output", output, f"one of {', '.join(WORKER_OUTPUT)}")


@options
class RunConfig:
    """Where a run is kept, under which name, and how it deals with failures.

    The same ``storage_path`` and ``name`` resume a run. ``worker_output`` chooses whose prints reach the console: those
    of ``rank_zero``, ``all`` or ``none``; all are kept in the run's ``logs``. ``take_over=True`` takes the run from a
    driver that seems to be alive; that one can then do nothing more. With ``report_barrier=True`` every report waits
    for the same report of every other rank. ``callbacks`` are told in this process of reports and failures.
    ``worker_runtime_env`` holds ``env_vars``, which are set before the workers import anything of yours, and
    ``working_dir``, which they start in and import from first. ``logging_config`` is the longer way to say
    ``worker_output``.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    worker_output: str = "rank_zero"
    take_over: bool = False
    report_barrier: bool = False
    callbacks: Sequence[UserCallback] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig | None = None

    def check(self) -> None:
        if self.name is not None:
            check_name(self.name)
        path = self.storage_path
        require(
            path is None or is_text(path) or isinstance(path, os.PathLike),
            "RunConfig",
            "storage_path",
            path,
            "a folder or a URI",
        )
        for name, kind in (("failure_config", FailureConfig), ("checkpoint_config", CheckpointConfig)):
            value = getattr(self, name)
            require(value is None or isinstance(value, kind), "RunConfig", name, value, f"a {kind.__name__}")
        output = self.worker_output
        require(output in WORKER_OUTPUT, "RunConfig", "worker_output", output, f"one of {', '.join(WORKER_OUTPUT)}")
        for name in ("take_over", "report_barrier"):
            value = getattr(self, name)
            require(isinstance(value, bool), "RunConfig", name, value, "True or False")
        check_callbacks(self.callbacks)
        check_runtime_env(self.worker_runtime_env)
        logging = self.logging_config
        require(
            logging is None or isinstance(logging, LoggingConfig),
            "RunConfig",
            "logging_config",
            logging,
            "a LoggingConfig",
        )
        if logging is not None and output not in ("rank_zero", logging.worker_output):
            raise ConfigurationError(
                f"RunConfig(worker_output={output!r}) and LoggingConfig(worker_output={logging.worker_output!r}) "
                "do not agree; give one of them"
            )

    @property
    def echo(self) -> str:
        """Whose prints reach the console, wherever that was said."""
        return self.worker_output if self.logging_config is None else self.logging_config.worker_output


def check_callbacks(callbacks: object) -> None:
    """A list of objects, each of a class that extends UserCallback."""
    listed = isinstance(callbacks, list | tuple)
    require(callbacks is None or listed, "RunConfig", "callbacks", callbacks, "a list of UserCallback objects")
    for number, callback in enumerate(callbacks if isinstance(callbacks, list | tuple) else ()):
        if not isinstance(callback, UserCallback):
            hint = f"; make one: {callback.__name__}()" if isinstance(callback, type) else ""
            raise ConfigurationError(
                f"RunConfig(callbacks=…): callbacks[{number}] is {callback!r:.80}, no UserCallback object{hint}"
            )


def check_runtime_env(runtime: object) -> None:
    """``env_vars`` of text, a ``working_dir`` that is there, and nothing else."""
    owner = "RunConfig(worker_runtime_env=…)"
    if runtime is None:
        return
    if not isinstance(runtime, Mapping):
        raise ConfigurationError(f"RunConfig(worker_runtime_env={runtime!r:.80}): it must be a dict")
    refuse_unknown("worker_runtime_env", map(str, runtime), ("env_vars", "working_dir"))
    variables, folder = runtime.get("env_vars"), runtime.get("working_dir")
    if variables is not None and not isinstance(variables, Mapping):
        raise ConfigurationError(f"{owner}: env_vars must be a dict of text, not {variables!r:.80}")
    for name, value in (variables or {}).items():
        if not is_text(name) or "=" in name or "\0" in name:
            raise ConfigurationError(f"{owner}: env_vars has the name {name!r:.80}; a name is text without '='")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigurationError(
                f"{owner}: env_vars[{name!r}] is {value!r:.80}; write it as text: {str(value)!r:.40}"
            )
    if folder is None:
        return
    if not (is_text(folder) or isinstance(folder, os.PathLike)) or not os.path.isdir(os.path.expanduser(folder)):
        raise ConfigurationError(f"{owner}: working_dir={folder!r:.80} is no folder of this machine")


def check_name(name: object) -> None:
    """A run's name becomes a folder's, so it must be one."""
    if not isinstance(name, str):
        raise ConfigurationError(f"RunConfig(name={name!r}): a run's name must be text")
    if not _NAME.fullmatch(name) or name in (".", "..") or name != name.strip():
        raise ConfigurationError(
            f"RunConfig(name={name!r}): a run's name is the name of its folder, so it can hold no slash, backslash or "
            "control character, cannot be '.' or '..', nor start or end with a space, and has at most 200 characters. "
            "Put folders into storage_path."
        )
