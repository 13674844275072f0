"""An agent by itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.engine import agent as a
from holdfast.errors import StorageError
from holdfast.storage.files import FileStore


class Refusing(FileStore):
    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        raise StorageError("not now")


def test_a_store_that_refuses_is_asked_for_as_long_as_patience_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a, "VERIFY_PATIENCE_S", 0.6)
    agent = cast("Any", SimpleNamespace(_run=asyncio.to_thread))
    began = time.monotonic()
    error = asyncio.run(a.Agent._verify(agent, Refusing(tmp_path), "checkpoint_000000"))
    assert str(error) == "not now"
    assert 0.6 <= time.monotonic() - began < 1.0
