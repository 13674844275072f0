"""Both stores keep the promises of the contract, and what each adds to them."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from holdfast.storage.files import FileStore
from holdfast.storage.store import Store, open_store
from holdfast.testing.store_contract import StoreContract


class TestFileStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_store(self) -> Store:
        return FileStore(self.root / "not" / "there" / "yet")


class TestObjectStore(StoreContract):
    def make_store(self) -> Store:
        return open_store(f"memory://{secrets.token_hex(8)}/some/prefix/")


class TestChildOfObjectStore(StoreContract):
    def make_store(self) -> Store:
        return open_store(f"memory://{secrets.token_hex(8)}").child("run")
