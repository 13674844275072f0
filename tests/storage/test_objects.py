"""What the store on buckets adds to the contract."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage import objects
from holdfast.storage.store import open_store


def test_an_error_is_one_line_that_names_key_and_place() -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}/run")
    with pytest.raises(StorageError) as caught:
        store.put("a\nb", b"x")
    assert caught.value.__cause__ is not None
    assert str(caught.value).startswith(f"cannot write 'a\\nb' in {store.uri}: ")
    assert "Debug" not in str(caught.value)


def test_a_file_that_cannot_be_read_to_its_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}/run")
    source = tmp_path / "source"
    source.write_bytes(b"x" * (30 << 20))
    whole = objects._Reading.chunks

    def cut(self: objects._Reading) -> Iterator[bytes]:
        for number, chunk in enumerate(whole(self)):
            if number == 4:
                raise OSError(5, os.strerror(5))
            yield chunk

    monkeypatch.setattr(objects._Reading, "chunks", cut)
    with pytest.raises(StorageError, match="Input/output error"):
        store.put_file(source, "checkpoint/model")
    assert store.keys("") == []
