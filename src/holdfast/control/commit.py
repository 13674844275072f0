"""How the ranks' calls line up, and how a checkpoint is committed. Pure; a part of every group.

Call n of all ranks belongs together. A call that brings files on some ranks is committed once every rank's call n has
arrived: conflicting names are found before a byte moves, an index is taken from a durably reserved block, the agents
upload, the manifest is written last, the fact is journalled, and only then are the ranks told.
"""

from __future__ import annotations

import re

import msgspec

from holdfast.control import vocabulary as v
from holdfast.journal.facts import CheckpointCommitted, DirectoryNamed, Fact, IndicesReserved, RowsReported
from holdfast.wire.messages import ASYNC, NO_UPLOAD, FileEntry, Manner

BLOCK = 10
"""How many indices one durable reservation takes; a crash burns what is left of it."""

REACH = 2000
"""Rank 0 is never this many calls ahead of a rank that may still report."""

_OURS = re.compile(r"checkpoint_\d{6,}")

WAITING, DIGESTING, UPLOADING, SEALING = "waiting", "digesting", "uploading", "sealing"


class Pending(msgspec.Struct):
    """A call that brings files and is not committed yet."""

    call: int
    manner: Manner = Manner()
    odd_ranks: tuple[int, ...] = ()
    """Two ranks that bring their files in different manners, where there are such."""
    phase: str = WAITING
    metrics: bytes = b"null"
    files: dict[int, tuple[FileEntry, ...]] = {}
    digests: dict[int, tuple[FileEntry, ...]] = {}
    digesting: tuple[int, ...] = ()
    index: int = -1
    directory: str = ""
    brings: dict[int, tuple[str, ...]] = {}
    uploaded: dict[int, tuple[FileEntry, ...]] = {}


class Rows(msgspec.Struct, frozen=True):
    """Rank 0's calls from ``first`` to ``last``, as the JSON list of their metrics."""

    first: int
    last: int
    rows: msgspec.Raw


class Commits(msgspec.Struct):
    """The commits of one attempt that are under way, by call, and the indices that may be used."""

    next_index: int = 0
    reserved: int = 0
    named: set[str] = set()
    """Folders of the users' own naming that were ever begun."""
    pending: dict[int, Pending] = {}
    abandoned: list[str] = []
    """Directories of this attempt that will never be checkpoints."""
    ahead: list[Rows] = []
    """What rank 0 has reported and some rank has not come to yet: it may bring a checkpoint there."""


def directory_of(index: int) -> str:
    return f"checkpoint_{index:06d}"


def is_ours(name: str) -> bool:
    """Is this a name that only we give?"""
    return bool(_OURS.fullmatch(name))


def index_of(name: str) -> int:
    """The index in a name that is ours."""
    return int(name.rpartition("_")[2])


def apply(commits: Commits, change: object) -> None:
    """Change the commits by one note or fact; what does not concern them is left alone."""
    if isinstance(change, RowsReported):
        if change.rank == 0:
            _keep_rows(commits, Rows(change.first, change.first + change.count - 1, change.rows))
    elif isinstance(change, v.CommitDeclared):
        pending = commits.pending.setdefault(change.call, Pending(change.call, change.manner))
        if (pending.manner.mode, pending.manner.name) != (change.manner.mode, change.manner.name):
            pending.odd_ranks = (min(pending.files), change.rank)
        pending.files[change.rank] = change.files
        pending.metrics = change.metrics if change.rank == 0 else _metrics(commits.ahead, change.call, pending.metrics)
    elif isinstance(change, v.CommitDigesting | v.CommitDigested | v.CommitUploaded | v.CommitSealing):
        _advance(commits.pending[change.call], change)
    elif isinstance(change, v.CommitUploading):
        pending = commits.pending[change.call]
        pending.phase, pending.index, pending.directory = UPLOADING, change.index, change.directory
        pending.brings = dict(change.brings)
        commits.next_index = change.index + 1
    elif isinstance(change, v.CommitDropped):
        dropped = commits.pending.pop(change.call, None)
        if dropped is not None and dropped.directory and dropped.manner.mode != NO_UPLOAD:
            commits.abandoned.append(dropped.directory)
    elif isinstance(change, DirectoryNamed):
        commits.named.add(change.directory)
    elif isinstance(change, IndicesReserved):
        commits.reserved = max(commits.reserved, change.until)
    elif isinstance(change, CheckpointCommitted):
        commits.pending.pop(change.call, None)
        if not _OURS.fullmatch(change.directory):
            commits.named.add(change.directory)


