"""What a failure is called, which of several is the root, and who pays for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.journal.facts import RankFailure

EXCEPTION = "exception"
KILLED = "killed"
OOM = "oom"
CRASHED = "crashed"
EXITED = "exited"
STARTUP = "startup"
NODE_LOST = "node_lost"
MISMATCH = "mismatch"
FILES = "files"
STORAGE = "storage"
DAMAGED = "damaged"
HANG = "hang"
PREEMPTION = "preemption"

MAX_FAILURES = "max_failures"
CONTROLLER_LIMIT = "controller_failure_limit"
MAX_PREEMPTIONS = "max_preemption_failures"

_PAID_BY = {
    EXCEPTION: MAX_FAILURES,
    KILLED: MAX_FAILURES,
    OOM: MAX_FAILURES,
    CRASHED: MAX_FAILURES,
    EXITED: MAX_FAILURES,
    NODE_LOST: MAX_FAILURES,
    MISMATCH: MAX_FAILURES,
    FILES: MAX_FAILURES,
    HANG: MAX_FAILURES,
    PREEMPTION: MAX_PREEMPTIONS,
    STARTUP: CONTROLLER_LIMIT,
    STORAGE: "",
    DAMAGED: "",
}

_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}
_CRASHES = frozenset({4, 5, 6, 7, 8, 11})

_PEER_LOSS_TYPES = frozenset(
    {
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "EOFError",
        "DistBackendError",
        "DistNetworkError",
    }
)
_PEER_LOSS_TEXT = re.compile(
    r"connection (closed|reset|aborted|refused)|closed by peer|broken pipe|socket timeout|nccl|gloo|rendezvous",
    re.IGNORECASE,
)


_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FRAME = re.compile(r'^ *File "(.*", line \d+), in ', re.MULTILINE)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/holdfast/(worker|train)/|^<frozen ")


def paid_by(kind: str) -> str:
    """The budget that a failure of this kind is charged to; empty for none."""
    return _PAID_BY[kind]


def exit_failure(
    rank: int, status: int, *, started: bool, oom: bool = False, lost: bool = False, calls: int = 0
) -> RankFailure:
    """The failure of a process that ended by itself and had neither returned nor raised."""
    if lost:
        kind, message = NODE_LOST, "died together with the process that forks workers on its node"
    elif oom:
        kind, message = OOM, "was killed by the kernel because the machine ran out of memory (SIGKILL)"
    elif status < 0:
        name = _SIGNALS.get(-status, f"signal {-status}")
        kind = CRASHED if -status in _CRASHES else KILLED
        message = f"crashed with {name}" if kind == CRASHED else f"was killed by {name}"
    else:
        kind, message = EXITED, f"exited with code {status} before its function returned"
    if not started and kind not in (NODE_LOST, OOM):
        kind, message = STARTUP, f"{message}, before the function's first line"
    return RankFailure(rank=rank, kind=kind, message=message, calls=calls)


def looks_like_peer_loss(failure: RankFailure) -> bool:
    """Is this what a rank says when another rank has gone?"""
    if failure.kind != EXCEPTION:
        return False
    return failure.error.rpartition(".")[2] in _PEER_LOSS_TYPES or bool(_PEER_LOSS_TEXT.search(failure.message))


def attribute(failures: Sequence[RankFailure]) -> tuple[RankFailure, ...]:
    """The failures of one attempt in the order of arrival → root first, consequences marked.

    Arrival is no proof of cause: the survivor's broken connection may be heard of before the death that broke it. So
    what looks like the loss of a peer is the root only where nothing else is. A rank that raised has said why its files
    are gone.
    """
    if not failures:
        return ()
    explained = {failure.rank for failure in failures if failure.kind != FILES}
    told = [failure for failure in failures if failure.kind != FILES or failure.rank not in explained]
    ordered = sorted(told, key=lambda failure: (_weight(failure), looks_like_peer_loss(failure)))
    root = ordered[0]
    return (
        root,
        *(
            msgspec.structs.replace(failure, consequence=looks_like_peer_loss(failure) and not _same(failure, root))
            for failure in ordered[1:]
        ),
    )


def signature(failure: RankFailure, position: int) -> str:
    """By what an exception is known again: its class, message and place, the rank, and how many calls into the run's
    line it came, of which ``position`` were made before the attempt. Empty for a failure without an exception.

    Addresses of objects are left out of the message, for they differ from process to process.
    """
    if failure.kind != EXCEPTION or not failure.error:
        return ""
    message = _ADDRESS.sub("0x", failure.message)
    parts = (failure.error, message, _place(failure.traceback), str(failure.rank), str(position + failure.calls))
    return "\n".join(parts)


def _place(traceback: str) -> str:
    """The innermost line that is the user's own; the innermost of all where none is."""
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    found = own or frames
    return str(found[-1]) if found else ""


def _weight(failure: RankFailure) -> int:
    """A damaged checkpoint, a store that refuses, or a node that was taken away explains whatever else went wrong with
    the attempt."""
    if failure.kind in (DAMAGED, STORAGE):
        return 0
    return 1 if failure.kind == PREEMPTION else 2


def _same(failure: RankFailure, root: RankFailure) -> bool:
    return (failure.kind, failure.error, failure.message) == (root.kind, root.error, root.message)


def exhausted(charge: str, charged: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    """Would this charge, already counted in ``charged``, be one more than its limit allows?"""
    limit = limits.get(charge, -1)
    return limit >= 0 and charged.get(charge, 0) > limit


def backoff_s(failures_in_a_row: int) -> float:
    """How long to wait before the next start after this many start-up failures in a row."""
    doublings = min(failures_in_a_row - 1, 10)
    return float(min(0.1 * 2**doublings, 10.0))


def name_ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
