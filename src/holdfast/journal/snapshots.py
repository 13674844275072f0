"""Snapshots: ``journal/snapshot-<position>.json``, each whole by itself, the newest two kept.

A snapshot saves time, never truth: with every snapshot gone the records alone tell the same. This module must never
delete a record.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from holdfast.errors import MissingError
from holdfast.journal.log import Snapshot
from holdfast.storage.envelope import seal, unseal
from holdfast.storage.store import Store

_KEY = re.compile(r"journal/snapshot-(\d+)\.json")


class _Kept(msgspec.Struct, frozen=True):
    position: int
    segment: int
    state: msgspec.Raw


class Found(NamedTuple):
    snapshot: Snapshot
    segment: int
    """The last segment of a bucket's journal whose records are all in the snapshot; 0 on files."""


_decoder = msgspec.json.Decoder(_Kept)


def snapshot_key(position: int) -> str:
    return f"journal/snapshot-{position:012d}.json"


def snapshot_keys(keys: list[str]) -> list[str]:
    """Those of these keys that are snapshots, the oldest first."""
    return sorted(key for key in keys if _KEY.fullmatch(key))


def write_snapshot(store: Store, snapshot: Snapshot, segment: int) -> str:
    kept = _Kept(snapshot.position, segment, msgspec.Raw(snapshot.state))
    key = snapshot_key(snapshot.position)
    store.put(key, seal(msgspec.json.encode(kept)))
    return key


def newest_snapshot(store: Store, keys: list[str]) -> Found | None:
    """The newest of these snapshots that is whole."""
    for key in reversed(snapshot_keys(keys)):
        try:
            kept = _decoder.decode(unseal(store.read(key)) or b"")
        except (msgspec.DecodeError, MissingError):
            continue
        return Found(Snapshot(kept.position, bytes(kept.state)), kept.segment)
    return None