def _advance(
    pending: Pending, change: v.CommitDigesting | v.CommitDigested | v.CommitUploaded | v.CommitSealing
) -> None:
    if isinstance(change, v.CommitDigesting):
        pending.phase, pending.digesting = DIGESTING, change.ranks
    elif isinstance(change, v.CommitDigested):
        pending.digests[change.rank] = change.files
    elif isinstance(change, v.CommitUploaded):
        pending.uploaded[change.rank] = change.files
    else:
        pending.phase = SEALING


def wind_up(commits: Commits) -> None:
    """The attempt ends: only what is uploading in the background, or being sealed, may still become a checkpoint."""
    for call, pending in list(commits.pending.items()):
        if pending.phase == SEALING or (pending.phase == UPLOADING and pending.manner.mode == ASYNC):
            continue
        del commits.pending[call]
        if pending.directory and pending.manner.mode != NO_UPLOAD:
            commits.abandoned.append(pending.directory)


def finishing(commits: Commits) -> tuple[int, ...]:
    """The indices whose uploads go on when their attempt ends."""
    return tuple(
        pending.index
        for pending in commits.pending.values()
        if pending.phase == UPLOADING and pending.manner.mode == ASYNC
    )


def clear(commits: Commits) -> None:
    """Forget what was under way; the indices stay."""
    commits.pending, commits.ahead, commits.abandoned = {}, [], []


def pass_by(commits: Commits, floor: int) -> None:
    """Every rank that may still report has made ``floor`` calls."""
    passed = 0
    while passed < len(commits.ahead) and commits.ahead[passed].last <= floor:
        passed += 1
    if passed:
        del commits.ahead[:passed]


def by_index(commits: Commits, index: int) -> Pending | None:
    return next((pending for pending in commits.pending.values() if pending.index == index), None)


def settle(commits: Commits, group: str, attempt: int, arrived: int, at: float) -> v.Decision:
    """The next step of the oldest commits; ``arrived`` calls have arrived from every rank.

    Commits take their index, and are sealed, in the order of their calls.
    """
    calls = sorted(commits.pending)
    for call in calls:
        pending = commits.pending[call]
        if pending.phase == WAITING and call <= arrived:
            return _begin(commits, pending, group, attempt, at)
        if pending.phase == DIGESTING and len(pending.digests) == len(pending.digesting):
            return _begin_upload_or_refuse(commits, pending, group, attempt, at)
        if call == calls[0] and pending.phase == UPLOADING and len(pending.uploaded) == len(pending.brings):
            files = _entries(pending)
            return v.Decision(
                (v.CommitSealing(group=group, call=call),),
                (
                    v.WriteManifest(
                        group=group, attempt=attempt, index=pending.index, directory=pending.directory, files=files
                    ),
                ),
            )
        if pending.phase in (WAITING, DIGESTING):
            break
    return v.NOTHING


def committed(pending: Pending, group: str, attempt: int, at: float) -> CheckpointCommitted:
    return CheckpointCommitted(
        at=at,
        group=group,
        attempt=attempt,
        call=pending.call,
        index=pending.index,
        directory=pending.directory,
        size=sum(entry.size for entry in _entries(pending)),
        metrics=msgspec.Raw(pending.metrics),
    )


def _keep_rows(commits: Commits, rows: Rows) -> None:
    """Rank 0's metrics stand for a checkpoint, whoever brings it, and whoever comes to it first."""
    commits.ahead.append(rows)
    pass_by(commits, rows.last - REACH)
    for pending in commits.pending.values():
        pending.metrics = _metrics([rows], pending.call, pending.metrics)


def _metrics(ahead: list[Rows], call: int, otherwise: bytes) -> bytes:
    for rows in ahead:
        if rows.first <= call <= rows.last:
            return bytes(msgspec.json.decode(rows.rows, type=list[msgspec.Raw])[call - rows.first])
    return otherwise


def _begin(commits: Commits, pending: Pending, group: str, attempt: int, at: float) -> v.Decision:
    shared = _names_to_digest(pending)
    if not shared or pending.odd_ranks or _clash(pending):
        return _begin_upload_or_refuse(commits, pending, group, attempt, at)
    ranks = tuple(sorted({rank for ranks in shared.values() for rank in ranks}))
    return v.Decision(
        (v.CommitDigesting(group=group, call=pending.call, ranks=ranks),),
        tuple(
            v.DigestFiles(
                group=group,
                attempt=attempt,
                rank=rank,
                call=pending.call,
                files=tuple(name for name, ranks in shared.items() if rank in ranks),
            )
            for rank in ranks
        ),
    )


