"""The lifecycle of a gang: what each event changes, compared by value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control import failures, group
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.wire.messages import FileEntry

G = "train"
FILE = FileEntry("a", 1)


class Gang:
    """A group, and its owner's part: every event is observed, applied and settled."""

    def __init__(self, size: int, *, running: bool = True) -> None:
        self.group = group.Group(G, world_size=0)
        self.apply(f.AttemptStarted(at=0.0, group=G, attempt=1, world_size=size))
        if running:
            for rank in range(size):
                self.post(v.RankArrived, rank=rank)

    def apply(self, change: object) -> None:
        group.apply(self.group, change)

    def post(self, kind: type[v.GroupEvent], *, attempt: int = 1, **what: Any) -> tuple[list[Any], list[Any]]:
        """The changes and commands that follow from an event."""
        return self._follow(group.observe(self.group, kind(at=1.0, group=G, attempt=attempt, **what)))

    def lose(self, node: str) -> tuple[list[Any], list[Any]]:
        return self._follow(group.lose_node(self.group, v.NodeLost(at=1.0, node=node, reason="its connection ended")))

    def rows(self, rank: int, first: int, count: int = 1) -> tuple[list[Any], list[Any]]:
        return self.post(v.RowsArrived, rank=rank, first=first, count=count, rows=b",".join([b"{}"] * count))

    def declare(self, rank: int, call: int) -> tuple[list[Any], list[Any]]:
        return self.post(v.FilesDeclared, rank=rank, call=call, metrics=b"{}", files=(FILE,))

    def _follow(self, decision: v.Decision) -> tuple[list[Any], list[Any]]:
        changes: list[Any] = []
        commands: list[Any] = []
        while decision:
            for change in decision.changes:
                self.apply(change)
            changes += decision.changes
            commands += decision.commands
            decision = group.settle(self.group, 1.0)
        return changes, commands


KILL = v.KillGroup(group=G, attempt=1)


def test_an_attempt_runs_when_every_rank_has_arrived() -> None:
    gang = Gang(2, running=False)
    assert gang.post(v.RankArrived, rank=1) == ([v.Arrived(group=G, rank=1)], [])
    assert gang.post(v.RankArrived, rank=1) == ([], [])
    assert gang.post(v.RankArrived, rank=0)[0][-1] == f.AttemptRunning(at=1.0, group=G, attempt=1)
    assert gang.group.phase == group.RUNNING


def test_what_a_dead_attempt_says_changes_nothing() -> None:
    gang = Gang(1)
    for event in (
        {"kind": v.RowsArrived, "rank": 0, "first": 1, "count": 1, "rows": b"{}"},
        {"kind": v.RankExited, "rank": 0, "status": -9},
        {"kind": v.ManifestWritten, "index": 0},
        {"kind": v.GroupPlaced, "nodes": ("a",)},
    ):
        assert gang.post(attempt=2, **event) == ([], [])  # type: ignore[arg-type]


def test_rows_are_remembered_once_and_in_order() -> None:
    gang = Gang(1)
    changes, _ = gang.rows(0, 1, 3)
    assert changes == [
        f.RowsReported(at=1.0, group=G, attempt=1, rank=0, first=1, count=3, rows=msgspec.Raw(b"[{},{},{}]"))
    ]
    assert gang.rows(0, 1, 3) == ([], [])
    assert gang.rows(0, 5) == ([], [])
    assert len(gang.rows(0, 4)[0]) == 1


def test_the_slowest_ranks_progress_is_told_in_steps() -> None:
    gang = Gang(3)
    gang.rows(0, 1, 250)
    gang.rows(1, 1, 99)
    assert gang.rows(2, 1, 300)[1] == []
    assert gang.rows(1, 100)[1] == [v.TellFloor(group=G, attempt=1, floor=100)]
    assert gang.rows(1, 101, 99)[1] == []
    assert gang.rows(1, 200, 900)[1] == [v.TellFloor(group=G, attempt=1, floor=250)]


def test_a_rank_that_has_returned_holds_nobody_back() -> None:
    gang = Gang(3)
    gang.rows(0, 1, 150)
    gang.rows(1, 1, 150)
    gang.rows(2, 1, 99)
    assert gang.rows(2, 100, 51)[1] == [v.TellFloor(group=G, attempt=1, floor=150)]
    assert gang.post(v.RankReturned, rank=2, value=b"null")[1] == []


def test_a_rank_that_goes_on_where_another_has_returned_fails_the_attempt() -> None:
    gang = Gang(2)
    gang.rows(0, 1, 150)
    changes, commands = gang.post(v.RankReturned, rank=1, value=b"null")
    (failed,) = [change for change in changes if isinstance(change, v.Failed)]
    assert (failed.failure.rank, failed.failure.kind) == (1, failures.MISMATCH)
    assert commands == [KILL]


