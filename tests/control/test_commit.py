"""How a commit goes on, step by step, compared by value."""

from __future__ import annotations

import msgspec

from holdfast.control import commit
from holdfast.control import vocabulary as v
from holdfast.journal.facts import CheckpointCommitted, IndicesReserved, RowsReported
from holdfast.wire.messages import FileEntry

G = "train"
A = FileEntry("a", 1)
B = FileEntry("b", 2)
SHARED = FileEntry("shared", 3)


def declare(commits: commit.Commits, rank: int, call: int, *files: FileEntry, metrics: bytes = b'{"n":1}') -> None:
    commit.apply(commits, v.CommitDeclared(group=G, rank=rank, call=call, metrics=metrics, files=files))


def settle(commits: commit.Commits, arrived: int) -> v.Decision:
    """The next step, applied."""
    decision = commit.settle(commits, G, 1, arrived, 5.0)
    for change in decision.changes:
        commit.apply(commits, change)
    return decision


def uploaded(commits: commit.Commits, call: int, rank: int, *files: FileEntry) -> None:
    commit.apply(commits, v.CommitUploaded(group=G, call=call, rank=rank, files=files))


def upload(rank: int, call: int, index: int, *names: str) -> v.UploadFiles:
    return v.UploadFiles(
        group=G, attempt=1, rank=rank, call=call, index=index, directory=f"checkpoint_{index:06d}", files=names
    )


def test_nothing_moves_before_every_rank_has_made_the_call() -> None:
    commits = commit.Commits()
    declare(commits, 1, 3, A)
    assert settle(commits, 2) == v.NOTHING


def test_an_index_is_reserved_before_it_is_used_and_each_rank_uploads_its_own_files() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1, A)
    declare(commits, 2, 1, B)
    assert settle(commits, 1) == v.Decision(
        (
            IndicesReserved(at=5.0, group=G, until=commit.BLOCK),
            v.CommitUploading(group=G, call=1, index=0, directory="checkpoint_000000", brings={0: ("a",), 2: ("b",)}),
        ),
        (upload(0, 1, 0, "a"), upload(2, 1, 0, "b")),
    )
    assert settle(commits, 1) == v.NOTHING


def test_the_manifest_is_written_when_the_last_file_has_arrived_and_lists_all_by_name() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1, B)
    declare(commits, 1, 1, A)
    settle(commits, 1)
    uploaded(commits, 1, 0, FileEntry("b", 2, "bb"))
    assert settle(commits, 1) == v.NOTHING
    uploaded(commits, 1, 1, FileEntry("a", 1, "aa"))
    assert settle(commits, 1) == v.Decision(
        (v.CommitSealing(group=G, call=1),),
        (
            v.WriteManifest(
                group=G,
                attempt=1,
                index=0,
                directory="checkpoint_000000",
                files=(FileEntry("a", 1, "aa"), FileEntry("b", 2, "bb")),
            ),
        ),
    )
    assert commit.committed(commits.pending[1], G, 1, 6.0) == CheckpointCommitted(
        at=6.0,
        group=G,
        attempt=1,
        call=1,
        index=0,
        directory="checkpoint_000000",
        size=3,
        metrics=msgspec.Raw(b'{"n":1}'),
    )


def test_a_block_of_indices_is_reserved_once() -> None:
    commits = commit.Commits()
    reserved = []
    for call in range(1, 2 * commit.BLOCK + 2):
        declare(commits, 0, call, A)
        changes = settle(commits, call).changes
        reserved += [change.until for change in changes if isinstance(change, IndicesReserved)]
        assert changes[-1].index == call - 1
    assert reserved == [commit.BLOCK, 2 * commit.BLOCK, 3 * commit.BLOCK]


def test_an_empty_checkpoint_needs_no_upload() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1)
    assert settle(commits, 1).commands == ()
    (command,) = settle(commits, 1).commands
    assert command == v.WriteManifest(group=G, attempt=1, index=0, directory="checkpoint_000000", files=())


def test_a_name_that_several_ranks_bring_is_looked_at_before_a_byte_moves() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1, A, SHARED)
    declare(commits, 1, 1, SHARED)
    declare(commits, 2, 1, B)
    assert settle(commits, 1) == v.Decision(
        (v.CommitDigesting(group=G, call=1, ranks=(0, 1)),),
        tuple(v.DigestFiles(group=G, attempt=1, rank=rank, call=1, files=("shared",)) for rank in (0, 1)),
    )


def digested(commits: commit.Commits, rank: int, entry: FileEntry) -> None:
    commit.apply(commits, v.CommitDigested(group=G, call=1, rank=rank, files=(entry,)))


