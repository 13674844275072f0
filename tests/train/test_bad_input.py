"""Bad input: an error that says what is wrong, where, and what to do, before anything was started or written."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast import train
from holdfast.errors import ConfigurationError, HoldfastError, MetricsError, NotInWorkerError, PicklingError
from tests.train import loops, runs

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def nothing_was_started() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []


def uses_a_global() -> None:
    with LOCK:
        pass


def takes_two(config: dict[str, Any], more: int) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: train.RunConfig(nme="x"),
            r"RunConfig has no option 'nme'\. Did you mean 'name'\? Its options are: name",
        ),
        (lambda: train.RunConfig(storage="x"), "Did you mean 'storage_path'"),
        (lambda: train.ScalingConfig(workers=2), "ScalingConfig has no option 'workers'.*num_workers"),
        (lambda: train.FailureConfig(max_failure=2), "Did you mean 'max_failures'"),
        (lambda: train.CheckpointConfig(keep=2), "CheckpointConfig has no option 'keep'.*num_to_keep"),
        (lambda: train.DataParallelTrainer(loops.climb, scaling_conf=1), "Did you mean 'scaling_config'"),
        (lambda: train.ScalingConfig(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), "ScalingConfig takes at most"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_valid_one(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        make()
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, HoldfastError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: train.ScalingConfig(num_workers=0), r"ScalingConfig\(num_workers=0\)"),
        (lambda: train.ScalingConfig(num_workers=-3), r"num_workers=-3"),
        (lambda: train.ScalingConfig(num_workers=1.5), r"num_workers=1\.5\): num_workers must be a whole number"),
        (lambda: train.ScalingConfig(num_workers=True), "num_workers=True"),
        (lambda: train.ScalingConfig(num_workers="2"), "num_workers='2'"),
        (lambda: train.FailureConfig(max_failures=-2), r"max_failures=-2\).*or -1 for no limit"),
        (lambda: train.FailureConfig(max_failures=None), "max_failures=None"),
        (lambda: train.FailureConfig(controller_failure_limit="many"), "controller_failure_limit='many'"),
        (lambda: train.FailureConfig(stop_on_repeat=1), "stop_on_repeat=1.*True or False"),
        (lambda: train.FailureConfig(hang_timeout_s=0), "hang_timeout_s=0.*a number of seconds, 'auto', or None"),
        (lambda: train.FailureConfig(hang_timeout_s="often"), "hang_timeout_s='often'"),
        (lambda: train.FailureConfig(hang_timeout_s=True), "hang_timeout_s=True"),
        (lambda: train.FailureConfig(max_preemption_failures=-2), "max_preemption_failures=-2.*-1 for no limit"),
        (lambda: train.FailureConfig(preemption_grace_s=-1), "preemption_grace_s=-1.*a number of seconds"),
        (lambda: train.FailureConfig(storage_timeout_s=0), "storage_timeout_s=0"),
        (lambda: train.FailureConfig(storage_timeout_s="5"), "storage_timeout_s='5'.*a number of seconds"),
        (lambda: train.FailureConfig(storage_timeout_s=float("nan")), "storage_timeout_s=nan"),
        (lambda: train.CheckpointConfig(num_to_keep=0), r"num_to_keep=0\).*at least 1, or None for all"),
        (lambda: train.CheckpointConfig(num_to_keep=2.0), r"num_to_keep=2\.0"),
        (lambda: train.CheckpointConfig(checkpoint_score_attribute=""), "checkpoint_score_attribute=''"),
        (
            lambda: train.CheckpointConfig(checkpoint_score_order="best"),
            "checkpoint_score_order='best'.*'max' or 'min'",
        ),
        (lambda: train.RunConfig(storage_path=""), "storage_path=''"),
        (lambda: train.RunConfig(storage_path=7), "storage_path=7.*a folder or a URI"),
        (lambda: train.RunConfig(failure_config={"max_failures": 1}), "failure_config=.*must be a FailureConfig"),
        (lambda: train.RunConfig(checkpoint_config=3), "checkpoint_config=3.*must be a CheckpointConfig"),
        (lambda: train.RunConfig(worker_output="rank0"), "worker_output='rank0'.*none, rank_zero, all"),
        (lambda: train.RunConfig(take_over="yes"), "take_over='yes'"),
        (lambda: train.DataParallelTrainer("climb"), "train_loop_per_worker must be a function, not 'climb'"),
        (lambda: train.DataParallelTrainer(takes_two), "takes_two takes 2 arguments"),
        (lambda: train.DataParallelTrainer(loops.climb, train_loop_config=[1]), r"train_loop_config=\[1\].*a dict"),
        (lambda: train.DataParallelTrainer(loops.climb, scaling_config=2), "scaling_config=2.*a ScalingConfig"),
        (lambda: train.DataParallelTrainer(loops.climb, run_config="x"), "run_config='x'.*a RunConfig"),
        (lambda: holdfast.init(nodes=0), r"init\(nodes=0\)"),
        (lambda: holdfast.init(nodes=1.5), r"init\(nodes=1\.5\)"),
        (lambda: holdfast.init(nodes=2, cpus_per_node=0), r"init\(cpus_per_node=0\)"),
        (lambda: holdfast.init(nodes=2, cpus_per_node="4"), r"init\(cpus_per_node='4'\)"),
        (lambda: holdfast.init(nodes=2, gpus_per_node=-1), r"init\(gpus_per_node=-1\)"),
    ],
)
def test_wrong_types_and_ranges_are_told_with_what_is_wanted(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".", "", "a\\b", "a\nb", " a", "a ", "x" * 201, "\0", 7])
def test_a_name_that_is_no_folders_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="a run's name"):
        train.RunConfig(name=name)


@pytest.mark.parametrize("name", ["run=1", "v1.2", "läuft", "with space", "x" * 200])
def test_other_names_are_fine(name: str, tmp_path: Path) -> None:
    assert train.RunConfig(name=name).name == name


def test_configs_cannot_be_changed_and_compare_by_value() -> None:
    config = train.ScalingConfig(num_workers=2)
    with pytest.raises(AttributeError):
        config.num_workers = 3  # type: ignore[misc]
    assert config == train.ScalingConfig(2)
    assert "num_workers=2" in repr(config)


def test_a_storage_path_with_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="is a file, not a folder"):
            runs.fit(path, config={"steps": 1})
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_file_where_the_runs_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/run is a file"):
        runs.fit(tmp_path, config={"steps": 1})
    assert (tmp_path / "run").read_text() == "in the way"


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "read-only"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "holdfast-test", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_storage_path_that_cannot_be_written_is_refused(read_only_disk: Path) -> None:
    for path in (read_only_disk, read_only_disk / "deeper" / "down"):
        with pytest.raises(ConfigurationError, match=r"cannot be written: .*Read-only file system") as refused:
            runs.fit(path, config={"steps": 1})
        assert f"storage_path='{path}'" in str(refused.value)
        assert "that you may write" in str(refused.value)


@pytest.mark.parametrize("uri", ["ftp://host/path", "file://elsewhere/path", "   "])
def test_a_storage_path_that_is_not_known_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError):
        runs.fit(uri, config={"steps": 1})  # type: ignore[arg-type]


def closure_over(value: object) -> Callable[[], object]:
    def holds_something() -> object:
        return value

    return holds_something


@pytest.mark.parametrize(
    ("function", "config", "named"),
    [
        (closure_over(LOCK), None, r"the variable 'value' that holds_something uses \(_thread\.lock\)"),
        (loops.climb, {"fine": 1, "lock": LOCK}, r"train_loop_config\['lock'\] \(_thread\.lock\)"),
        (loops.climb, {"file": sys.__stdout__}, r"train_loop_config\['file'\]"),
        (
            functools.partial(loops.climb, {"lock": LOCK}),
            None,
            r"argument 1 of the functools\.partial of tests\.train\.loops:climb \(builtins\.dict\)",
        ),
    ],
)
def test_what_cannot_be_pickled_is_named(
    function: Callable[..., Any], config: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    with pytest.raises(PicklingError, match=named) as refused:
        runs.fit(tmp_path / "storage", function, config)
    assert "cannot be sent to the workers" in str(refused.value)
    assert "Make it inside the training function instead" in str(refused.value)
    assert not (tmp_path / "storage").exists()


def test_a_global_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """Functions of a script travel by value, with the globals that they use."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "from holdfast import train\n"
        "LOCK = threading.Lock()\n"
        "def loop():\n"
        "    with LOCK: pass\n"
        f"train.DataParallelTrainer(loop, run_config=train.RunConfig(storage_path={str(tmp_path / 'store')!r})).fit()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the global 'LOCK' that loop uses (_thread.lock) cannot be sent to the workers" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda: train.report({"a": 1}),
        lambda: train.get_checkpoint(),
        lambda: train.get_context(),
    ],
)
def test_a_workers_calls_are_refused_elsewhere(call: Callable[[], Any]) -> None:
    with pytest.raises(NotInWorkerError, match=r"train\.\w+\(\) can only be called inside the function") as refused:
        call()
    assert isinstance(refused.value, RuntimeError)


