"""One run from its driver's side: opened, driven by the controller until it ends, and told."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from holdfast import __version__, faultpoints
from holdfast.control.dispatch import Dispatcher, Job
from holdfast.control.group import FLOOR_STEP
from holdfast.control.loop import Controller
from holdfast.control.preemption import DRIVER
from holdfast.control.recover import Recovered, open_run
from holdfast.control.retention import Policy
from holdfast.control.vocabulary import DirectoriesFound, PreemptionSeen, StopAsked
from holdfast.engine.base import Gang
from holdfast.engine.driver import current
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    JournalError,
    PreemptionError,
    StorageError,
)
from holdfast.journal.epochs import this_process
from holdfast.journal.facts import RankFailure, RunOpened
from holdfast.journal.fold import read_facts
from holdfast.journal.open import read_records
from holdfast.journal.requests import asked_to_stop, forget_requests
from holdfast.observe.console import Console, say
from holdfast.observe.history import History
from holdfast.storage.store import Store, open_store
from holdfast.train import machine
from holdfast.train.audience import Audience, ErrorOf
from holdfast.train.callbacks import TrainRunContext
from holdfast.train.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from holdfast.train.result import LOGS, RUN_FILE, Result, failure_of, rank_error, result_of
from holdfast.wire.messages import Environment

RUN_AHEAD = 1000
LOOK_S = 1.0
"""How often the driver looks for a request to stop."""


class Ask(msgspec.Struct, frozen=True):
    """What ``fit`` was asked to do, checked."""

    name: str
    storage_path: str
    scaling: ScalingConfig
    run_config: RunConfig
    function: str
    fingerprint: str
    body: bytes
    environment: Environment

    @property
    def failure(self) -> FailureConfig:
        return self.run_config.failure_config or FailureConfig()

    @property
    def limits(self) -> dict[str, int]:
        failure = self.failure
        return {
            "max_failures": failure.max_failures,
            "controller_failure_limit": failure.controller_failure_limit,
            "max_preemption_failures": failure.max_preemption_failures,
        }

    @property
    def settings(self) -> machine.Settings:
        keep = self.run_config.checkpoint_config or CheckpointConfig()
        policy = Policy(keep.num_to_keep, keep.checkpoint_score_attribute, keep.checkpoint_score_order)
        return machine.Settings(
            self.scaling.num_workers,
            self.limits,
            policy,
            floor_step=1 if self.run_config.report_barrier else FLOOR_STEP,
            stop_on_repeat=self.failure.stop_on_repeat,
            hang_timeout_s=self.failure.hang_timeout_s,
            preemption_grace_s=self.failure.preemption_grace_s,
        )

    @property
    def context(self) -> TrainRunContext:
        named = dataclasses.replace(self.run_config, name=self.name, storage_path=self.storage_path)
        return TrainRunContext(named, self.scaling)

    @property
    def gang(self) -> Gang:
        return Gang(size=self.scaling.num_workers)


class Run:
    """One call of ``fit``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._store = _checked_store(ask)
        self._driver = current()
        self._driver.engine.check(ask.gang)
        self._controller: Controller | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stop_reason = ""
        self._preempted = False

    def start(self) -> concurrent.futures.Future[Result]:
        """Begin, on the driver's own loop."""
        return self._driver.begin(f"the run {self._ask.name!r}", self._fit())

    async def _fit(self) -> Result:
        """Take the run to its end."""
        self._task = asyncio.current_task()
        earlier = await self._driver.run(_look, self._store)
        self._check_same_run(earlier)
        if earlier.status == machine.FINISHED and earlier.opened[-1].fingerprint == self._ask.fingerprint:
            return self._finished_before(earlier)
        warm = asyncio.ensure_future(self._warm_up())
        try:
            recovered = await self._open()
            history = await self._catch_up(recovered, earlier)
            if recovered.state.status == machine.FINISHED and recovered.state.fingerprint == self._ask.fingerprint:
                await self._driver.run(recovered.log.close)
                return self._finished_before(history)
            return await self._drive(recovered, history)
        finally:
            await asyncio.gather(warm, return_exceptions=True)

    def stop(self, reason: str) -> None:
        """Ask for a clean stop, from any thread."""
        self._driver.call(self._stop(reason, "; press Ctrl-C again to end at once"))

    def abandon(self) -> None:
        """End at once, from any thread; the run can be resumed all the same."""
        self._driver.call(self._cancel())

    async def _stop(self, reason: str, hint: str = "") -> None:
        self._stop_reason = reason
        say(f"stopping ({reason}){hint}")
        if self._controller is not None:
            self._controller.post(StopAsked(at=time.time(), reason=reason))

    def preempt(self) -> None:
        """This process is about to be ended: give the ranks their grace, then stop. From any thread."""
        self._driver.call(self._preempt())

    async def _preempt(self) -> None:
        self._preempted = True
        if self._controller is not None:
            self._controller.post(PreemptionSeen(at=time.time(), node=DRIVER))

    async def _watch_requests(self, epoch: int) -> None:
        """Stop cleanly when another process asks for it. A store that refuses is asked again at the next look."""
        with contextlib.suppress(StorageError):
            await self._driver.run(forget_requests, self._store, epoch)
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(StorageError):
                if await self._driver.run(asked_to_stop, self._store, epoch):
                    await self._stop("asked by `holdfast stop`")

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _warm_up(self) -> None:
        """Have the agents start while the journal is opened; what goes wrong here is met again, and told, later."""
        with contextlib.suppress(HoldfastError):
            await self._driver.engine.reserve(self._ask.gang)

    def _check_same_run(self, earlier: History) -> None:
        if earlier.opened and earlier.opened[-1].function != self._ask.function:
            raise ConfigurationError(
                f"{self._store.uri} holds the run of another function: it was started with "
                f"{earlier.opened[-1].function}, and this script has {self._ask.function}. "
                "Use another name, or another storage_path."
            )

    def _finished_before(self, history: History) -> Result:
        say(f"run {self._ask.name!r} has finished before; its result is read from {self._store.uri}")
        return result_of(history, self._store.uri, self._ask.settings.retention)

    async def _open(self) -> Recovered[machine.TrainState]:
        settings = machine.TrainMachine(self._ask.settings)
        take_over = self._ask.run_config.take_over

        def take() -> Recovered[machine.TrainState]:
            return open_run(
                self._store,
                this_process(),
                machine.TrainState,
                machine.new_state,
                settings.apply,
                take_over=take_over,
            )

        recovered: Recovered[machine.TrainState] = await self._driver.run(take)
        return recovered

    async def _catch_up(self, recovered: Recovered[machine.TrainState], earlier: History) -> History:
        """The history up to the moment at which the run became ours; what went before it may have gone on meanwhile."""
        try:
            unknown = machine.unknown_to(recovered.state, recovered.directories)
            if unknown:
                raise JournalError(
                    f"{self._store.uri} holds {', '.join(unknown)}, of which its journal knows nothing: a part of the "
                    "journal is missing. Restore the folders journal and epochs, or start a new run under another name."
                )
            if recovered.log.position == earlier.seen:
                return earlier
            history: History = await self._driver.run(_look, self._store)
            self._check_same_run(history)
            return history
        except BaseException:
            await self._driver.run(recovered.log.close)
            raise

    def _write_run_file(self) -> None:
        asked = {
            "name": self._ask.name,
            "function": self._ask.function,
            "train_loop_config_fingerprint": self._ask.fingerprint,
            "num_workers": self._ask.scaling.num_workers,
            "limits": self._ask.limits,
            "retention": self._ask.settings.retention,
            "holdfast": __version__,
        }
        self._store.put(RUN_FILE, msgspec.json.format(msgspec.json.encode(asked)))

    async def _drive(self, recovered: Recovered[machine.TrainState], history: History) -> Result:
        history.forgetful = True
        console = Console(
            self._ask.name,
            self._store.uri,
            history=history,
            limits=self._ask.limits,
            later=asyncio.get_running_loop().call_later,
            resume=self._resume_hint(),
        )
        console.opened(self._driver.engine.description, self._ask.scaling.num_workers)
        crowded = self._driver.engine.notice(self._ask.gang)
        if crowded:
            console.notice(crowded)
        self._notice_changes(recovered.state, console)
        holder = this_process()

        def error_of(attempt: int, failure: RankFailure) -> Callable[[], BaseException]:
            pickled = dispatcher.pickled_errors.get((attempt, failure.rank), b"")
            return lambda: _live_error(failure, pickled)

        audience = Audience(self._ask.run_config.callbacks or (), self._ask.context, self._store.uri, error_of=error_of)
        controller = Controller(
            machine.TrainMachine(self._ask.settings),
            recovered.state,
            recovered.log,
            self._driver.run,
            time.time,
            observers=(history.apply, console.observe, audience.observe),
            lease_s=holder.lease_s,
        )
        dispatcher = Dispatcher(
            self._job(),
            controller,
            self._driver.engine,
            self._store,
            self._driver.run,
            on_output=console.output,
            on_notice=console.notice,
        )
        controller.hands = dispatcher
        self._controller = controller
        requests = asyncio.ensure_future(self._watch_requests(recovered.log.epoch))
        async with audience:
            try:
                self._begin(controller, recovered)
                await self._driver.run(self._write_run_file)
                await controller.wait()
            finally:
                requests.cancel()
                await dispatcher.close()
                console.close()
                await asyncio.shield(controller.close())
        console.ended(time.time())
        return self._outcome(history, dispatcher, error_of)

    def _resume_hint(self) -> str:
        """What to do to go on with this run."""
        if self._ask.run_config.name is not None:
            return "run the same script again to resume"
        return f"to resume, pass RunConfig(name={self._ask.name!r}, storage_path={self._ask.storage_path!r})"

    def _begin(self, controller: Controller, recovered: Recovered[machine.TrainState]) -> None:
        state, log = recovered.state, recovered.log
        controller.remember(
            RunOpened(
                at=time.time(),
                epoch=log.epoch,
                host=os.uname().nodename,
                pid=os.getpid(),
                function=self._ask.function,
                fingerprint=self._ask.fingerprint,
                restarted=state.status != machine.LIVE,
                fresh_budget=state.status == machine.FAILED,
            )
        )
        faultpoints.reach("driver.opened")
        if recovered.directories:
            controller.post(DirectoriesFound(at=time.time(), directories=recovered.directories))
        if self._stop_reason:
            controller.post(StopAsked(at=time.time(), reason=self._stop_reason))
        if self._preempted:
            controller.post(PreemptionSeen(at=time.time(), node=DRIVER))
        controller.settle()

    def _notice_changes(self, state: machine.TrainState, console: Console) -> None:
        if state.fingerprint and state.fingerprint != self._ask.fingerprint:
            console.notice("train_loop_config has changed since the last driver; the run goes on with the new one")
        if state.status == machine.FAILED:
            console.notice("the run had failed; it is tried again with a fresh failure budget")

    def _job(self) -> Job:
        return Job(
            run=self._ask.name,
            token=secrets.token_hex(4),
            program=self._ask.body,
            environment=self._ask.environment,
            storage_timeout_s=self._ask.failure.storage_timeout_s,
            echo=self._ask.run_config.echo,
            log_directory=LOGS,
            gang=self._ask.gang,
            run_ahead=0 if self._ask.run_config.report_barrier else RUN_AHEAD,
        )

    def _outcome(self, history: History, dispatcher: Dispatcher, error_of: ErrorOf) -> Result:
        if history.status == machine.FAILED:
            raise failure_of(history, self._store.uri, lambda failure: error_of(max(history.attempts), failure)())
        if history.status == machine.STOPPED and history.reason == machine.PREEMPTED:
            raise PreemptionError(f"the run was {history.reason}; {self._resume_hint()}")
        result = result_of(history, self._store.uri, self._ask.settings.retention)
        if dispatcher.pickled_value:
            result.return_value = cloudpickle.loads(dispatcher.pickled_value)
        return result


