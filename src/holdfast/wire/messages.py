"""The messages, as frozen values. ``ToAgent``/``FromAgent`` travel between controller and agent, ``ToWorker``/
``FromWorker`` between agent and worker. Every message that concerns a worker carries its group and attempt, so that a
message of a dead attempt can be told and dropped.

Metrics travel as JSON text from the worker to the journal and are not decoded on the way.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file of a checkpoint: its name below the directory, its size, and its xxh3 checksum once it was read."""

    name: str
    size: int
    checksum: str = ""


SYNC, ASYNC, NO_UPLOAD = "sync", "async", "no_upload"


class Manner(msgspec.Struct, frozen=True, array_like=True):
    """How a call's files come to storage.

    ``mode`` is SYNC (the rank waits), ASYNC (it goes on) or NO_UPLOAD (they lie in the run's directory already, in the
    folder ``name``). Otherwise ``name`` is the folder that the user asked for, or empty. With ``delete`` the local
    files are removed once they are uploaded.
    """

    mode: str = SYNC
    name: str = ""
    delete: bool = False


class ErrorInfo(msgspec.Struct, frozen=True):
    """An exception of a worker, as text that any process can show, and pickled for the live driver alone."""

    kind: str
    message: str
    traceback: str = ""
    pickled: bytes = b""


class Environment(msgspec.Struct, frozen=True):
    """What a zygote is made for: two equal environments share one zygote."""

    preload: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    sys_path: tuple[str, ...] = ()
    working_directory: str = ""
    argv: tuple[str, ...] = ()
    main_path: str = ""
    main_module: str = ""
    """The script that the driver runs, or the module that it runs by ``-m``."""
    sources: str = ""
    """A fingerprint of the user's module files, so that a changed file means a new zygote."""


class WorkerContext(msgspec.Struct, frozen=True):
    """Who a worker is; what ``get_context()`` answers."""

    run: str
    group: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node: str
    storage_uri: str
    run_ahead: int = 1000


class CheckpointRef(msgspec.Struct, frozen=True):
    """A committed checkpoint, by its index and its directory below the run's own."""

    index: int
    directory: str


# controller → agent


class Prepare(Message, frozen=True):
    """Have a zygote ready for this environment. Answered by Prepared."""

    environment: Environment


class Program(Message, frozen=True):
    """The user's function and its argument, pickled; kept by the agent under its id until forgotten."""

    id: str
    body: bytes


class ForgetProgram(Message, frozen=True):
    id: str


class StartWorker(Message, frozen=True):
    """Fork one worker. Answered by WorkerStarted when the function is about to run, and by Exited in any case."""

    context: WorkerContext
    program: str
    environment: Environment
    log: str
    echo: bool
    resume: CheckpointRef | None = None


class KillGroup(Message, frozen=True):
    """End every worker of this attempt and abandon its uploads, but for those of the checkpoints to ``finish``. Each
    worker still answers Exited."""

    group: str
    attempt: int
    finish: tuple[int, ...] = ()


class Upload(Message, frozen=True):
    """Copy these files of a declared directory to ``directory`` in the run's store. Answered by Uploaded."""

    group: str
    attempt: int
    rank: int
    call: int
    index: int
    directory: str
    storage_uri: str
    files: tuple[str, ...]
    patience_s: float


class Digest(Message, frozen=True):
    """Tell the checksums of these declared files. Answered by Digested."""

    group: str
    attempt: int
    rank: int
    call: int
    files: tuple[str, ...]


class Tell(Message, frozen=True):
    """Carry encoded ToWorker bytes to some ranks of an attempt that live on this node."""

    group: str
    attempt: int
    ranks: tuple[int, ...]
    body: bytes


class Watch(Message, frozen=True):
    """Tell of every worker of this attempt that makes no progress for so long, by Quiet."""

    group: str
    attempt: int
    seconds: float


class DumpStacks(Message, frozen=True):
    """Have every worker of this attempt write its stacks to its log. Answered by Stacks for each."""

    group: str
    attempt: int


ToAgent = Prepare | Program | ForgetProgram | StartWorker | KillGroup | Upload | Digest | Tell | Watch | DumpStacks


# agent → controller


class Prepared(Message, frozen=True):
    """``notice`` says why workers start as fresh processes, where they do."""

    environment: Environment
    notice: str = ""


class WorkerStarted(Message, frozen=True):
    group: str
    attempt: int
    rank: int
    pid: int


class Rows(Message, frozen=True):
    """Consecutive metrics-only calls of one rank: ``rows`` is their JSON objects joined by commas."""

    group: str
    attempt: int
    rank: int
    first: int
    count: int
    rows: bytes


class Declared(Message, frozen=True):
    """Call ``call`` of this rank brings these files."""

    group: str
    attempt: int
    rank: int
    call: int
    metrics: bytes
    files: tuple[FileEntry, ...]
    manner: Manner = Manner()


class Uploaded(Message, frozen=True):
    group: str
    attempt: int
    rank: int
    index: int
    files: tuple[FileEntry, ...]


class UploadTrouble(Message, frozen=True):
    """An upload call failed. ``final`` when the agent has stopped trying and removed what it wrote; ``unreadable`` when
    it was the rank's own file that could not be read.
    """

    group: str
    attempt: int
    rank: int
    index: int
    error: str
    final: bool
    unreadable: bool = False


