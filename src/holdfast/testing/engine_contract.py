"""What every engine must pass. Subclass ``EngineContract`` in a test module and give it ``make_engine``.

Each check drives the engine as a controller does, with messages alone, and real agents and workers below.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import psutil

from holdfast.engine.base import Engine, Gang
from holdfast.errors import EngineError
from holdfast.wire import messages as m
from holdfast.wire.metrics import decode_metrics

PATIENCE_S = 20.0
M = TypeVar("M", bound=m.Message)


class Ears:
    """A listener that remembers, and wakes who waits."""

    def __init__(self) -> None:
        self.said: list[tuple[str, m.FromAgent]] = []
        self.lost: list[tuple[str, str]] = []
        self._news = asyncio.Event()

    def agent_said(self, node: str, message: m.FromAgent) -> None:
        self.said.append((node, message))
        self._news.set()

    def node_lost(self, node: str, reason: str) -> None:
        self.lost.append((node, reason))
        self._news.set()

    def of(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.said if isinstance(message, kind)]

    async def until(self, satisfied: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not satisfied():
                self._news.clear()
                await self._news.wait()


class EngineContract(ABC):
    """The promises of ``holdfast.engine.base``, as tests."""

    @abstractmethod
    def make_engine(self) -> Engine:
        """A fresh engine with room for at least four workers of one CPU. Called on a running event loop."""

    @abstractmethod
    def agent_pid(self, engine: Engine, node: str) -> int:
        """The agent's process on a node."""

    def test_a_gang_gets_a_node_for_each_rank_and_neighbours_stand_together(self) -> None:
        async def use(engine: Engine, _: Ears) -> None:
            nodes = [node.name for node in await engine.reserve(Gang(size=4))]
            assert len(nodes) == 4
            assert nodes == sorted(nodes)

        self._run(use)

    def test_a_gang_that_does_not_fit_is_refused_whole(self) -> None:
        async def use(engine: Engine, _: Ears) -> None:
            try:
                await engine.reserve(Gang(size=2, gpus=1000.0, timeout_s=2.0))
            except EngineError as error:
                text = str(error)
                assert "2 workers" in text
                assert "1000 GPUs" in text
                assert "missing" in text
            else:
                raise AssertionError("a thousand GPUs were granted")

        self._run(use)

    def test_a_worker_starts_speaks_in_order_and_ends(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _count, 1)
            await ears.until(lambda: bool(ears.of(m.Exited)))
            order = [type(message) for _, message in ears.said if not isinstance(message, m.Prepared | m.Rows)]
            assert order == [m.WorkerStarted, m.Returned, m.Exited]
            assert ears.of(m.Exited)[0].status == 0
            rows = [row for said in ears.of(m.Rows) for row in decode_metrics(b"[" + said.rows + b"]")]
            assert rows == [{"step": step} for step in range(5000)]

        self._run(use)

    def test_killing_a_group_ends_each_of_its_workers(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            group = await _start(engine, tmp_path, _sleep, 2)
            await ears.until(lambda: len(ears.of(m.WorkerStarted)) == 2)
            for node in {node for node, _ in ears.said}:
                engine.send(node, m.KillGroup(group, 1))
            await ears.until(lambda: len(ears.of(m.Exited)) == 2)
            assert all(said.ours and said.status == -signal.SIGKILL for said in ears.of(m.Exited))

        self._run(use)

    def test_a_death_is_told_with_its_signal_after_the_last_report(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _report_and_die, 1)
            await ears.until(lambda: bool(ears.of(m.Exited)))
            (said,) = ears.of(m.Exited)
            assert (said.status, said.ours, said.lost) == (-signal.SIGKILL, False, False)
            assert sum(rows.count for rows in ears.of(m.Rows)) == 3
            assert ears.said[-1][1] == said

        self._run(use)

    def test_the_loss_of_a_node_is_told_once_and_it_is_replaced(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _sleep, 1)
            await ears.until(lambda: bool(ears.of(m.WorkerStarted)))
            node = ears.said[-1][0]
            os.kill(self.agent_pid(engine, node), signal.SIGKILL)
            await ears.until(lambda: bool(ears.lost))
            (replaced,) = await engine.reserve(Gang(size=1))
            assert [name for name, _ in ears.lost] == [node]
            assert replaced.incarnation == 2
            said = len(ears.said)
            await _start(engine, tmp_path, _count, 1)
            await ears.until(lambda: bool(ears.of(m.Returned)))
            assert not [message for _, message in ears.said[said:] if isinstance(message, m.Exited) and message.lost]

        self._run(use)

    def test_a_slow_controller_holds_the_workers_back(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _flood, 1)
            await ears.until(lambda: bool(ears.of(m.Rows)))
            agent = psutil.Process(self.agent_pid(engine, ears.said[-1][0]))
            before = agent.memory_info().rss
            time.sleep(2.0)  # noqa: ASYNC251 the point is that this loop does not run
            grown = agent.memory_info().rss - before
            assert grown < 64 << 20, f"the agent grew by {grown} bytes"

        self._run(use)

    def test_nothing_arrives_during_a_pause_and_everything_after_it(self, tmp_path: Path) -> None:
        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _flood, 1)
            await ears.until(lambda: bool(ears.of(m.Rows)))
            engine.pause(ears)
            await asyncio.sleep(0.5)  # what was on its way
            heard = len(ears.said)
            await asyncio.sleep(0.5)
            assert len(ears.said) == heard
            engine.resume(ears)
            await ears.until(lambda: len(ears.said) > heard)
            engine.pause(ears)  # and is closed like that
            rows = ears.of(m.Rows)
            assert [said.first for said in rows[1:]] == [said.first + said.count for said in rows[:-1]]

        self._run(use)

    def test_closing_ends_every_agent(self, tmp_path: Path) -> None:
        pids: list[int] = []

        async def use(engine: Engine, ears: Ears) -> None:
            await _start(engine, tmp_path, _sleep, 2)
            await ears.until(lambda: len(ears.of(m.WorkerStarted)) == 2)
            pids.extend(said.pid for said in ears.of(m.WorkerStarted))
            pids.extend(self.agent_pid(engine, node) for node in {node for node, _ in ears.said})

        self._run(use)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    def _run(self, use: Callable[[Engine, Ears], Awaitable[None]]) -> None:
        async def main() -> None:
            engine = self.make_engine()
            ears = Ears()
            engine.attach(ears)
            try:
                await use(engine, ears)
            finally:
                engine.detach(ears)
                await engine.close()

        asyncio.run(main())