def test_equal_files_are_uploaded_by_the_lowest_rank_alone() -> None:
    commits = commit.Commits()
    declare(commits, 1, 1, SHARED)
    declare(commits, 0, 1, A, SHARED)
    settle(commits, 1)
    digested(commits, 0, FileEntry("shared", 3, "same"))
    assert settle(commits, 1) == v.NOTHING
    digested(commits, 1, FileEntry("shared", 3, "same"))
    assert settle(commits, 1).commands == (upload(0, 1, 0, "a", "shared"),)


def test_different_files_of_one_name_are_refused_on_every_rank_that_brought_any() -> None:
    for second in (FileEntry("shared", 3, "other"), FileEntry("shared", 4, "same")):
        commits = commit.Commits()
        for rank in (0, 1, 2):
            declare(commits, rank, 1, SHARED if rank != 1 else B)
        settle(commits, 1)
        digested(commits, 0, FileEntry("shared", 3, "same"))
        digested(commits, 2, second)
        decision = settle(commits, 1)
        assert decision.changes == (v.CommitDropped(group=G, call=1),)
        (refusal,) = decision.commands
        assert isinstance(refusal, v.Refuse)
        assert (refusal.call, refusal.ranks) == (1, (0, 1, 2))
        assert "ranks 0 and 2 both brought a file 'shared' to report 1" in refusal.error
        assert commits.pending == {}
        assert commits.next_index == 0


def test_manifests_are_written_in_the_order_of_the_calls() -> None:
    commits = commit.Commits()
    for call in (1, 2):
        declare(commits, 0, call, A)
        settle(commits, call)
    uploaded(commits, 2, 0, A)
    assert settle(commits, 2) == v.NOTHING
    uploaded(commits, 1, 0, A)
    assert settle(commits, 2).changes == (v.CommitSealing(group=G, call=1),)
    assert settle(commits, 2) == v.NOTHING
    commit.apply(commits, commit.committed(commits.pending[1], G, 1, 6.0))
    assert settle(commits, 2).changes == (v.CommitSealing(group=G, call=2),)


def test_a_commit_is_found_by_its_index() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1, A)
    settle(commits, 1)
    assert commit.by_index(commits, 0) is commits.pending[1]
    assert commit.by_index(commits, 1) is None


def rows(first: int, *texts: bytes, rank: int = 0) -> RowsReported:
    return RowsReported(
        at=1.0,
        group=G,
        attempt=1,
        rank=rank,
        first=first,
        count=len(texts),
        rows=msgspec.Raw(b"[" + b",".join(texts) + b"]"),
    )


def test_rank_zeros_metrics_stand_for_a_checkpoint_that_another_rank_brings() -> None:
    ahead = commit.Commits()
    commit.apply(ahead, rows(1, b"1", b"2"))
    commit.apply(ahead, rows(3, b"3", b"4", b"5"))
    commit.apply(ahead, rows(1, b"9", rank=1))
    declare(ahead, 1, 4, A, metrics=b"-4")
    assert ahead.pending[4].metrics == b"4"
    behind = commit.Commits()
    declare(behind, 2, 2, A, metrics=b"-2")
    declare(behind, 1, 2, B, metrics=b"-1")
    commit.apply(behind, rows(1, b"1"))
    assert behind.pending[2].metrics == b"null"
    commit.apply(behind, rows(2, b"2", b"3"))
    assert behind.pending[2].metrics == b"2"
    declare(behind, 0, 2, A, metrics=b"2")
    assert behind.pending[2].metrics == b"2"


def test_rows_that_every_rank_has_come_to_are_forgotten() -> None:
    commits = commit.Commits()
    for first in (1, 3, 5):
        commit.apply(commits, rows(first, b"0", b"0"))
    commit.pass_by(commits, 3)
    assert [kept.first for kept in commits.ahead] == [3, 5]
    commit.pass_by(commits, 6)
    assert commits.ahead == []


def test_a_file_and_a_folder_of_one_name_are_refused_before_anything_is_read() -> None:
    commits = commit.Commits()
    declare(commits, 0, 1, A, FileEntry("model", 1), SHARED)
    declare(commits, 1, 1, SHARED)
    declare(commits, 2, 1, FileEntry("model/of/mine", 1))
    decision = settle(commits, 1)
    assert decision.changes == (v.CommitDropped(group=G, call=1),)
    (refusal,) = decision.commands
    assert isinstance(refusal, v.Refuse)
    assert refusal.ranks == (0, 1, 2)
    assert (
        "rank 0 brought a file 'model' to report 1, and rank 2 a folder of that name, with 'model/of/mine'"
        in refusal.error
    )
