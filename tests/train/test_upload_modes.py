"""Every manner of bringing a checkpoint keeps its promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import train
from holdfast.journal import facts as f
from tests.train import runs, upload_loops


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    place = tmp_path / "scratch"
    place.mkdir()
    return place


def commits(path: Path) -> list[f.CheckpointCommitted]:
    return runs.facts(path / "run", f.CheckpointCommitted)


def test_a_report_in_the_background_returns_before_its_upload_begins(
    tmp_path: Path, scratch: Path, arm: Callable[..., None], gate: Callable[..., runs.Gate]
) -> None:
    held = gate()
    arm("upload.begin", "hold", gate=held.at(0), index=0)
    with runs.fitting(tmp_path, upload_loops.in_background, {"steps": 4, "scratch": str(scratch)}) as running:
        held.wait(0)
        runs.wait_until(lambda: (scratch / "reported_0_2").exists())
        assert commits(tmp_path) == []
        assert not (scratch / "reported_0_3").exists(), "a third one went on while two were under way"
        held.open(0)
        result = running.result()
    assert [commit.call for commit in commits(tmp_path)] == [1, 2, 3, 4]
    assert [commit.index for commit in commits(tmp_path)] == [0, 1, 2, 3]
    assert result.metrics == {"step": 4}
    assert runs.content(result.checkpoint) == {"rank_0": b"4"}


def test_local_files_go_after_an_upload_in_the_background_unless_they_are_to_stay(
    tmp_path: Path, scratch: Path
) -> None:
    gone = runs.fit(tmp_path, upload_loops.in_background, {"steps": 2, "scratch": str(scratch)})
    assert [Path(folder).exists() for folder in gone.return_value] == [False, False]
    config = {"steps": 2, "scratch": str(scratch), "delete": False}
    kept = runs.fit(tmp_path, upload_loops.in_background, config, name="kept")
    assert [Path(folder).exists() for folder in kept.return_value] == [True, True]


def test_an_upload_in_the_background_outlives_the_rank_that_brought_it(
    tmp_path: Path, scratch: Path, arm: Callable[..., None], gate: Callable[..., runs.Gate]
) -> None:
    held = gate()
    arm("upload.begin", "hold", gate=held.at(0), index=0)
    config = {"steps": 3, "scratch": str(scratch), "die_after": 1}
    with runs.fitting(tmp_path, upload_loops.in_background, config, max_failures=1) as running:
        held.wait(0)
        runs.wait_until(lambda: (scratch / "reported_0_1").exists())
        held.open(0)
        running.result()
    assert [started.resume for started in runs.facts(tmp_path / "run", f.AttemptStarted)] == [None, 0]
    assert [(commit.attempt, commit.call) for commit in commits(tmp_path)] == [(1, 1), (2, 1), (2, 2)]


def test_many_ranks_commit_in_order_in_the_background(tmp_path: Path, scratch: Path) -> None:
    result = runs.fit(tmp_path, upload_loops.in_background, {"steps": 20, "scratch": str(scratch)}, workers=3)
    assert [commit.call for commit in commits(tmp_path)] == list(range(1, 21))
    assert runs.content(result.checkpoint) == {f"rank_{rank}": b"20" for rank in range(3)}


def test_a_directory_has_the_name_that_was_asked_for_and_never_twice(tmp_path: Path, scratch: Path) -> None:
    config = {"names": ["best", "last", "best", "checkpoint_000007"], "scratch": str(scratch)}
    result = runs.fit(tmp_path, upload_loops.named, config)
    names = [commit.directory for commit in commits(tmp_path)]
    assert names == ["best", "last", "best_000002", "checkpoint_000007_000003"]
    assert [runs.content(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
        {"rank_0": str(step).encode()} for step in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "journal", "", 3])
def test_a_directory_name_that_cannot_be_is_refused(tmp_path: Path, scratch: Path, name: object) -> None:
    with pytest.raises(train.WorkerGroupError, match="checkpoint_dir_name"):
        runs.fit(tmp_path, upload_loops.named, {"names": [name], "scratch": str(scratch)})
    assert commits(tmp_path) == []


def test_files_that_lie_in_the_runs_directory_become_a_checkpoint_where_they_lie(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, upload_loops.in_place, {"names": ["one", "two"]}, workers=2)
    assert [commit.directory for commit in commits(tmp_path)] == ["one", "two"]
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(tmp_path / "run" / "two")
    assert runs.content(result.checkpoint) == {"rank_0": b"2", "rank_1": b"2"}


def test_files_elsewhere_are_refused_without_an_upload(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="must lie in a folder of the run's own directory"):
        runs.fit(tmp_path, upload_loops.in_place, {"names": [str(tmp_path / "elsewhere")]})


def test_a_directory_can_be_one_checkpoint_only(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match="'one' is the directory of another checkpoint"):
        runs.fit(tmp_path, upload_loops.in_place, {"names": ["one", "one"]})


def test_the_users_own_upload_is_recorded(tmp_path: Path, scratch: Path) -> None:
    result = runs.fit(tmp_path, upload_loops.with_own_upload, {"scratch": str(scratch)}, workers=2)
    assert len(commits(tmp_path)) == 2
    assert runs.content(result.checkpoint) == {"rank_0": b"2", "rank_1": b"2"}


def test_ranks_at_odds_are_named(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(
        train.WorkerGroupError, match=r"ranks [01] and [01] brought their files to report 1 in different"
    ):
        runs.fit(tmp_path, upload_loops.at_odds, {"scratch": str(scratch)}, workers=2)


def test_with_a_barrier_no_rank_is_ahead(tmp_path: Path) -> None:
    config = {"folder": str(tmp_path)}
    result = runs.fit(tmp_path, upload_loops.step_by_step, config, workers=2, report_barrier=True)
    assert result.return_value == [True] * 20


def test_ranks_that_report_more_often_than_others_are_named(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, upload_loops.uneven, {"reports": [3, 1, 3]}, workers=3)
    assert re.search(
        r"rank 1 ended after 1 report while (rank 0|rank 2|ranks 0, 2) went on to report 2", str(caught.value)
    )


def test_a_rank_can_look_back_at_every_checkpoint_that_is_kept(tmp_path: Path, scratch: Path) -> None:
    result = runs.fit(tmp_path, upload_loops.look_back, {"steps": 4, "scratch": str(scratch)}, max_failures=1)
    assert result.return_value == [(step, step, "COMMITTED") for step in (1, 2, 3, 4)]
