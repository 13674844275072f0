"""The driver process's own part: one background thread with an event loop and an engine, made when first needed.

It lives until ``shutdown`` or the end of the process, so that a second ``fit`` finds its agents running. The thread is
ours alone: ``fit`` may be called from any thread, from a notebook with a running loop, or from a thread that ends right
after.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast import faultpoints
from holdfast.engine.agent import threads
from holdfast.engine.local import LocalEngine
from holdfast.errors import ConfigurationError, ControllerError

T = TypeVar("T")
THREADS = 16


class Driver:
    """A loop in a thread, a pool for blocking calls, and an engine."""

    def __init__(self, **options: Any) -> None:
        if faultpoints.VARIABLE in os.environ:
            faultpoints.arm_from_environment()
        self._loop = asyncio.new_event_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-io")
        self.run: Callable[..., Any] = threads(self._pool)
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._runs: set[asyncio.Task[Any]] = set()
        try:
            self.engine = self.call(self._make_engine(options)).result()
        except BaseException:
            self._end()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the driver's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self, what: str, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the driver's loop that ends with an error when this driver is closed."""
        with self._closing:
            if not self._closed:
                return self.call(self._until_closed(what, work))
        work.close()
        raise _shut_down(what)

    async def _until_closed(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._runs.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._closed:
                raise _shut_down(what) from None
            raise
        finally:
            self._runs.discard(task)

    def close(self) -> None:
        with self._closing:
            self._closed = True
        self.call(self._close()).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown()
        self._loop.close()

    async def _make_engine(self, options: dict[str, Any]) -> LocalEngine:
        asyncio.get_running_loop().set_default_executor(self._pool)
        return LocalEngine(**options)

    async def _close(self) -> None:
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        await self.engine.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}  # what a run that was ended at once has left to do
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _shut_down(what: str) -> ControllerError:
    return ControllerError(f"{what} was ended by holdfast.shutdown(); call fit() again, with the same name, to go on")


_driver: Driver | None = None
_lock = threading.Lock()


def init(*, nodes: int | None = None, cpus_per_node: float | None = None, gpus_per_node: float = 0) -> None:
    """Choose the engine's shape before the first ``fit``: several virtual nodes on this machine."""
    global _driver
    if nodes is not None and (type(nodes) is not int or nodes < 1):
        raise ConfigurationError(f"init(nodes={nodes!r}): give a whole number of at least 1")
    if cpus_per_node is not None and (type(cpus_per_node) not in (int, float) or not cpus_per_node > 0):
        raise ConfigurationError(f"init(cpus_per_node={cpus_per_node!r}): give a number above 0")
    if type(gpus_per_node) not in (int, float) or not gpus_per_node >= 0:
        raise ConfigurationError(f"init(gpus_per_node={gpus_per_node!r}): give a number, or 0 for none")
    with _lock:
        if _driver is not None and _driver.pid == os.getpid():
            raise ConfigurationError("holdfast is already running; call holdfast.shutdown() before another init()")
        _driver = Driver(nodes=nodes, cpus_per_node=cpus_per_node, gpus_per_node=gpus_per_node)


def current() -> Driver:
    """This process's driver, made now if there is none."""
    global _driver
    with _lock:
        if _driver is None or _driver.pid != os.getpid():
            _driver = Driver()
        return _driver


def shutdown() -> None:
    """End the runs of this process, whose ``fit`` raises, then every agent. A later ``fit`` starts new ones."""
    global _driver
    with _lock:
        driver, _driver = _driver, None
    if driver is not None and driver.pid == os.getpid():
        driver.close()


atexit.register(shutdown)
