"""Runs on files and on segments, and a disk that fills up."""

from __future__ import annotations

import shutil
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
