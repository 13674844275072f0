"""What a test may not leave behind: processes, threads, sockets and runtime folders.

`Snapshot.take` before, `Snapshot.leaked` after. Cheap when all is well: one listing of /proc, one of our own
descriptors; only processes that are new since the snapshot are looked at. Never touches anything by itself: `clean`
ends what was found, so that one leak fails one test.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARKER = "HOLDFAST_TEST"  # set to the pid of the pytest process; every process that descends from it inherits this
RUNTIME_DIR = "HOLDFAST_RUNTIME_DIR"

PROCESS_GRACE_S = 3.0
OTHER_GRACE_S = 2.0
POLL_S = 0.01


@dataclass(frozen=True)
class Leaks:
    """What is there now and was not there before."""

    processes: tuple[psutil.Process, ...] = ()
    threads: tuple[threading.Thread, ...] = ()
    sockets: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.threads or self.sockets or self.folders)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for process in self.processes:
            yield f"process {_describe(process)}"
        for thread in self.threads:
            yield f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for link in self.sockets:
            yield f"socket {link}"
        for folder in self.folders:
            yield f"folder {folder}"

    def clean(self) -> None:
        """Kill the processes, remove the folders. Threads and sockets can only be closed by their owner."""
        for process in self.processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(self.processes, timeout=PROCESS_GRACE_S)
        for folder in self.folders:
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                folder.unlink(missing_ok=True)


@dataclass(frozen=True)
class Snapshot:
    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    folders: frozenset[Path] = field(default_factory=frozenset)

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            pids=frozenset(_pids()),
            threads=frozenset(threading.enumerate()),
            sockets=frozenset(_sockets()),
            folders=frozenset(_folders()),
        )

    def leaked(self, process_grace_s: float = PROCESS_GRACE_S, other_grace_s: float = OTHER_GRACE_S) -> Leaks:
        """Whatever is still there after its grace: things may be on their way out when a test ends."""
        started = time.monotonic()
        found = self._now()
        if found.sockets:
            gc.collect()  # a socket in a reference cycle is garbage, not a leak; too slow to do after every test
        while found:
            waited = time.monotonic() - started
            waiting_for_others = found.threads or found.sockets or found.folders
            if not (found.processes and waited < process_grace_s) and not (
                waiting_for_others and waited < other_grace_s
            ):
                return found
            time.sleep(POLL_S)
            found = self._now()
        return found

    def _now(self) -> Leaks:
        return Leaks(
            processes=tuple(_ours(pid for pid in _pids() if pid not in self.pids)),
            threads=tuple(thread for thread in threading.enumerate() if thread not in self.threads),
            sockets=tuple(link for link in _sockets() if link not in self.sockets),
            folders=tuple(folder for folder in _folders() if folder not in self.folders),
        )


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _ours(pids: Iterator[int]) -> Iterator[psutil.Process]:
    """Those that descend from this process, or inherited its marker and then left the family (daemons)."""
    me = os.getpid()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if any(parent.pid == me for parent in process.parents()) or _marked(pid):
                yield process
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's


def _marked(pid: int) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    return f"{MARKER}={os.getpid()}".encode() in environ.split(b"\0")


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            command = " ".join(process.cmdline()) or process.name()
            return f"{process.pid} ({process.status()}, child of {process.ppid()}): {command[:200]}"
    except psutil.Error:
        return f"{process.pid} (zombie or gone)"


def _sockets() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of this very listing
        if link.startswith("socket:"):
            yield link


def _folders() -> Iterator[Path]:
    base = os.environ.get(RUNTIME_DIR)
    return iter(Path(base).iterdir()) if base and os.path.isdir(base) else iter(())
