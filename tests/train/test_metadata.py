"""What a user notes about a checkpoint, before it is reported and after it was committed."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast import train
from holdfast.errors import ConfigurationError, DamagedError, MetricsError, StorageError
from tests.train import runs


def note_and_report(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Report a directory with notes, then add to them as they lie in storage."""
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model").write_text("1")
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"epoch": 1, **config})
        seen.append(checkpoint.get_metadata())
        train.report({"epoch": 1}, checkpoint=checkpoint)
    committed = train.get_checkpoint()
    assert committed is not None
    seen.append(committed.get_metadata())
    committed.update_metadata({"judged": True})
    with committed.as_directory() as folder:
        assert Path(folder, "model").read_text() == "1"
    seen.append(committed.get_metadata())
    return seen


def test_metadata_travels_with_a_report_and_may_be_changed_in_a_worker_afterwards(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, note_and_report, {"by": "rank"})
    first = {"epoch": 1, "by": "rank"}
    assert result.return_value == [first, first, {**first, "judged": True}]
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {**first, "judged": True}


def test_changed_metadata_does_not_damage_a_checkpoint(tmp_path: Path) -> None:
    result = runs.fit(tmp_path, config={"steps": 1})
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {}
    result.checkpoint.set_metadata({"a": 1, "b": [1, {"c": None}]})
    result.checkpoint.update_metadata({"a": 2})
    again = runs.fit(tmp_path, config={"steps": 2})
    runs.assert_undisturbed(again, workers=1, steps=2)
    assert runs.outcomes(again.path) == ["finished", "finished"]
    (first, _), (second, _) = again.best_checkpoints
    assert first.get_metadata() == {"a": 2, "b": [1, {"c": None}]}
    assert second.get_metadata() == {}


def test_metadata_of_files_that_lie_in_storage_already_may_be_changed_too(tmp_path: Path) -> None:
    def in_place() -> None:
        folder = Path(train.get_context().get_storage(), "mine")
        folder.mkdir()
        (folder / "model").write_text("1")
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"a": 1})
        train.report({}, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)

    result = runs.fit(tmp_path, in_place)
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"a": 1}
    result.checkpoint.update_metadata({"b": 2})
    with result.checkpoint.as_directory() as folder:
        assert sorted(path.name for path in Path(folder).iterdir()) == [".manifest.json", ".metadata.json", "model"]


def test_ranks_that_note_different_things_about_one_checkpoint_are_refused(tmp_path: Path) -> None:
    def disagree(config: dict[str, Any]) -> None:
        rank = train.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = train.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({"by": rank if config["differ"] else "all"})
            train.report({}, checkpoint)

    runs.fit(tmp_path, disagree, {"differ": False}, workers=2, name="alike")
    with pytest.raises(train.TrainingFailedError, match=r"both brought a file '\.metadata\.json'"):
        runs.fit(tmp_path, disagree, {"differ": True}, workers=2, name="differ")


def test_metadata_is_part_of_a_copy_and_replaced_as_a_whole(tmp_path: Path) -> None:
    checkpoint = train.Checkpoint.from_directory(tmp_path)
    checkpoint.set_metadata({"loss": math.nan, "score": numpy.float32(0.5)})
    assert math.isnan(checkpoint.get_metadata()["loss"])
    assert checkpoint.get_metadata()["score"] == 0.5
    checkpoint.set_metadata({"other": 1})
    assert checkpoint.get_metadata() == {"other": 1}
    assert [path.name for path in tmp_path.iterdir()] == [".metadata.json"]
    with tempfile.TemporaryDirectory() as copy:
        assert train.Checkpoint(checkpoint.to_directory(copy)).get_metadata() == {"other": 1}


def test_metadata_that_json_cannot_hold_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    checkpoint = train.Checkpoint.from_directory(tmp_path)
    checkpoint.set_metadata({"a": 1})
    with pytest.raises(MetricsError, match=r"metadata must be what JSON can hold: .*'tags' is a set.*sorted\(\)"):
        checkpoint.update_metadata({"tags": {"x"}})
    with pytest.raises(MetricsError, match="keys must be text"):
        checkpoint.set_metadata({("a", "b"): 1})  # type: ignore[dict-item]
    with pytest.raises(MetricsError, match="must be a dict, not 'text'"):
        checkpoint.set_metadata("text")  # type: ignore[arg-type]
    assert checkpoint.get_metadata() == {"a": 1}


def test_metadata_of_what_is_not_there_or_was_damaged_is_an_error(tmp_path: Path) -> None:
    nowhere = train.Checkpoint(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is not there"):
        nowhere.get_metadata()
    with pytest.raises(StorageError, match="is not there"):
        nowhere.set_metadata({})
    assert not (tmp_path / "nowhere").exists()
    for text in ("{half", "[1]"):
        (tmp_path / ".metadata.json").write_text(text)
        with pytest.raises(DamagedError, match="JSON"):
            train.Checkpoint(tmp_path).get_metadata()


def test_a_filesystem_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Checkpoint\(filesystem=.*leave filesystem out"):
        train.Checkpoint(tmp_path, filesystem=object())  # type: ignore[arg-type]
    assert train.Checkpoint(tmp_path).filesystem is None