def _begin_upload_or_refuse(commits: Commits, pending: Pending, group: str, attempt: int, at: float) -> v.Decision:
    conflict = _conflict(pending) or _taken(commits, pending)
    if conflict:
        return v.Decision(
            (v.CommitDropped(group=group, call=pending.call),),
            (
                v.Refuse(
                    group=group, attempt=attempt, call=pending.call, ranks=tuple(sorted(pending.files)), error=conflict
                ),
            ),
        )
    index = commits.next_index
    directory = _directory(commits, pending, index)
    brings = {} if pending.manner.mode == NO_UPLOAD else _who_brings_what(pending)
    facts: list[Fact] = []
    if index >= commits.reserved:
        facts.append(IndicesReserved(at=at, group=group, until=index + BLOCK))
    if pending.manner.name and pending.manner.mode != NO_UPLOAD:
        facts.append(DirectoryNamed(at=at, group=group, directory=directory))
    uploading = v.CommitUploading(group=group, call=pending.call, index=index, directory=directory, brings=brings)
    return v.Decision(
        (*facts, uploading),
        tuple(
            v.UploadFiles(
                group=group,
                attempt=attempt,
                rank=rank,
                call=pending.call,
                index=index,
                directory=directory,
                files=names,
            )
            for rank, names in brings.items()
        ),
    )


def _names_to_digest(pending: Pending) -> dict[str, tuple[int, ...]]:
    """File names that several ranks bring, with those ranks; all names, where nothing is uploaded."""
    owners: dict[str, list[int]] = {}
    for rank in sorted(pending.files):
        for entry in pending.files[rank]:
            owners.setdefault(entry.name, []).append(rank)
    if pending.manner.mode == NO_UPLOAD:
        return {name: tuple(ranks) for name, ranks in owners.items()}
    return {name: tuple(ranks) for name, ranks in owners.items() if len(ranks) > 1}


def _directory(commits: Commits, pending: Pending, index: int) -> str:
    """Where a checkpoint lies. A name of the user's own that was ever begun, or looks like one of ours, gets the
    index.
    """
    name = pending.manner.name
    if not name:
        return directory_of(index)
    if pending.manner.mode == NO_UPLOAD or not (name in commits.named or _OURS.fullmatch(name)):
        return name
    return f"{name}_{index:06d}"


def _entries(pending: Pending) -> tuple[FileEntry, ...]:
    """The files of the checkpoint, as they lie in storage."""
    found = pending.digests if pending.manner.mode == NO_UPLOAD else pending.uploaded
    by_name = {entry.name: entry for entries in found.values() for entry in entries}
    return tuple(entry for _, entry in sorted(by_name.items()))


def _conflict(pending: Pending) -> str:
    """Why two ranks' files cannot lie in one directory; empty when they can."""
    if pending.odd_ranks:
        one, other = pending.odd_ranks
        return (
            f"ranks {one} and {other} brought their files to report {pending.call} in different manners; every rank "
            "must give the same checkpoint_upload_mode and the same directory"
        )
    clash = _clash(pending)
    if clash:
        return clash
    seen: dict[str, tuple[int, FileEntry]] = {}
    for rank in sorted(pending.digests):
        for entry in pending.digests[rank]:
            first = seen.setdefault(entry.name, (rank, entry))
            if (first[1].size, first[1].checksum) != (entry.size, entry.checksum):
                return (
                    f"ranks {first[0]} and {rank} both brought a file {entry.name!r} to report {pending.call}, with "
                    f"different content. Give each rank's files their own name, such as 'rank_{rank}.pt'."
                )
    return ""


def _clash(pending: Pending) -> str:
    """Why a name would have to be a file and a folder at once; empty when none would."""
    owners = {entry.name: rank for rank in sorted(pending.files, reverse=True) for entry in pending.files[rank]}
    for name, rank in owners.items():
        folder = name.rpartition("/")[0]
        while folder:
            if folder in owners:
                return (
                    f"rank {owners[folder]} brought a file {folder!r} to report {pending.call}, and rank {rank} a "
                    f"folder of that name, with {name!r}. Give one of them another name."
                )
            folder = folder.rpartition("/")[0]
    return ""


def _taken(commits: Commits, pending: Pending) -> str:
    """Why files that lie in the run's directory already cannot become a checkpoint where they lie."""
    name = pending.manner.name
    if pending.manner.mode != NO_UPLOAD or not (name in commits.named or _OURS.fullmatch(name)):
        return ""
    return f"{name!r} is the directory of another checkpoint; write each checkpoint to a directory of its own"


def _who_brings_what(pending: Pending) -> dict[int, tuple[str, ...]]:
    """What each rank uploads; a file that several ranks bring alike is uploaded by the lowest."""
    taken: set[str] = set()
    brings: dict[int, tuple[str, ...]] = {}
    for rank in sorted(pending.files):
        names = tuple(entry.name for entry in pending.files[rank] if entry.name not in taken)
        taken.update(names)
        if names:
            brings[rank] = names
    return brings
