"""Checkpoints: what is committed, what is kept, what is loaded, and what happens to damaged ones."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import train
from holdfast.control import dispatch, failures
from holdfast.errors import ConfigurationError, DamagedError, StorageError
from holdfast.journal import facts as f
from tests.train import loops, runs

STEPS = 3


def test_when_report_returns_the_checkpoint_is_in_storage_and_in_the_journal(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.look_after_report, {"steps": STEPS}, workers=2)
    assert result.return_value == [[f"checkpoint_{n:06d}", True, True] for n in range(STEPS)]


def test_the_ranks_files_become_one_directory_and_rank_zeros_metrics_stand_for_it(tmp_path: Path) -> None:
    files = {
        "0": {"model.bin": "zero", "config/deep/er.json": "{}"},
        "1": {"shard_1.bin": "one", "config/one.txt": ""},
        "2": {},
    }
    result = runs.fit(tmp_path, loops.bring, {"files": files}, workers=3)
    assert result.checkpoint is not None
    assert runs.content(result.checkpoint) == {
        "model.bin": b"zero",
        "config/deep/er.json": b"{}",
        "shard_1.bin": b"one",
        "config/one.txt": b"",
    }
    ((_, metrics),) = result.best_checkpoints
    assert metrics == {"rank": 0}


def test_a_rank_that_brings_no_files_does_not_wait_for_the_commit(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.bring, {"files": {"0": {"a": "1"}}}, workers=2)
    assert result.checkpoint is not None
    assert runs.content(result.checkpoint) == {"a": b"1"}
    assert runs.rows(result.path, 1) == [{"rank": 1}]


def test_a_checkpoint_that_one_rank_brings_has_rank_zeros_metrics(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.bring, {"files": {"1": {"a": "1"}}}, workers=2)
    ((_, metrics),) = result.best_checkpoints
    assert metrics == {"rank": 0}


def test_the_same_file_with_the_same_content_is_fine(tmp_path: Path) -> None:
    files = {"0": {"shared.json": "same", "zero": "0"}, "1": {"shared.json": "same", "one": "1"}}
    result = runs.fit(tmp_path, loops.bring, {"files": files}, workers=2)
    assert result.checkpoint is not None
    assert runs.content(result.checkpoint) == {"shared.json": b"same", "zero": b"0", "one": b"1"}


@pytest.mark.parametrize("second", ["differ", "longer text"])
def test_the_same_file_with_different_content_is_an_error_before_a_byte_moves(second: str, tmp_path: Path) -> None:
    files = {"0": {"clash/model.bin": "other!"}, "2": {"clash/model.bin": second, "fine": "2"}}
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, loops.bring, {"files": files}, workers=3)
    text = str(caught.value)
    assert "ranks 0 and 2 both brought a file 'clash/model.bin' to report 1, with different content" in text
    assert "Give each rank's files their own name" in text
    assert runs.directories(tmp_path / "run") == []
    assert runs.facts(tmp_path / "run", f.IndicesReserved) == []


def test_a_checkpoint_may_be_empty(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.bring, {"files": {"0": {}, "1": {}}, "always": True}, workers=2)
    assert result.checkpoint is not None
    assert runs.content(result.checkpoint) == {}


def test_a_checkpoint_reported_from_a_loaded_one_gets_a_manifest_of_its_own(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_what_was_loaded)
    assert [runs.content(checkpoint) for checkpoint, _ in result.best_checkpoints] == [{"a": b"first"}] * 2


def test_get_checkpoint_is_the_newest_commit_on_every_rank_also_in_mid_attempt(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.look_while_training, {"steps": STEPS}, workers=2)
    assert result.return_value == [None, *(f"checkpoint_{n:06d}" for n in range(STEPS))]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"num_to_keep": 1}, [5]),
        ({"num_to_keep": 3}, [3, 4, 5]),
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"num_to_keep": 2, "checkpoint_score_attribute": "acc"}, [1, 3, 5]),
        ({"num_to_keep": 2, "checkpoint_score_attribute": "eval/acc"}, [1, 3, 5]),
        ({"num_to_keep": 3, "checkpoint_score_attribute": "acc", "checkpoint_score_order": "min"}, [0, 2, 4, 5]),
        ({"num_to_keep": 1, "checkpoint_score_attribute": "no such metric"}, [5]),
    ],
)
def test_retention_keeps_the_best_and_always_the_newest(
    keep: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    scores = [0.1, 0.9, 0.2, 0.8, 0.3, 0.35]
    result = runs.fit(tmp_path, loops.score, {"scores": scores}, keep=train.CheckpointConfig(**keep))
    wanted = [f"checkpoint_{index:06d}" for index in expected]
    assert runs.directories(result.path) == wanted
    assert sorted(Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints) == wanted
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).name == "checkpoint_000005"
    for checkpoint, metrics in result.best_checkpoints:
        assert runs.content(checkpoint) == {"score": str(metrics["acc"]).encode()}


def test_what_was_given_up_is_gone_when_fit_returns_however_much_it_is(tmp_path: Path) -> None:
    result = runs.fit(
        tmp_path, loops.many_files, {"steps": 3, "files": 400}, keep=train.CheckpointConfig(num_to_keep=1)
    )
    assert runs.directories(result.path) == ["checkpoint_000002"]


def flip_a_byte(directory: Path) -> None:
    path = directory / "rank_1.json"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def delete_a_file(directory: Path) -> None:
    (directory / "rank_1.json").unlink()


def cut_the_manifest(directory: Path) -> None:
    path = directory / ".manifest.json"
    path.write_bytes(path.read_bytes()[:-7])


def delete_the_manifest(directory: Path) -> None:
    (directory / ".manifest.json").unlink()


def cut_a_file(directory: Path) -> None:
    os.truncate(directory / "rank_0.json", 5)


DAMAGES = [flip_a_byte, delete_a_file, cut_the_manifest, delete_the_manifest, cut_a_file, shutil.rmtree]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_loudly_and_costs_nothing(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.fit(tmp_path, config={"steps": STEPS}, workers=2)
    damage(tmp_path / "run" / "checkpoint_000002")
    result = runs.fit(tmp_path, config={"steps": STEPS + 2}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=STEPS + 2)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 2, 1]
    assert [(root.kind, root.checkpoint) for root in runs.roots(result.path)] == [(failures.DAMAGED, 2)]
    assert runs.charges(result.path) == []
    assert "checkpoint_000002" not in [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    out = capsys.readouterr().out
    assert "WARNING: checkpoint_000002 is damaged and will not be used again" in out
    assert "attempt 2 failed (not charged): rank" in out


def test_several_damaged_checkpoints_are_passed_over_one_after_the_other(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 4}, workers=2)
    for index in (1, 2, 3):
        flip_a_byte(tmp_path / "run" / f"checkpoint_{index:06d}")
    result = runs.fit(tmp_path, config={"steps": 5}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=5)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 3, 2, 1, 0]
    assert runs.charges(result.path) == []


def test_with_every_checkpoint_damaged_there_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 2}, workers=2)
    for directory in runs.directories(tmp_path / "run"):
        delete_a_file(tmp_path / "run" / directory)
    for _ in range(2):
        with pytest.raises(train.TrainingFailedError, match="every checkpoint of this run is damaged"):
            runs.fit(tmp_path, config={"steps": 3}, workers=2)
    assert None not in [fact.resume for fact in runs.facts(tmp_path / "run", f.AttemptStarted)[1:]]
    assert runs.charges(tmp_path / "run") == []


def test_a_checkpoint_restored_from_a_backup_is_used_again(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 1}, workers=2)
    backup = shutil.copytree(tmp_path / "run" / "checkpoint_000000", tmp_path / "backup")
    flip_a_byte(tmp_path / "run" / "checkpoint_000000")
    with pytest.raises(train.TrainingFailedError, match="restore one from a backup"):
        runs.fit(tmp_path, config={"steps": 3}, workers=2)
    shutil.copytree(backup, tmp_path / "run" / "checkpoint_000000", dirs_exist_ok=True)
    result = runs.fit(tmp_path, config={"steps": 3}, workers=2)
    assert result.return_value == loops.undisturbed_weight(0, 3)


def test_a_damaged_checkpoint_that_a_worker_looks_at_in_mid_attempt_ends_the_attempt_uncharged(
    tmp_path: Path, gate: Callable[..., runs.Gate]
) -> None:
    meeting = gate(0)
    config = {"steps": STEPS, "gate": meeting.path, "gate_step": 2, "look": True}
    with runs.fitting(tmp_path, loops.climb_and_look, config) as running:
        meeting.wait(0)
        flip = tmp_path / "run" / "checkpoint_000001" / "rank_0.json"
        flip.write_bytes(flip.read_bytes().replace(b"2", b"7"))
        meeting.open(0)
        meeting.wait(0)
        meeting.open(0)
        result = running.result()
    assert result.return_value == loops.undisturbed_weight(0, STEPS)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 0]
    assert runs.charges(result.path) == []


def test_half_an_upload_is_swept_when_the_run_is_next_opened(tmp_path: Path) -> None:
    first = runs.drive(tmp_path, config={"steps": 2}, faults=f"manifest.before:kill:index=1,once={tmp_path}/fired")
    assert first.process.returncode == -signal.SIGKILL
    half = tmp_path / "run" / "checkpoint_000001"
    assert sorted(os.listdir(half)) == ["rank_0.json", "rank_1.json"]
    result = runs.fit(tmp_path, config={"steps": 2}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=2)
    assert not half.exists()
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 0]


def test_a_users_own_folders_in_the_runs_directory_are_left_alone(tmp_path: Path) -> None:
    for name in ("checkpoint_best", "checkpoint_12", "notes", "checkpoint_000001.old"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "file").write_text("mine")
    result = runs.fit(tmp_path, config={"steps": 2}, keep=train.CheckpointConfig(num_to_keep=1))
    for name in ("checkpoint_best", "checkpoint_12", "notes", "checkpoint_000001.old"):
        assert Path(result.path, name, "file").read_text() == "mine"


def test_a_checkpoint_can_be_read_outside_a_worker(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.bring, {"files": {"0": {"a/b": "text", "c": ""}}})
    checkpoint = result.checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        assert directory == checkpoint.path
    copied = Path(checkpoint.to_directory())
    assert (copied / "a" / "b").read_text() == "text"
    assert sorted(path.name for path in copied.rglob("*")) == ["a", "b", "c"]
    shutil.rmtree(copied)
    there = tmp_path / "there"
    assert checkpoint.to_directory(there) == str(there)
    assert (there / "c").read_text() == ""
    (Path(checkpoint.path) / "c").write_text("changed")
    with pytest.raises(DamagedError, match="'c'"):
        checkpoint.to_directory(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(DamagedError, match="is not there"), train.Checkpoint(tmp_path / "nowhere").as_directory():
        pass


def test_a_directory_is_a_checkpoint_and_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("1")
    checkpoint = train.Checkpoint.from_directory(tmp_path / "mine")
    with checkpoint.as_directory() as directory:
        assert Path(directory, "a").read_text() == "1"
    assert checkpoint == train.Checkpoint(tmp_path / "mine")
    assert repr(checkpoint) == f"Checkpoint(path='{tmp_path}/mine')"
    for nothing in (tmp_path / "none", tmp_path / "mine" / "a"):
        with pytest.raises(ConfigurationError, match="there is no such directory"):
            train.Checkpoint.from_directory(nothing)


def test_a_run_whose_directory_was_moved_resumes(tmp_path: Path) -> None:
    runs.fit(tmp_path / "here", config={"steps": 2}, workers=2)
    shutil.move(tmp_path / "here", tmp_path / "there")
    result = runs.fit(tmp_path / "there", config={"steps": 4}, workers=2)
    runs.assert_undisturbed(result, workers=2, steps=4)
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 1]


def test_a_disk_that_is_full_for_too_long_is_a_clear_failure_and_leaves_nothing_half_written(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"sizes": [1000, 4 << 20]}
    with pytest.raises(train.TrainingFailedError) as caught:
        runs.fit(small_disk, loops.grow, config, failure={"storage_timeout_s": 0.5})
    assert f"the disk that holds {small_disk}/run is full; free some space on it" in str(caught.value)
    assert "storage failed" in str(caught.value)
    assert "rank 0's upload failed and is tried again for 0.5 s" in capsys.readouterr().out
    assert runs.directories(small_disk / "run") == ["checkpoint_000000"]
    assert [fact.status for fact in runs.facts(small_disk / "run", f.RunEnded)] == ["FAILED"]
    assert runs.charges(small_disk / "run") == []
    result = runs.fit(small_disk, loops.grow, {"sizes": [1000, 2000]})
    assert result.return_value == [1000, 2000]
    assert [fact.resume for fact in runs.facts(result.path, f.AttemptStarted)] == [None, 0]


def test_a_run_goes_on_when_space_is_freed_while_it_waits(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (small_disk / "in the way").write_bytes(bytes(1_500_000))
    with runs.fitting(small_disk, loops.grow, {"sizes": [1000, 1_000_000]}, failure={"storage_timeout_s": 30}) as run:
        runs.wait_for_text(capfd, "rank 0's upload failed and is tried again for 30 s")
        (small_disk / "in the way").unlink()
        result = run.result()
    assert result.return_value == [1000, 1_000_000]
    assert runs.outcomes(result.path) == ["finished"]
    assert result.checkpoint is not None
    assert len(runs.content(result.checkpoint)["data"]) == 1_000_000


def test_patience_with_a_manifest_lasts_as_long_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def refuse(*arguments: object) -> None:
        tried.append(time.monotonic())
        raise StorageError("not now")

    monkeypatch.setattr(dispatch, "write_manifest", refuse)
    with pytest.raises(train.TrainingFailedError, match="not now"):
        runs.fit(tmp_path, config={"steps": 1}, failure={"storage_timeout_s": 1.0})
    assert 0.99 <= tried[-1] - tried[0] < 1.5


def test_a_manifest_of_the_users_own_below_the_top_is_a_file_like_any_other(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.bring, {"files": {"0": {"a": "1", "inner/.manifest.json": "2"}}})
    assert result.checkpoint is not None
    copy = Path(result.checkpoint.to_directory(tmp_path / "copy"))
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "a",
        "inner/.manifest.json",
    ]


def test_a_relative_path_is_the_workers_own(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, loops.report_a_relative_path, {"folder": str(tmp_path)})
    assert result.checkpoint is not None
    assert runs.content(result.checkpoint) == {"a": b"1"}
