"""The engine of one machine keeps the engines' contract, over unix sockets and TCP, on one node and on several."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.engine.base import Engine, Gang
from holdfast.engine.local import RUNTIME_VARIABLE, LocalEngine
from holdfast.errors import ConfigurationError, EngineError
from holdfast.testing.contracts import EngineContract


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


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_runtime_folder_that_cannot_be_used_is_named_with_what_to_do(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(RUNTIME_VARIABLE, f"{tmp_path}/file{below}")

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=rf"{tmp_path}/file.*set {RUNTIME_VARIABLE} to a folder"):
            LocalEngine()

    asyncio.run(main())


def test_a_node_that_the_system_does_not_let_start_is_an_engine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "r"
    monkeypatch.setenv(RUNTIME_VARIABLE, str(runtime))

    async def main() -> None:
        engine = LocalEngine()
        shutil.rmtree(runtime)
        runtime.touch()
        try:
            with pytest.raises(EngineError, match=r"the agent of node-0 cannot be started: .*Not a directory"):
                await engine.reserve(Gang(size=1))
        finally:
            await engine.close()

    asyncio.run(main())
