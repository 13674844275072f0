"""A run whose journal does not tell the whole story is not taken for another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast import train
from holdfast.errors import JournalError
from holdfast.train import program
from tests.train import loops, runs


def test_a_run_that_lost_its_journal_is_refused_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 3})
    shutil.rmtree(tmp_path / "run" / "journal")
    shutil.rmtree(tmp_path / "run" / "epochs")
    kept = runs.directories(tmp_path / "run")
    with pytest.raises(JournalError, match=r"checkpoint_000000.*of which its journal knows nothing"):
        runs.fit(tmp_path, config={"steps": 5})
    assert runs.directories(tmp_path / "run") == kept


def test_a_run_that_lost_its_newest_journal_file_is_refused(tmp_path: Path) -> None:
    runs.fit(tmp_path, config={"steps": 2})
    runs.fit(tmp_path, config={"steps": 4})
    for part in (tmp_path / "run" / "journal").glob("000002-*"):
        part.unlink()
    kept = runs.directories(tmp_path / "run")
    with pytest.raises(JournalError, match="a part of the journal is missing"):
        runs.fit(tmp_path, config={"steps": 6})
    assert runs.directories(tmp_path / "run") == kept


def test_a_config_that_json_cannot_hold_is_told_from_another(tmp_path: Path) -> None:
    one, other = program.fingerprint({"data": Path("/a")}), program.fingerprint({"data": Path("/b")})
    assert one != other
    assert one == program.fingerprint({"data": Path("/a")})
    assert program.fingerprint({"a": 1, "b": 2}) == program.fingerprint({"b": 2, "a": 1})


def test_an_error_whose_text_is_not_utf8_is_told(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match=r"FileNotFoundError: nothing at \\udcff"):
        runs.fit(tmp_path, loops.raise_odd_text)


def test_a_value_that_cannot_be_shown_does_not_fail_the_run(tmp_path: Path) -> None:
    assert runs.fit(tmp_path, loops.return_stubborn).metrics is None
