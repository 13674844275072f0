"""What every engine and every store must pass: subclass a contract in a test module and say how one is made."""

from __future__ import annotations

from holdfast.testing.engine_contract import EngineContract
from holdfast.testing.store_contract import StoreContract

__all__ = ["EngineContract", "StoreContract"]
