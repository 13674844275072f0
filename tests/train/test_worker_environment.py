"""What the workers run in: variables, folder and modules; and whose prints reach the console."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import train
from holdfast.errors import ConfigurationError
from holdfast.train import program
from tests.train import runs


def look_around() -> dict[str, Any]:
    import hf_written_for_the_test as written  # type: ignore[import-not-found]

    return {
        "at_import": written.SEEN,
        "variable": os.environ["HF_TEST_VARIABLE"],
        "home": os.environ["HOME"],
        "folder": os.getcwd(),
        "module": written.__file__,
        "version": written.VERSION,
    }


def write_module(folder: Path, version: int) -> None:
    folder.mkdir(exist_ok=True)
    text = f"import os\nSEEN = os.environ.get('HF_TEST_VARIABLE')\nVERSION = {version}{' ' * version}\n"
    (folder / "hf_written_for_the_test.py").write_text(text)


def test_variables_are_set_before_modules_of_the_working_folder_are_imported(tmp_path: Path) -> None:
    write_module(tmp_path / "code", 1)
    runtime = {"env_vars": {"HF_TEST_VARIABLE": "here"}, "working_dir": tmp_path / "code"}
    result = runs.fit(tmp_path, look_around, worker_runtime_env=runtime)
    assert result.return_value == {
        "at_import": "here",
        "variable": "here",
        "home": os.environ["HOME"],
        "folder": str(tmp_path / "code"),
        "module": str(tmp_path / "code" / "hf_written_for_the_test.py"),
        "version": 1,
    }
    assert "HF_TEST_VARIABLE" not in os.environ
    assert os.getcwd() != result.return_value["folder"]


def test_a_second_run_sees_other_variables_and_changed_modules(tmp_path: Path) -> None:
    for version in (1, 2):
        write_module(tmp_path / "code", version)
        runtime = {"env_vars": {"HF_TEST_VARIABLE": str(version)}, "working_dir": str(tmp_path / "code")}
        result = runs.fit(tmp_path, look_around, name=str(version), worker_runtime_env=runtime)
        assert (result.return_value["at_import"], result.return_value["version"]) == (str(version), version)
    write_module(tmp_path / "code", 3)
    result = runs.fit(tmp_path, look_around, name="3", worker_runtime_env=runtime)
    assert (result.return_value["at_import"], result.return_value["version"]) == ("2", 3)


def test_a_relative_working_folder_is_taken_from_where_fit_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    result = runs.fit(tmp_path, os.getcwd, worker_runtime_env={"working_dir": "code", "env_vars": None})
    assert result.return_value == str(tmp_path / "code")


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"env_var": {}}, "no option 'env_var'. Did you mean 'env_vars'? Its options are: env_vars, working_dir"),
        ({"pip": ["torch"]}, "no option 'pip'. Its options are: env_vars, working_dir"),
        ("env", "it must be a dict"),
        ({"env_vars": ["A=1"]}, "env_vars must be a dict of text"),
        ({"env_vars": {"A": 1}}, "env_vars['A'] is 1; write it as text: '1'"),
        ({"env_vars": {"A=B": "1"}}, "a name is text without '='"),
        ({"env_vars": {"": "1"}}, "a name is text without '='"),
        ({"working_dir": "/no/such/folder"}, "working_dir='/no/such/folder' is no folder of this machine"),
        ({"working_dir": 7}, "working_dir=7 is no folder of this machine"),
    ],
)
def test_what_workers_cannot_run_in_is_refused(runtime: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        train.RunConfig(worker_runtime_env=runtime)
    assert message in str(refused.value)


@pytest.mark.parametrize(("output", "ranks"), [("all", {0, 1}), ("none", set()), ("rank_zero", {0})])
def test_the_logging_config_chooses_whose_prints_reach_the_console(
    output: str, ranks: set[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging = train.LoggingConfig(worker_output=output)
    runs.fit(tmp_path, config={"steps": 1}, workers=2, logging_config=logging)
    printed = capsys.readouterr().out
    assert {rank for rank in (0, 1) if f"(rank {rank}) rank {rank} begins" in printed} == ranks
    assert (tmp_path / "run/logs/attempt_1/rank_1.log").read_text() == "rank 1 begins attempt 1\n"


def test_a_logging_config_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="one of none, rank_zero, all"):
        train.LoggingConfig(worker_output="some")
    with pytest.raises(ConfigurationError, match="a LoggingConfig"):
        train.RunConfig(logging_config="all")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="do not agree"):
        train.RunConfig(worker_output="all", logging_config=train.LoggingConfig(worker_output="none"))
    assert train.RunConfig(worker_output="all", logging_config=train.LoggingConfig(worker_output="all")).echo == "all"


def test_the_state_of_the_sources_is_short_and_changes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path / "code", 1)
    monkeypatch.syspath_prepend(tmp_path / "code")
    importlib.import_module("hf_written_for_the_test")
    try:
        before = program.environment(look_around, {}).sources
        write_module(tmp_path / "code", 2)
        assert program.environment(look_around, {}).sources != before
        assert len(before) < 100
    finally:
        del sys.modules["hf_written_for_the_test"]