def test_the_first_failure_has_the_rest_killed_and_the_second_does_not_kill_again() -> None:
    gang = Gang(3)
    changes, commands = gang.post(v.RankExited, rank=1, status=-9)
    assert changes == [
        v.Failed(group=G, failure=failures.exit_failure(1, -9, started=True)),
        v.Gone(group=G, rank=1),
        v.Ending(group=G),
    ]
    assert commands == [KILL]
    assert gang.post(v.RankExited, rank=0, status=3)[1] == []
    assert gang.post(v.RankExited, rank=2, status=-9, ours=True) == ([v.Gone(group=G, rank=2)], [])
    assert [failure.rank for failure in gang.group.failures] == [1, 0]
    assert group.over(gang.group)


def test_a_rank_that_raised_fails_once() -> None:
    gang = Gang(1)
    raised = {"rank": 0, "error": "ValueError", "message": "bad", "traceback": "…", "started": True}
    changes, _ = gang.post(v.RankRaised, **raised)
    assert changes[0].failure == f.RankFailure(
        rank=0, kind=failures.EXCEPTION, message="bad", error="ValueError", traceback="…"
    )
    assert gang.post(v.RankRaised, **raised) == ([], [])
    assert gang.post(v.RankExited, rank=0, status=1) == ([v.Gone(group=G, rank=0)], [])
    assert len(gang.group.failures) == 1


def test_what_was_raised_before_the_functions_first_line_is_a_failed_start() -> None:
    gang = Gang(1, running=False)
    changes, _ = gang.post(v.RankRaised, rank=0, error="ImportError", message="", traceback="", started=False)
    assert changes[0].failure.kind == failures.STARTUP


def test_a_rank_that_returned_cannot_fail_any_more() -> None:
    gang = Gang(2)
    gang.post(v.RankReturned, rank=0, value=b"7")
    assert gang.post(v.RankRaised, rank=0, error="E", message="", traceback="", started=True) == ([], [])
    assert gang.post(v.RankReturned, rank=0, value=b"8") == ([], [])
    assert gang.post(v.RankExited, rank=0, status=1) == ([v.Gone(group=G, rank=0)], [])
    assert gang.group.ranks[0].value == b"7"
    assert not group.finished(gang.group)
    gang.post(v.RankReturned, rank=1, value=b"null")
    gang.post(v.RankExited, rank=1, status=0)
    assert group.over(gang.group)
    assert group.finished(gang.group)


def test_a_lost_node_takes_its_ranks_with_it_and_no_others() -> None:
    gang = Gang(4)
    gang.post(v.GroupPlaced, nodes=("a", "b", "b", "b"))
    gang.post(v.RankReturned, rank=2, value=b"null")
    changes, commands = gang.lose("b")
    lost = "was lost with node b: its connection ended"
    assert changes == [
        v.Failed(group=G, failure=f.RankFailure(rank=1, kind=failures.NODE_LOST, message=lost)),
        v.Gone(group=G, rank=1),
        v.Gone(group=G, rank=2),
        v.Failed(group=G, failure=f.RankFailure(rank=3, kind=failures.NODE_LOST, message=lost)),
        v.Gone(group=G, rank=3),
        v.Ending(group=G),
    ]
    assert commands == [KILL]
    assert gang.lose("b") == ([], [])
    assert gang.lose("elsewhere") == ([], [])


def test_a_group_that_cannot_be_placed_has_gone_as_it_came() -> None:
    gang = Gang(2, running=False)
    changes, _ = gang.post(v.GroupNotPlaced, reason="no room")
    assert [type(change) for change in changes] == [v.Failed, v.Gone, v.Gone, v.Ending]
    assert changes[0].failure.kind == failures.STARTUP
    assert group.over(gang.group)


def test_a_checkpoint_is_acknowledged_after_its_manifest() -> None:
    gang = Gang(2)
    gang.rows(1, 1)
    changes, (upload,) = gang.declare(0, 1)
    assert any(isinstance(change, f.RowsReported) for change in changes)
    assert isinstance(upload, v.UploadFiles)
    _, (manifest,) = gang.post(v.FilesUploaded, rank=0, index=0, files=(FileEntry("a", 1, "x"),))
    assert isinstance(manifest, v.WriteManifest)
    assert gang.post(v.ManifestWritten, index=7) == ([], [])
    (committed,), (ack,) = gang.post(v.ManifestWritten, index=0)
    assert isinstance(committed, f.CheckpointCommitted)
    assert ack == v.Acknowledge(group=G, attempt=1, call=1, index=0, directory="checkpoint_000000")
    assert gang.post(v.ManifestWritten, index=0) == ([], [])


