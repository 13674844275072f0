"""Callbacks: what they are told, in which order, and that they can do a run no harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import train
from holdfast.control import vocabulary as v
from holdfast.errors import ConfigurationError
from holdfast.journal import facts as f
from holdfast.train import audience
from tests.train import loops, runs

Told = list[tuple[Any, ...]]


class Listener(train.UserCallback):
    """Keeps what it is told."""

    def __init__(self, told: Told | None = None) -> None:
        self.told: Told = [] if told is None else told
        self.threads: set[int] = set()

    def after_report(
        self, run_context: train.TrainRunContext, metrics: list[dict[str, Any]], checkpoint: train.Checkpoint | None
    ) -> None:
        self.threads.add(threading.get_ident())
        self.context = run_context
        self.told.append(("report", metrics, checkpoint))

    def after_exception(self, run_context: train.TrainRunContext, worker_exceptions: dict[int, BaseException]) -> None:
        self.context = run_context
        self.told.append(("exception", worker_exceptions))


def test_every_call_of_all_ranks_is_told_in_order_with_its_checkpoint(tmp_path: Path) -> None:
    listener = Listener()
    result = runs.fit(tmp_path, config={"steps": 2, "plain_rows": 2}, workers=2, callbacks=[listener])
    expected: Told = []
    for step in (1, 2):
        weights = [loops.undisturbed_weight(rank, step) for rank in range(2)]
        for part in range(2):
            metrics = [{"step": step, "weight": weight, "part": part} for weight in weights]
            expected.append(("report", metrics, None))
        checkpoint = train.Checkpoint(f"{result.path}/checkpoint_{step - 1:06d}")
        expected.append(("report", [{"step": step, "weight": weight} for weight in weights], checkpoint))
    assert listener.told == expected
    assert len(listener.threads) == 1
    assert threading.get_ident() not in listener.threads


def test_a_call_that_one_rank_brings_files_to_is_told_once_with_the_checkpoint(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        listener = Listener()
        runs.fit(tmp_path, loops.bring, {"files": {rank: {"a": "1"}}}, workers=2, name=rank, callbacks=[listener])
        checkpoint = train.Checkpoint(f"{tmp_path}/{rank}/checkpoint_000000")
        assert listener.told == [("report", [{"rank": 0}, {"rank": 1}], checkpoint)]


def report_in_the_background(config: dict[str, Any]) -> None:
    for step in range(config["steps"]):
        folder = tempfile.mkdtemp(dir=config["folder"])
        Path(folder, "model").write_text("x" * 100_000)
        checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"step": step}, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC)
        train.report({"step": step, "more": True})


def test_a_report_in_the_background_is_told_when_it_is_committed(tmp_path: Path) -> None:
    listener = Listener()
    runs.fit(tmp_path, report_in_the_background, {"steps": 3, "folder": str(tmp_path)}, callbacks=[listener])
    expected: Told = []
    for step in range(3):
        checkpoint = train.Checkpoint(f"{tmp_path}/run/checkpoint_{step:06d}")
        expected += [("report", [{"step": step}], checkpoint), ("report", [{"step": step, "more": True}], None)]
    assert listener.told == expected


def test_a_callback_knows_its_run(tmp_path: Path) -> None:
    listener = Listener()
    run_config = train.RunConfig(storage_path=tmp_path, callbacks=[listener])
    result = train.DataParallelTrainer(loops.climb, train_loop_config={"steps": 1}, run_config=run_config).fit()
    known = listener.context.run_config
    assert f"{known.storage_path}/{known.name}" == result.path
    assert known.callbacks == [listener]
    assert listener.context.scaling_config == train.ScalingConfig(num_workers=1)


def test_an_exception_is_told_for_each_rank_of_each_attempt_that_failed(tmp_path: Path) -> None:
    listener = Listener()
    faults = [
        {"at": "working", "step": 2, "ranks": [1], "how": "exception", "once": str(tmp_path / "once")},
        {"at": "working", "step": 3, "ranks": [0], "how": "sigkill"},
    ]
    with pytest.raises(train.WorkerGroupError):
        runs.fit(tmp_path, config={"steps": 3, "faults": faults}, workers=2, max_failures=1, callbacks=[listener])
    first, second = [told[1] for told in listener.told if told[0] == "exception"]
    assert isinstance(first[1], loops.Boom)
    assert "in climb" in first[1].__notes__[0]
    assert str(second[0]) == "rank 0 was killed by SIGKILL"
    kinds = [told[0] for told in listener.told]
    assert kinds == ["report", "exception", "report", "exception"]


def test_a_callback_that_raises_is_reported_once_and_the_others_are_still_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(train.UserCallback):
        calls = 0

        def after_report(self, *arguments: Any, **named: Any) -> None:
            self.calls += 1
            raise SystemExit("no more")

    broken, listener = Broken(), Listener()
    result = runs.fit(tmp_path, config={"steps": 3}, callbacks=[broken, listener])
    runs.assert_undisturbed(result, workers=1, steps=3)
    assert broken.calls == len(listener.told) == 3
    printed = capsys.readouterr().out
    assert printed.count("Broken.after_report raised; the run goes on") == 1
    assert printed.count("SystemExit: no more") == 1
    assert "test_callbacks.py" in printed


def test_callbacks_are_called_in_their_order(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    class Named(train.UserCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def after_report(self, *, metrics: list[dict[str, Any]], **others: Any) -> None:
            told.append((self.name, metrics[0]["step"]))

    runs.fit(tmp_path, config={"steps": 2}, callbacks=(Named("a"), Named("b")))
    assert told == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


class Slow(Listener):
    """Does not return from its first call before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.go = threading.Event(), threading.Event()

    def after_report(self, *arguments: Any, **named: Any) -> None:
        self.here.set()
        self.go.wait()
        super().after_report(*arguments, **named)


