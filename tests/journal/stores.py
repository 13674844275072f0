"""The stores that a journal is tried on. Segments lie in files too, so that several processes share them."""

from __future__ import annotations

from pathlib import Path

from holdfast.storage.files import FileStore
from holdfast.storage.store import Store

KINDS = ("files", "segments")


class SegmentStore(FileStore):
    """A store that cannot append, as a bucket cannot."""

    appends = False

    def appender(self, key: str) -> None:  # type: ignore[override]
        return None

    def is_held(self, key: str) -> None:
        return None


class CarelessStore(SegmentStore):
    """A store that ignores the condition of ``create``, as some imitations of S3 do."""

    def create(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def make_store(kind: str, root: Path) -> Store:
    return {"files": FileStore, "segments": SegmentStore, "careless": CarelessStore}[kind](root)
