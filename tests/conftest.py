"""Every test leaves the machine as it found it: see leaks.py for what is looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks

pytest.register_assert_rewrite("holdfast.testing.engine_contract", "holdfast.testing.store_contract")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported, so that whatever it starts inherits both. Short: socket paths go below it.
    os.environ[leaks.MARKER] = str(os.getpid())
    os.environ[leaks.RUNTIME_DIR] = tempfile.mkdtemp(prefix=f"hf-{os.getpid()}-", dir="/var/tmp")


def pytest_unconfigure(config: pytest.Config) -> None:
    base = os.environ.pop(leaks.RUNTIME_DIR, None)
    os.environ.pop(leaks.MARKER, None)
    if base:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, socket or runtime folder. Set up first and torn down last."""
    before = leaks.Snapshot.take()
    yield
    shutdown = getattr(sys.modules.get("holdfast"), "shutdown", None)
    if shutdown is not None:
        shutdown()
    leaked = before.leaked()
    if leaked:
        report = str(leaked)
        leaked.clean()
        pytest.fail(f"left behind after the test:\n{report}", pytrace=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, to be filled."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "holdfast-test", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)