class Digested(Message, frozen=True):
    group: str
    attempt: int
    rank: int
    call: int
    files: tuple[FileEntry, ...]


class Returned(Message, frozen=True):
    """The function returned; ``value`` is JSON or empty, ``pickled`` the value itself for the live driver."""

    group: str
    attempt: int
    rank: int
    value: bytes
    pickled: bytes


class Raised(Message, frozen=True):
    """The function raised, or, when ``started`` is false, the worker could not get as far as calling it."""

    group: str
    attempt: int
    rank: int
    error: ErrorInfo
    started: bool


class Exited(Message, frozen=True):
    """The process is gone, and so is everything that it had started. ``status`` is its exit code, or minus the signal.

    ``ours`` when the agent killed it before it had ended by itself; ``lost`` when its zygote died with it.
    """

    group: str
    attempt: int
    rank: int
    status: int
    ours: bool = False
    oom: bool = False
    lost: bool = False


class Damaged(Message, frozen=True):
    """A rank asked for this checkpoint and it does not match its manifest."""

    group: str
    attempt: int
    rank: int
    index: int
    reason: str


class Preempted(Message, frozen=True):
    """This node is about to be taken away."""


class Quiet(Message, frozen=True):
    """A rank has made no progress for so long."""

    group: str
    attempt: int
    rank: int
    seconds: float


class Stacks(Message, frozen=True):
    """Where the rank's threads stand; empty when it did not say."""

    group: str
    attempt: int
    rank: int
    text: str


class Met(Message, frozen=True):
    group: str
    attempt: int
    rank: int
    number: int
    what: str
    data: bytes
    late: bool


class CheckpointsAsked(Message, frozen=True):
    group: str
    attempt: int
    rank: int
    number: int


class Output(Message, frozen=True):
    """Lines that an echoed worker printed."""

    group: str
    attempt: int
    rank: int
    text: str


FromAgent = (
    Prepared
    | WorkerStarted
    | Rows
    | Declared
    | Uploaded
    | UploadTrouble
    | Digested
    | Returned
    | Raised
    | Exited
    | Damaged
    | Preempted
    | Quiet
    | Stacks
    | Met
    | CheckpointsAsked
    | Output
)


# agent → worker


class Begin(Message, frozen=True):
    program: bytes
    context: WorkerContext
    resume: CheckpointRef | None = None


class Committed(Message, frozen=True):
    """A checkpoint was committed: the ack of ``call`` for the ranks that brought files, news for the others."""

    call: int
    checkpoint: CheckpointRef


class Refused(Message, frozen=True):
    """Call ``call`` cannot be committed; ``report`` raises this."""

    call: int
    error: str


class Advance(Message, frozen=True):
    """The slowest rank has made this many calls."""

    floor: int


class Preempt(Message, frozen=True):
    """These nodes, each with its ranks, are about to be taken away; ``deadline_ms`` is Unix time."""

    deadline_ms: int
    nodes: dict[str, tuple[int, ...]]


class Fetched(Message, frozen=True):
    """Where a checkpoint's files lie on this node, or why not."""

    index: int
    path: str
    error: str = ""


class KeptCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that is kept, with rank 0's metrics as JSON."""

    checkpoint: CheckpointRef
    metrics: bytes


class CheckpointList(Message, frozen=True):
    """Every checkpoint that is kept, the oldest first."""

    number: int
    kept: tuple[KeptCheckpoint, ...]


class Gathered(Message, frozen=True):
    """Every rank is at the meeting, and rank 0 brought ``data``; or it cannot be, and ``error`` says why."""

    number: int
    data: bytes = b""
    error: str = ""


ToWorker = Begin | Committed | Refused | Advance | Preempt | Fetched | Gathered | CheckpointList


# worker → agent (metrics-only calls travel as row frames, see frames.py)


class Started(Message, frozen=True):
    """The next thing that happens is the user's function."""

    pid: int


class Declare(Message, frozen=True):
    call: int
    metrics: bytes
    directory: str
    files: tuple[FileEntry, ...]
    manner: Manner = Manner()


class Fetch(Message, frozen=True):
    """Where do this checkpoint's files lie? Answered by Fetched after they were verified, once per node."""

    checkpoint: CheckpointRef


class ListCheckpoints(Message, frozen=True):
    """Which checkpoints are kept? Answered by CheckpointList of the same number."""

    number: int


class Inside(Message, frozen=True):
    """The function has gone into a call of ours that takes time, or come back from it."""

    inside: bool


class Heartbeat(Message, frozen=True):
    """The function is alive, though it reports nothing."""


class Return(Message, frozen=True):
    value: bytes
    pickled: bytes


class Raise(Message, frozen=True):
    error: ErrorInfo
    started: bool


class Meet(Message, frozen=True):
    """The rank is at its ``number``-th meeting of all ranks, a ``what``, and brings ``data``. With ``late`` it says so
    again, and wants to know who is missing."""

    number: int
    what: str
    data: bytes = b""
    late: bool = False


FromWorker = Started | Declare | Fetch | Meet | ListCheckpoints | Inside | Heartbeat | Return | Raise
