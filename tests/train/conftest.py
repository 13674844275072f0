"""What the tests of training share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import faultpoints
from tests.train.runs import Gate


@pytest.fixture(autouse=True)
def _no_faults_left_armed() -> Iterator[None]:
    yield
    faultpoints.disarm()


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Arms a fault in every process of the jobs that this test starts; each fires once, in one of them."""
    armed: list[str] = []

    def arm_one(name: str, action: str, *, once: bool = True, **where: object) -> None:
        options = {**where, "once": tmp_path / f"fired-{len(armed)}"} if once else where
        armed.append(f"{name}:{action}:{','.join(f'{key}={value}' for key, value in options.items())}")
        monkeypatch.setenv(faultpoints.VARIABLE, ";".join(armed))

    return arm_one


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., Gate]:
    def make(*ranks: int) -> Gate:
        return Gate(tmp_path / "gate", ranks or (0,))

    return make


@pytest.fixture
def small_memory_group() -> Iterator[str]:
    """A memory control group of 64 MB, or nothing where this user may make none."""
    limit = 64 << 20
    for parent, setting in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"holdfast-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / setting).write_text(str(limit))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        yield str(group)
        group.rmdir()
        return
    yield ""