def test_a_slow_callback_holds_up_no_worker_and_is_waited_for(tmp_path: Path) -> None:
    slow = Slow()
    with runs.fitting(tmp_path, config={"steps": 3}, callbacks=[slow]) as running:
        slow.here.wait()
        runs.wait_until(lambda: runs.final(tmp_path / "run").return_value is not None)
        assert not running.done()
        slow.go.set()
        running.result()
    assert [told[1][0]["step"] for told in slow.told] == [1, 2, 3]


def test_a_callback_that_falls_far_behind_misses_reports_and_people_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gate: Callable[..., runs.Gate]
) -> None:
    monkeypatch.setattr(audience, "BEHIND", 100)
    slow, door = Slow(), gate(0)

    def burst(config: dict[str, Any]) -> None:
        train.report({"row": -1})
        loops.meet(config["gate"] + ".0")
        for row in range(5000):
            train.report({"row": row})

    with runs.fitting(tmp_path, burst, {"gate": door.path}, callbacks=[slow]) as running:
        door.wait()
        slow.here.wait()
        door.open()
        runs.wait_until(lambda: (runs.final(tmp_path / "run").metrics or {}).get("row") == 4999)
        slow.go.set()
        running.result()
    rows = [told[1][0]["row"] for told in slow.told]
    assert rows[0] == -1
    assert rows == sorted(set(rows))
    printed = capsys.readouterr().out
    assert "the callbacks are too slow for the reports" in printed
    assert f"{5001 - len(rows)} reports were not passed to the callbacks" in printed


def test_a_run_that_is_ended_at_once_does_not_wait_for_a_callback(tmp_path: Path) -> None:
    slow = Slow()
    asked = runs.trainer(tmp_path, config={"steps": 1}, callbacks=[slow])
    run = asked._runs.Run(asked._ask())
    running = run.start()
    slow.here.wait()
    runs.wait_until(lambda: runs.final(tmp_path / "run").return_value is not None)
    run.abandon()
    with pytest.raises(concurrent.futures.CancelledError):
        running.result()
    slow.go.set()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Listener(), "callbacks must be a list of UserCallback objects"),
        ([Listener], r"callbacks\[0\] is <class.*no UserCallback object; make one: Listener\(\)"),
        ([Listener(), print], r"callbacks\[1\] is <built-in function print>, no UserCallback object"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train.RunConfig(callbacks=callbacks)


def rows(rank: int, first: int, *values: int) -> f.RowsReported:
    text = msgspec.Raw(msgspec.json.encode([{"x": value} for value in values]))
    return f.RowsReported(at=0, group="train", attempt=1, rank=rank, first=first, count=len(values), rows=text)


def lined_up(*changes: object) -> list[tuple[list[int], str]]:
    calls = audience.Calls()
    started = f.AttemptStarted(at=0, group="train", attempt=1, world_size=2)
    return [
        ([row["x"] for row in metrics], directory)
        for change in (started, *changes)
        for metrics, directory in calls.take(change)
    ]


def declared(call: int) -> v.CommitDeclared:
    return v.CommitDeclared(group="train", rank=0, call=call, metrics=b"{}", files=())


def committed(call: int) -> f.CheckpointCommitted:
    return f.CheckpointCommitted(
        at=0, group="train", attempt=1, call=call, index=0, directory="c", size=0, metrics=msgspec.Raw(b"{}")
    )


def ended() -> f.AttemptEnded:
    return f.AttemptEnded(at=0, group="train", attempt=1, outcome="failed")


def test_calls_line_up_however_their_rows_arrive() -> None:
    assert lined_up(rows(0, 1, 10, 20, 30), rows(1, 1, 11)) == [([10, 11], "")]
    assert lined_up(rows(1, 1, 11), rows(0, 1, 10), rows(0, 2, 20), rows(1, 2, 21, 31)) == [
        ([10, 11], ""),
        ([20, 21], ""),
    ]


def test_a_call_that_brings_a_checkpoint_waits_for_it_and_so_do_those_after_it() -> None:
    before = (declared(1), rows(0, 1, 10, 20), rows(1, 1, 11, 21))
    assert lined_up(*before) == []
    assert lined_up(*before, committed(1)) == [([10, 11], "c"), ([20, 21], "")]
    assert lined_up(*before, v.CommitDropped(group="train", call=1)) == [([10, 11], ""), ([20, 21], "")]
    assert lined_up(*before, ended()) == [([10, 11], ""), ([20, 21], "")]


def test_calls_of_which_a_row_was_left_out_are_left_out() -> None:
    assert lined_up(rows(0, 1, 10), rows(0, 4, 40, 50), rows(1, 1, 11, 21, 31, 41, 51)) == [
        ([10, 11], ""),
        ([40, 41], ""),
        ([50, 51], ""),
    ]


def test_rows_of_a_dead_attempt_do_not_mix_with_the_next() -> None:
    again = f.AttemptStarted(at=0, group="train", attempt=2, world_size=2)
    assert lined_up(rows(0, 1, 10, 20), ended(), again, rows(1, 1, 11), rows(0, 1, 12)) == [([12, 11], "")]


def test_without_callbacks_there_is_no_thread() -> None:
    async def go() -> int:
        context = train.TrainRunContext(train.RunConfig(), train.ScalingConfig())
        async with audience.Audience((), context, "", lambda attempt, failure: lambda: Exception()) as nobody:
            nobody.observe(rows(0, 1, 10))
            return threading.active_count()

    before = threading.active_count()
    assert asyncio.run(go()) == before
