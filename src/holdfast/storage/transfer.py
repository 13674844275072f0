"""Directories into a store and out of it.

``upload`` belongs to an event loop, whose time and threads are not its own: whoever calls it gives it ``run``, which
runs a blocking call elsewhere. ``download`` blocks. Neither makes a checkpoint: that is the manifest's work. Neither
must ever leave behind something that could be taken for a whole one.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast import faultpoints
from holdfast.errors import DamagedError, MissingError, StorageError
from holdfast.storage.manifest import Manifest, confirm_entry
from holdfast.storage.store import MANIFEST, SourceError, Store
from holdfast.wire.messages import FileEntry

Run = Callable[..., Awaitable[Any]]
"""``await run(function, *arguments)`` runs a blocking call where it blocks nobody."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


async def upload(
    directory: Path,
    names: Iterable[str],
    store: Store,
    prefix: str,
    *,
    run: Run,
    parallel: int = 4,
    patience_s: float = 600.0,
    on_trouble: Callable[[Exception], None] = lambda error: None,
) -> tuple[FileEntry, ...]:
    """Copy these files of ``directory`` below ``prefix``; their entries, named as asked, in that order.

    A file that fails is tried again, ever more slowly, until it has failed for ``patience_s``; ``on_trouble`` hears
    of the first failure of each streak. When patience ends, everything that was written is removed and StorageError
    raised. A local file that cannot be read ends it at once.
    """
    wanted = list(names)
    if MANIFEST in wanted:
        raise SourceError(f"{MANIFEST!r} in {directory} would make {prefix!r} a checkpoint before it is one")
    job = _Upload(directory, store, prefix, run, patience_s, on_trouble)
    places = asyncio.Semaphore(parallel)

    async def one(name: str) -> FileEntry | None:
        async with places:
            return await job.file(name)

    entries = await asyncio.gather(*(one(name) for name in wanted))
    if job.failure is not None:
        await job.remove(wanted)
        raise job.failure
    return tuple(entry for entry in entries if entry is not None)


class _Upload:
    """The state that the files of one upload share."""

    def __init__(
        self,
        directory: Path,
        store: Store,
        prefix: str,
        run: Run,
        patience_s: float,
        on_trouble: Callable[[Exception], None],
    ) -> None:
        self.directory = directory
        self.store = store
        self.prefix = prefix
        self.run = run
        self.patience_s = patience_s
        self.on_trouble = on_trouble
        self.failure: StorageError | None = None
        self.failing = False

    async def file(self, name: str) -> FileEntry | None:
        """Copy one file; None when the upload as a whole has failed, which ``failure`` tells."""
        pause = _FIRST_PAUSE_S
        first_failure: float | None = None
        while self.failure is None:
            try:
                entry: FileEntry = await self.run(self._copy, name)
            except SourceError as error:
                self.failure = error
                return None
            except (StorageError, faultpoints.InjectedFault) as error:
                self._heard(error)
                now = asyncio.get_running_loop().time()
                first_failure = now if first_failure is None else first_failure
                left = first_failure + self.patience_s - now
                if left <= 0:
                    self.failure = StorageError(f"gave up {name!r} after {self.patience_s:g} s: {error}")
                    self.failure.__cause__ = error
                    return None
                await asyncio.sleep(min(pause, left))
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            else:
                self.failing = False
                return msgspec.structs.replace(entry, name=name)
        return None

    async def remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(StorageError):
                await self.run(self.store.delete, f"{self.prefix}/{name}")

    def _copy(self, name: str) -> FileEntry:
        faultpoints.reach("upload.file", file=name)
        return self.store.put_file(self.directory / name, f"{self.prefix}/{name}")

    def _heard(self, error: Exception) -> None:
        if not self.failing:
            self.failing = True
            self.on_trouble(error)


def download(store: Store, prefix: str, manifest: Manifest, target: Path, *, parallel: int = 4) -> None:
    """Copy a checkpoint to the new local directory ``target``, verified while copying.

    ``target`` appears whole or not at all; where it is there already, nothing happens. DamagedError when a file is
    missing or is not what was written.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".tmp-{target.name}-{secrets.token_hex(4)}"

    def one(entry: FileEntry) -> None:
        place = beside / entry.name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            found = store.fetch_file(f"{prefix}/{entry.name}", place)
        except MissingError as error:
            raise DamagedError(f"the file {entry.name!r} of the checkpoint {prefix!r} is missing") from error
        confirm_entry(store, prefix, entry, found)

    try:
        beside.mkdir()
        with ThreadPoolExecutor(max(1, min(parallel, len(manifest.files))), "holdfast-download") as threads:
            list(threads.map(one, manifest.files))
        try:
            beside.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise StorageError(f"cannot copy the checkpoint {prefix!r} to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
