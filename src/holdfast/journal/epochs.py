"""Who drives a run: epochs, claimed one after the other, and whether the holder of one still lives.

``epochs/000003.json`` is created if absent and never changed: whoever created the highest number drives the run, and
every earlier driver is fenced, from the moment that file exists. Beside it lie ``000003.lease``, which the holder
rewrites while it lives, and ``000003.closed``, which says that it ended in peace.

A driver that lives is never displaced unless ``take_over`` says so. How a newcomer knows:

- ``.closed`` is there: it does not live.
- Same boot and same process namespace: its process is there, with the same start time, and is no zombie.
- Same boot, another namespace (containers): its journal file is locked. Where no lock can be seen, its lease.
- Another machine, or the same one since restarted: its lease. The newcomer waits one lease and sees whether the holder
  has rewritten it. No clock of another machine is ever read.

This module must never trust a claim that it did not make itself.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from datetime import datetime

import msgspec

from holdfast.errors import JournalError, MissingError, RunIsLiveError
from holdfast.journal.log import Holder
from holdfast.storage.store import Store

Wait = Callable[[float], None]

_RECORD = re.compile(r"epochs/(\d+)\.json")
_SLICES = 12
"""How often, while it waits one lease, a newcomer looks whether the holder has shown itself."""

_holders = msgspec.json.Decoder(Holder)


def this_process(lease_s: float = 30.0) -> Holder:
    """The holder that this process is, for one opening of a run."""
    return Holder(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        start_time=(_process(os.getpid()) or ("", ""))[1],
        started_at=time.time(),
        lease_s=lease_s,
        token=secrets.token_hex(8),
    )


def record_key(epoch: int) -> str:
    return f"epochs/{epoch:06d}.json"


def lease_key(epoch: int) -> str:
    return f"epochs/{epoch:06d}.lease"


def closed_key(epoch: int) -> str:
    return f"epochs/{epoch:06d}.closed"


def claim(store: Store, holder: Holder, *, take_over: bool, wait: Wait) -> int:
    """Claim the next epoch for ``holder``; its number. RunIsLiveError when another driver holds the run.

    Of several newcomers that find the same holder gone exactly one gets its place. The others find that one then, and
    not even ``take_over`` lets them displace it: it was said about the holder before.
    """
    record = msgspec.json.encode(holder)
    while True:
        highest = newest(store)
        if highest and not take_over:
            _confirm_gone(store, highest, wait)
        store.create(record_key(highest + 1), record)
        # What lies there tells, not the answer: an answer may be lost, and some stores ignore the condition.
        if _read(store, highest + 1) == holder:
            return highest + 1
        take_over = False


def newest(store: Store) -> int:
    """The highest epoch that was ever claimed; 0 for none."""
    found = (_RECORD.fullmatch(key) for key in store.keys("epochs"))
    return max((int(match[1]) for match in found if match), default=0)


def holder_of(store: Store) -> tuple[int, Holder] | None:
    """Who drives the run, or drove it last."""
    highest = newest(store)
    return (highest, _read(store, highest)) if highest else None


def is_live(store: Store, epoch: int, holder: Holder, wait: Wait) -> bool:
    """Whether the holder of this epoch still drives. May wait one lease."""
    if store.exists(closed_key(epoch)):
        return False
    if holder.boot_id and holder.boot_id == _boot_id():
        if holder.pid_namespace == _pid_namespace():
            return _process_lives(holder.pid, holder.start_time)
        held = _locks_journal(store, epoch)
        if held is not None:
            return held
    return _renews(store, epoch, holder.lease_s, wait)


def _confirm_gone(store: Store, epoch: int, wait: Wait) -> None:
    holder = _read(store, epoch)
    if not is_live(store, epoch, holder, wait):
        return
    since = datetime.fromtimestamp(holder.started_at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    raise RunIsLiveError(
        f"another driver holds the run in {store.uri}: process {holder.pid} on host {holder.host}, since {since}. "
        "Stop it first, or pass take_over=True to take the run from it; it then fails before it does anything else"
    )


def _read(store: Store, epoch: int) -> Holder:
    try:
        return _holders.decode(store.read(record_key(epoch)))
    except (msgspec.DecodeError, MissingError) as error:
        raise JournalError(
            f"cannot read who holds the run: {record_key(epoch)!r} in {store.uri} is damaged. "
            "When no other driver runs, pass take_over=True"
        ) from error


def _locks_journal(store: Store, epoch: int) -> bool | None:
    """Whether the first journal file of this epoch, which its driver keeps locked, is; None when that says nothing."""
    parts = [key for key in store.keys("journal") if key.startswith(f"journal/{epoch:06d}-")]
    return store.is_held(parts[0]) if parts else None


def _renews(store: Store, epoch: int, lease_s: float, wait: Wait) -> bool:
    before = _lease(store, epoch)
    for _ in range(_SLICES):
        wait(lease_s / _SLICES)
        if store.exists(closed_key(epoch)):
            return False
        if _lease(store, epoch) != before:
            return True
    return False


def _lease(store: Store, epoch: int) -> bytes:
    try:
        return store.read(lease_key(epoch))
    except MissingError:
        return b""


def _process_lives(pid: int, start_time: str) -> bool:
    found = _process(pid)
    if found is not None:
        state, started = found
        return state not in "ZX" and started == start_time
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # It is there, but /proc hides it from this user: it may be the holder.
    return True


def _process(pid: int) -> tuple[str, str] | None:
    """The state letter and the start time of a process, as its kernel tells them."""
    fields = _kernel_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if fields else None


def _boot_id() -> str:
    return _kernel_text("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _kernel_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
