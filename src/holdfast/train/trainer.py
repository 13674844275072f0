"""``DataParallelTrainer``: checks what was asked before anything starts, runs it, and gives back a result."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from holdfast.errors import ConfigurationError
from holdfast.train import program
from holdfast.train.config import DEFAULT_STORAGE, RunConfig, ScalingConfig
from holdfast.train.options import refuse_unknown, require
from holdfast.train.result import Result

if TYPE_CHECKING:
    from holdfast.train.run import Ask, Run

T = TypeVar("T")
_GO_ON = (
    "A run goes on by itself: make the trainer with the same storage_path and name in its RunConfig and call fit(), "
    "and train.get_checkpoint() gives the newest checkpoint"
)


class DataParallelTrainer:
    """Runs one function on several workers, and keeps the run alive.

    ``train_loop_per_worker`` is called on every worker with ``train_loop_config``, or with nothing if it takes nothing.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **unknown: Any,
    ) -> None:
        owner = type(self).__name__
        if unknown.pop("resume_from_checkpoint", None) is not None:
            raise ConfigurationError(
                f"{owner}(resume_from_checkpoint=…) is no longer an option. {_GO_ON}. To start a new run from the "
                "checkpoint of another one, pass that checkpoint in train_loop_config and load it where "
                "train.get_checkpoint() is None."
            )
        refuse_unknown(owner, unknown, ("train_loop_config", "scaling_config", "run_config"))
        given = train_loop_config
        require(given is None or isinstance(given, Mapping), owner, "train_loop_config", given, "a dict")
        for name, value, kind in (
            ("scaling_config", scaling_config, ScalingConfig),
            ("run_config", run_config, RunConfig),
        ):
            require(value is None or isinstance(value, kind), owner, name, value, f"a {kind.__name__}")
        from holdfast.train import run  # here, for a worker imports this module and must not load the driver's side

        self._runs = run
        self._function = program.check_function(train_loop_per_worker)
        self._config = train_loop_config
        self._scaling = scaling_config or ScalingConfig()
        self._run_config = run_config or RunConfig()

    def fit(self) -> Result:
        """Run to the end and return the result; TrainingFailedError when the run gives up.

        The same ``storage_path`` and ``name`` go on from the newest committed checkpoint; a run that has finished
        returns its result at once.

        In the main thread of a process that has left SIGTERM as it was, SIGTERM is a notice of preemption meanwhile:
        the workers have ``preemption_grace_s`` to save, then the run stops and PreemptionError is raised.
        """
        run = self._runs.Run(self._ask())
        with _told_by_sigterm(run):
            return _wait(run.start(), run)

    @classmethod
    def restore(cls, *arguments: Any, **options: Any) -> NoReturn:
        """Not here any more; the error says what to do instead."""
        raise ConfigurationError(f"{cls.__name__}.restore is no longer there. {_GO_ON}.")

    @classmethod
    def can_restore(cls, *arguments: Any, **options: Any) -> NoReturn:
        """Not here any more; the error says what to do instead."""
        raise ConfigurationError(f"{cls.__name__}.can_restore is no longer there, nothing has to be asked. {_GO_ON}.")

    def _ask(self) -> Ask:
        """Everything that the run needs to know, checked."""
        config = self._run_config
        now = datetime.datetime.now().astimezone()
        return self._runs.Ask(
            name=config.name or f"{_short_name(self._function)}_{now:%Y-%m-%d_%H-%M-%S-%f}",
            storage_path=os.fspath(config.storage_path or DEFAULT_STORAGE),
            scaling=self._scaling,
            run_config=config,
            function=program.name_of(self._function),
            body=program.pack(self._function, self._config),  # first: it names what cannot be pickled
            fingerprint=program.fingerprint(self._config),
            environment=program.environment(self._function, config.worker_runtime_env or {}),
        )


@contextlib.contextmanager
def _told_by_sigterm(run: Run) -> Iterator[None]:
    """Only the main thread may set a handler, and the user's own is left alone."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda number, frame: run.preempt())
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait(running: concurrent.futures.Future[T], run: Run) -> T:
    """Wait for the run. The first Ctrl-C stops it cleanly, the second ends it at once."""
    try:
        return running.result()
    except KeyboardInterrupt:
        if running.done():
            raise
        run.stop("interrupted by Ctrl-C")
    try:
        running.result()
    except KeyboardInterrupt:
        run.abandon()
        raise
    except concurrent.futures.CancelledError:
        pass
    raise KeyboardInterrupt


def _short_name(function: Callable[..., Any]) -> str:
    name = program.name_of(function).rpartition(":")[2].rpartition(".")[2]
    if not name.isidentifier():
        return "run"
    return name