@pytest.mark.parametrize("rank_zero_first", [True, False])
def test_rank_zeros_metrics_stand_for_a_checkpoint_whoever_comes_to_it_first(rank_zero_first: bool) -> None:
    gang = Gang(3)
    report = [
        lambda: gang.post(v.RowsArrived, rank=0, first=1, count=3, rows=b'{"n":1},{"n":2},{"n":3}'),
        lambda: (gang.rows(1, 1), gang.rows(2, 1), gang.rows(2, 2), gang.declare(1, 2)),
    ]
    for step in report if rank_zero_first else reversed(report):
        step()
    gang.post(v.FilesUploaded, rank=1, index=0, files=(FILE,))
    (committed,), _ = gang.post(v.ManifestWritten, index=0)
    assert bytes(committed.metrics) == b'{"n":2}'


def test_repeated_uploads_and_digests_change_nothing() -> None:
    gang = Gang(2)
    gang.declare(1, 1)
    assert gang.declare(1, 1) == ([], [])
    gang.declare(0, 1)
    digest = {"call": 1, "files": (FileEntry("a", 1, "x"),)}
    gang.post(v.FilesDigested, rank=0, **digest)
    assert gang.post(v.FilesDigested, rank=0, **digest) == ([], [])
    gang.post(v.FilesDigested, rank=1, **digest)
    assert gang.post(v.FilesUploaded, rank=1, index=0, files=()) == ([], [])
    gang.post(v.FilesUploaded, rank=0, index=0, files=(FILE,))
    assert gang.post(v.FilesUploaded, rank=0, index=0, files=(FILE,)) == ([], [])


def test_an_attempt_is_not_over_while_a_manifest_is_being_written() -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    gang.post(v.FilesUploaded, rank=0, index=0, files=(FILE,))
    gang.post(v.RankExited, rank=0, status=-9)
    assert not group.over(gang.group)
    gang.post(v.ManifestWritten, index=0)
    assert group.over(gang.group)
    assert group.abandoned_directories(gang.group) == ()


def test_an_upload_that_was_cut_off_leaves_a_directory_to_sweep() -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    gang.post(v.RankExited, rank=0, status=-9)
    assert group.over(gang.group)
    assert group.abandoned_directories(gang.group) == ("checkpoint_000000",)


@pytest.mark.parametrize("unreadable", [False, True])
def test_an_upload_that_gave_up_is_the_stores_fault_or_the_ranks_own(unreadable: bool) -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    changes, commands = gang.post(v.UploadGaveUp, rank=0, index=0, error="no", unreadable=unreadable)
    assert changes[0].failure.kind == (failures.FILES if unreadable else failures.STORAGE)
    assert commands == [KILL]


def test_a_rank_whose_files_are_gone_may_still_say_why() -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    gang.post(v.UploadGaveUp, rank=0, index=0, error="no such file", unreadable=True)
    raised = {"rank": 0, "error": "ValueError", "message": "bad", "traceback": "", "started": True}
    gang.post(v.RankRaised, **raised)
    assert [failure.kind for failure in gang.group.failures] == [failures.FILES, failures.EXCEPTION]
    assert gang.post(v.RankRaised, **raised) == ([], [])
    assert gang.post(v.UploadGaveUp, rank=0, index=0, error="no such file", unreadable=True) == ([], [])


def test_a_manifest_that_cannot_be_written_is_a_storage_failure() -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    gang.post(v.FilesUploaded, rank=0, index=0, files=(FILE,))
    changes, _ = gang.post(v.ManifestGaveUp, index=0, error="full")
    assert changes[0] == v.CommitDropped(group=G, call=1)
    assert (changes[1].failure.kind, changes[1].failure.message) == (
        failures.STORAGE,
        "could not commit checkpoint_000000: full",
    )


def test_ranks_that_have_ended_while_others_wait_are_named() -> None:
    gang = Gang(4)
    for rank in (1, 3):
        gang.rows(rank, 1)
        gang.post(v.RankReturned, rank=rank, value=b"null")
    gang.rows(0, 1)
    gang.rows(2, 1)
    changes, commands = gang.declare(0, 2)
    (failed,) = [change for change in changes if isinstance(change, v.Failed)]
    assert failed.failure.kind == failures.MISMATCH
    assert failed.failure.message == (
        "ended after 1 report while rank 0 went on to report 2; every rank must call report the same number of times "
        "(rank 3 ended there too)"
    )
    assert commands == [KILL]


def test_an_attempts_end_tells_how_many_reports_each_rank_made() -> None:
    gang = Gang(2)
    gang.rows(0, 1, 4)
    gang.rows(1, 1, 2)
    assert group.ended(gang.group, 9.0, "stopped") == f.AttemptEnded(
        at=9.0, group=G, attempt=1, outcome="stopped", calls=(4, 2)
    )


def test_a_new_driver_burns_the_indices_that_were_reserved() -> None:
    gang = Gang(1)
    gang.declare(0, 1)
    gang.apply(f.RunOpened(at=2.0, epoch=2, host="h", pid=1, function="m:f", fingerprint="{}"))
    assert gang.group.phase == group.ORPHANED
    assert gang.group.commits.next_index == 10
    assert gang.group.commits.pending == {}
