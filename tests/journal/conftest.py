"""Runs on files and on segments, and a disk that fills up."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.storage.store import Store
from tests.journal.stores import KINDS, make_store


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, where nothing is gained by waiting for a disk."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-journal-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, quick: Path) -> Store:
    return make_store(kind, quick / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
