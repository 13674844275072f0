"""The engine of one machine keeps the engines' contract, over unix sockets and TCP, on one node and on several."""

from __future__ import annotations

from typing import ClassVar

from holdfast.engine.base import Engine
from holdfast.engine.local import LocalEngine
from holdfast.testing.engine_contract import EngineContract


class LocalContract(EngineContract):
    options: ClassVar[dict[str, object]] = {}

    def make_engine(self) -> Engine:
        return LocalEngine(**self.options)  # type: ignore[arg-type]

    def agent_pid(self, engine: Engine, node: str) -> int:
        assert isinstance(engine, LocalEngine)
        pid = engine.agent_pid(node)
        assert pid is not None
        return pid


class TestOneNode(LocalContract):
    pass


class TestOverTcp(LocalContract):
    options: ClassVar[dict[str, object]] = {"transport": "tcp"}


class TestThreeNodes(LocalContract):
    options: ClassVar[dict[str, object]] = {"nodes": 3, "cpus_per_node": 2}
