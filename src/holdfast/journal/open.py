"""The door to a run's journal: claim it and write, or read it and disturb nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from holdfast import faultpoints
from holdfast.errors import HoldfastError, JournalError, StorageError
from holdfast.journal.epochs import Wait, claim, closed_key
from holdfast.journal.file_log import open_file_log, read_file_records
from holdfast.journal.log import Holder, Log, Replay
from holdfast.journal.object_log import open_object_log, read_object_records, segment_numbers
from holdfast.storage.store import Store, honours_create


def open_log(store: Store, holder: Holder, *, take_over: bool = False, wait: Wait = time.sleep) -> tuple[Log, Replay]:
    """Claim the run for ``holder`` and go on where its journal ends.

    RunIsLiveError when another driver holds it, unless ``take_over``. ``wait(seconds)`` is called where only the
    holder's lease can tell whether it lives. JournalError when what lies there is damaged.
    """
    try:
        epoch = claim(store, holder, take_over=take_over, wait=wait)
        try:
            return _open(store, epoch)
        except HoldfastError:
            with suppress(StorageError):
                store.put(closed_key(epoch), b"{}")
            raise
    except StorageError as error:
        raise JournalError(f"cannot open the journal: {error}") from error


def _open(store: Store, epoch: int) -> tuple[Log, Replay]:
    faultpoints.reach("journal.claimed")
    if store.appends and not segment_numbers(store.keys("journal")):
        return open_file_log(store, epoch)
    return open_object_log(store, epoch, safe=honours_create(store, "epochs"))


def read_records(store: Store) -> Iterator[bytes]:
    """Every record from the beginning, up to the last whole one. Claims nothing, and is right while a driver writes."""
    keys = store.keys("journal")
    return read_object_records(store, keys) if segment_numbers(keys) else read_file_records(store, keys)