def _checked_store(ask: Ask) -> Store:
    """The run's own store, once it is certain that it can be written."""
    parent = open_store(ask.storage_path)
    if not parent.appends:
        raise ConfigurationError(
            f"RunConfig(storage_path={ask.storage_path!r}): training in a bucket is not there yet; name a folder, on "
            "this machine or shared"
        )
    folder = parent.local_path(ask.name)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ConfigurationError(
            f"RunConfig(name={ask.name!r}): the run's folder cannot be made, for {folder} is a file. Use another name."
        )
    try:
        parent.check_writable()
    except StorageError as error:
        raise ConfigurationError(
            f"RunConfig(storage_path={ask.storage_path!r}) cannot be written: {error}. Name a folder "
            "that you may write."
        ) from error
    return parent.child(ask.name)


def _look(store: Store) -> History:
    """What the journal tells, without taking the run."""
    history = History()
    with contextlib.suppress(StorageError):
        for fact in read_facts(read_records(store)):
            history.apply(fact)
    return history


def _live_error(failure: RankFailure, pickled: bytes) -> BaseException:
    """The rank's own exception where it could travel, or an error that says what happened to it."""
    if pickled:
        with contextlib.suppress(Exception):
            error: BaseException = cloudpickle.loads(pickled)
            error.add_note(f"On rank {failure.rank}:\n{failure.traceback}")
            return error
    return rank_error(failure)