async def _start(engine: Engine, folder: Path, function: Callable[[], Any], size: int) -> str:
    """Start a group of workers as the dispatcher does; its name."""
    group = f"contract/{secrets.token_hex(4)}"
    environment = m.Environment()
    nodes = await engine.reserve(Gang(size=size))
    for node in dict.fromkeys(nodes):
        engine.send(node.name, m.Prepare(environment))
        engine.send(node.name, m.Program(group, cloudpickle.dumps((function, ()))))
    for rank, node in enumerate(nodes):
        context = m.WorkerContext(
            run="contract",
            group=group,
            attempt=1,
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            node_rank=0,
            node=node.name,
            storage_uri=str(folder),
            run_ahead=1 << 60,
        )
        engine.send(node.name, m.StartWorker(context, group, environment, f"logs/{rank}.log", False))
    return group


def _count() -> None:
    from holdfast.worker import session

    for step in range(5000):
        session.current("contract").report(b'{"step":%d}' % step, None)


def _flood() -> None:
    from holdfast.worker import session

    row = b'{"filler":"' + b"x" * 1000 + b'"}'
    while True:
        session.current("contract").report(row, None)


def _report_and_die() -> None:
    from holdfast.worker import session

    for _ in range(3):
        session.current("contract").report(b"{}", None)
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    signal.pause()