def told_by_worker(tmp_path: Path, what: str) -> BaseException:
    """What a call of ``report`` with this argument raises in a worker."""
    with pytest.raises(train.WorkerGroupError) as caught:
        runs.fit(tmp_path, loops.report_badly, {"what": what})
    assert [row for row in runs.rows(tmp_path / "run", 0) if "before" not in row] == []
    assert runs.directories(tmp_path / "run") == []
    holdfast.shutdown()
    return caught.value.worker_failures[0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("array", r"metric 'loss' is a numpy\.ndarray.*call \.tolist\(\) on it"),
        ("tensor", r"metric 'eval/loss' is a torch\.Tensor.*call \.item\(\) on it"),
        ("set", r"metric 'labels\[1\]' is a set.*call sorted\(\) on it"),
        ("object", r"metric 'thing' is a tests\.train\.loops\.Gift.*str\(value\)"),
        ("bytes", r"metric 'raw' is a bytes"),
        ("key", r"keys must be text"),
        ("list", "report takes a dict of metrics, not a list"),
        ("none", "report takes a dict of metrics"),
    ],
)
def test_metrics_that_json_cannot_hold_are_refused_with_the_conversion(what: str, message: str, tmp_path: Path) -> None:
    error = told_by_worker(tmp_path, what)
    assert isinstance(error, MetricsError)
    with pytest.raises(MetricsError, match=message):
        raise error


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("path", r"report\(checkpoint='/tmp'\): pass a Checkpoint, made by Checkpoint\.from_directory"),
        ("missing directory", "does not exist; give a directory of files"),
        ("file", "is a file; give a directory of files"),
        ("pipe", "it is neither a file nor a directory"),
        ("link to nowhere", "it is a link to nowhere"),
        ("link to a directory", "it is a link to a directory; copy it"),
    ],
)
def test_a_checkpoint_that_cannot_be_kept_is_refused_before_a_byte_moves(
    what: str, message: str, tmp_path: Path
) -> None:
    error = told_by_worker(tmp_path, what)
    assert isinstance(error, ConfigurationError)
    with pytest.raises(ConfigurationError, match=message):
        raise error


def test_a_malformed_fault_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "report.before:explode")
    with pytest.raises(ConfigurationError, match="unknown fault action 'explode'"):
        runs.fit(tmp_path, config={"steps": 1})


def test_a_runtime_folder_that_cannot_be_used_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    with pytest.raises(ConfigurationError, match="too long for a socket's path"):
        runs.fit(tmp_path, config={"steps": 1})


def test_a_path_that_holds_no_run_gives_no_result(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        train.Result.from_path(tmp_path)
    assert os.listdir(tmp_path) == []
