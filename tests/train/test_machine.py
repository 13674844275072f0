"""Every decision of a training run, compared by value. No process, no clock."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control import failures, retention
from holdfast.control import vocabulary as v
from holdfast.journal import facts as f
from holdfast.train import machine as m
from holdfast.wire.messages import FileEntry

G = m.GROUP
AT = 7.0
FILES = (FileEntry("a", 1, "x"),)


class Run:
    """A machine and its state; what the loop around them does, and nothing else."""

    def __init__(self, world_size: int = 1, *, keep: retention.Policy | None = None, **limits: int) -> None:
        allowed = {failures.MAX_FAILURES: 0, failures.CONTROLLER_LIMIT: -1, **limits}
        self.machine = m.TrainMachine(m.Settings(world_size, allowed, keep or retention.Policy()))
        self.state = m.new_state()
        self.journal: list[f.Fact] = []
        self.world_size = world_size
        self.open()

    def open(self, *, fingerprint: str = "{}") -> tuple[list[f.Fact], list[v.Command]]:
        """A driver takes the run."""
        self._change(
            f.RunOpened(
                at=AT,
                epoch=self.state.epoch + 1,
                host="h",
                pid=1,
                function="m:f",
                fingerprint=fingerprint,
                restarted=self.state.status != m.LIVE,
                fresh_budget=self.state.status == m.FAILED,
            )
        )
        return self.post(v.Settle)

    def crash(self) -> None:
        """The driver dies: what is left is what the journal holds."""
        self.state = m.new_state()
        for fact in self.journal:
            self.machine.apply(self.state, fact)

    def post(self, kind: type[v.Event], **what: Any) -> tuple[list[f.Fact], list[v.Command]]:
        """The facts and commands that follow from an event; notes are left out."""
        before = len(self.journal)
        commands: list[v.Command] = []
        decision = self._decide(kind(at=AT, **what))
        while True:
            for change in decision.changes:
                self._change(change)
            commands += decision.commands
            decision = self._decide(v.Settle(at=AT))
            if not decision:
                return self.journal[before:], commands

    def rank(self, kind: type[v.RankEvent], rank: int = 0, **what: Any) -> tuple[list[f.Fact], list[v.Command]]:
        return self.post(kind, group=G, attempt=self.state.group.attempt, rank=rank, **what)

    def arrive(self) -> None:
        for rank in range(self.world_size):
            self.rank(v.RankArrived, rank)

    def commit(self, call: int, metrics: bytes = b"{}") -> tuple[list[f.Fact], list[v.Command]]:
        """Rank 0 brings a file and every other rank a row; what follows from the manifest."""
        for rank in range(1, self.world_size):
            self.rank(v.RowsArrived, rank, first=call, count=1, rows=b"{}")
        _, commands = self.rank(v.FilesDeclared, call=call, metrics=metrics, files=FILES)
        index = next(command.index for command in commands if isinstance(command, v.UploadFiles))
        self.rank(v.FilesUploaded, index=index, files=FILES)
        return self.post(v.ManifestWritten, group=G, attempt=self.state.group.attempt, index=index)

    def die(self, rank: int = 0, status: int = -9) -> tuple[list[f.Fact], list[v.Command]]:
        """One rank dies by itself and the others are killed for it; what follows from the last exit."""
        found = self.rank(v.RankExited, rank, status=status)
        for other in range(self.world_size):
            if other != rank:
                found = self.rank(v.RankExited, other, status=-9, ours=True)
        return found

    def _decide(self, event: v.Event) -> v.Decision:
        before = msgspec.json.encode(self.state)
        decision = self.machine.decide(self.state, event)
        assert msgspec.json.encode(self.state) == before, "decide changed the state"
        return decision

    def _change(self, change: object) -> None:
        self.machine.apply(self.state, change)
        if isinstance(change, f.Fact):
            self.journal.append(change)


def started(attempt: int, resume: int | None = None, world_size: int = 1) -> f.AttemptStarted:
    return f.AttemptStarted(at=AT, group=G, attempt=attempt, world_size=world_size, resume=resume)


def start(attempt: int, resume: int | None = None, world_size: int = 1) -> v.StartGroup:
    directory = "" if resume is None else f"checkpoint_{resume:06d}"
    return v.StartGroup(group=G, attempt=attempt, world_size=world_size, resume=resume, directory=directory)


def test_an_opened_run_starts_its_first_attempt() -> None:
    run = Run(2)
    assert run.journal[1:] == [started(1, world_size=2)]
    run.crash()
    facts, commands = run.open()
    assert facts[-1] == started(2, world_size=2)
    assert commands == [start(2, world_size=2)]


def test_a_run_finishes_when_every_rank_has_returned_and_gone() -> None:
    run = Run(2)
    run.arrive()
    run.rank(v.RankReturned, 0, value=b'{"a":1}')
    run.rank(v.RankReturned, 1, value=b"null")
    assert run.rank(v.RankExited, 1, status=0) == ([], [])
    facts, commands = run.rank(v.RankExited, 0, status=0)
    assert facts == [
        f.AttemptEnded(at=AT, group=G, attempt=1, outcome="finished", calls=(0, 0)),
        f.RunEnded(at=AT, status=m.FINISHED, return_value=msgspec.Raw(b'{"a":1}')),
    ]
    assert commands == [v.Finish()]
    assert run.post(v.Settle) == ([], [])


def test_processes_that_linger_after_their_functions_returned_are_killed() -> None:
    run = Run(1)
    run.arrive()
    _, (patience,) = run.rank(v.RankReturned, value=b"null")
    assert patience == v.Wait(name="linger 1", seconds=m.LINGER_S)
    assert run.post(v.DelayPassed, name="linger 0") == ([], [])
    assert run.post(v.DelayPassed, name=patience.name)[1] == [v.KillGroup(group=G, attempt=1)]
    facts, commands = run.rank(v.RankExited, status=-9, ours=True)
    assert [fact.status for fact in facts if isinstance(fact, f.RunEnded)] == [m.FINISHED]
    assert commands == [v.Finish()]


def test_a_failed_attempt_is_charged_once_and_the_next_starts_from_the_newest_checkpoint() -> None:
    run = Run(2, max_failures=1)
    run.arrive()
    run.commit(1)
    facts, commands = run.die(rank=1)
    failure = failures.exit_failure(1, -9, started=True, calls=1)
    assert facts == [
        f.AttemptEnded(
            at=AT,
            group=G,
            attempt=1,
            outcome="failed",
            charge=failures.MAX_FAILURES,
            failures=(failure,),
            calls=(1, 1),
        ),
        started(2, 0, world_size=2),
    ]
    assert commands == [start(2, 0, world_size=2)]
    assert run.state.charged == {failures.MAX_FAILURES: 1}


def test_nothing_is_charged_before_the_last_rank_has_gone() -> None:
    run = Run(3, max_failures=1)
    run.arrive()
    assert run.rank(v.RankExited, 1, status=-9) == ([], [v.KillGroup(group=G, attempt=1)])
    assert run.rank(v.RankExited, 0, status=-9, ours=True) == ([], [])
    assert [type(fact) for fact in run.rank(v.RankExited, 2, status=-9, ours=True)[0]] == [
        f.AttemptEnded,
        f.AttemptStarted,
    ]


def test_a_run_gives_up_with_the_charge_that_its_budget_does_not_allow() -> None:
    run = Run(1, max_failures=1)
    for _ in range(2):
        run.arrive()
        facts, commands = run.die()
    assert facts[-1] == f.RunEnded(at=AT, status=m.FAILED, reason="max_failures=1 allows no further restart")
    assert commands == [v.Finish()]
    assert run.post(v.Settle) == ([], [])


def test_charges_outlive_a_driver_and_a_failed_run_starts_afresh() -> None:
    run = Run(1, max_failures=1)
    run.arrive()
    run.die()
    run.crash()
    facts, _ = run.open()
    assert facts == [f.AttemptEnded(at=AT, group=G, attempt=2, outcome="driver_lost", calls=(0,)), started(3)]
    assert run.state.charged == {failures.MAX_FAILURES: 1}
    run.arrive()
    assert run.die()[0][-1].status == m.FAILED  # type: ignore[attr-defined]
    run.crash()
    run.open()
    assert run.state.charged == {}
    assert run.state.status == m.LIVE


def test_a_driver_that_dies_costs_nothing_and_burns_its_indices() -> None:
    run = Run(1)
    run.arrive()
    run.commit(1)
    run.rank(v.FilesDeclared, call=2, metrics=b"{}", files=FILES)
    run.crash()
    facts, commands = run.open()
    assert [fact.charge for fact in facts if isinstance(fact, f.AttemptEnded)] == [""]
    assert commands == [start(2, 0)]
    run.arrive()
    assert run.commit(1)[0][0].index == 10  # type: ignore[attr-defined]


def test_the_state_that_facts_lead_to_is_the_state_that_was() -> None:
    run = Run(2, max_failures=3, keep=retention.Policy(2))
    for attempt in range(2):
        run.arrive()
        for call in range(1, 5):
            run.commit(call)
        run.die(rank=attempt)
    run.arrive()
    for rank in (0, 1):
        run.rank(v.RankReturned, rank, value=b"1")
        run.rank(v.RankExited, rank, status=0)
    live = run.state
    run.crash()
    for attribute in ("status", "charged", "checkpoints", "return_value", "epoch"):
        assert getattr(run.state, attribute) == getattr(live, attribute)
    assert run.state.group.commits.reserved == live.group.commits.reserved


def test_a_failed_start_is_tried_again_after_a_wait_that_grows() -> None:
    run = Run(1)
    waits = []
    for _ in range(4):
        facts, commands = run.die(status=1)
        assert [type(fact) for fact in facts] == [f.AttemptEnded]
        (wait,) = commands
        waits.append(wait.seconds)
        assert run.post(v.Settle) == ([], [])
        assert [type(fact) for fact in run.post(v.DelayPassed, name=m.RETRY)[0]] == [f.AttemptStarted]
    assert waits == [failures.backoff_s(n) for n in range(1, 5)]
    assert run.state.charged == {failures.CONTROLLER_LIMIT: 4}
    run.arrive()
    assert run.state.startup_failures == 0


def test_the_same_error_at_the_start_twice_ends_the_run() -> None:
    run = Run(1)
    error = {"error": "ImportError", "message": "no module", "traceback": "…", "started": False}
    run.rank(v.RankRaised, **error)
    run.rank(v.RankExited, status=1)
    run.post(v.DelayPassed, name=m.RETRY)
    run.rank(v.RankRaised, **error)
    facts, _ = run.rank(v.RankExited, status=1)
    assert facts[-1] == f.RunEnded(at=AT, status=m.FAILED, reason="a worker could not start, twice with the same error")


def test_another_error_at_the_start_does_not() -> None:
    run = Run(1)
    for message in ("no module a", "no module b", "no module a"):
        run.rank(v.RankRaised, error="ImportError", message=message, traceback="", started=False)
        run.rank(v.RankExited, status=1)
        run.post(v.DelayPassed, name=m.RETRY)
    assert run.state.status == m.LIVE


def test_a_stop_kills_the_attempt_and_ends_the_run_uncharged() -> None:
    run = Run(2)
    run.arrive()
    assert run.post(v.StopAsked, reason="Ctrl-C") == ([], [v.KillGroup(group=G, attempt=1)])
    assert run.post(v.StopAsked, reason="again") == ([], [])
    run.rank(v.RankExited, 0, status=-9, ours=True)
    facts, commands = run.rank(v.RankExited, 1, status=-9, ours=True)
    assert facts == [
        f.AttemptEnded(at=AT, group=G, attempt=1, outcome="stopped", calls=(0, 0)),
        f.RunEnded(at=AT, status=m.STOPPED, reason="Ctrl-C"),
    ]
    assert commands == [v.Finish()]
    run.crash()
    assert run.open()[1] == [start(2, world_size=2)]
    assert run.state.charged == {}


def test_a_stop_while_the_next_start_is_waited_for_ends_the_run() -> None:
    run = Run(1)
    run.die(status=1)
    assert run.post(v.StopAsked, reason="Ctrl-C")[0] == [f.RunEnded(at=AT, status=m.STOPPED, reason="Ctrl-C")]


def test_a_damaged_checkpoint_is_ruled_out_uncharged_and_the_one_before_it_is_used() -> None:
    run = Run(2)
    run.arrive()
    run.commit(1)
    run.commit(2)
    run.crash()
    run.open()
    run.arrive()
    found = {"index": 1, "reason": "a byte was changed"}
    assert run.rank(v.CheckpointFoundDamaged, 1, **found)[1] == [v.KillGroup(group=G, attempt=2)]
    run.rank(v.CheckpointFoundDamaged, 0, **found)
    run.rank(v.RankExited, 0, status=-9, ours=True)
    facts, commands = run.rank(v.RankExited, 1, status=-9, ours=True)
    ended, damaged, again = facts
    assert isinstance(ended, f.AttemptEnded)
    assert (ended.charge, ended.failures[0].kind) == ("", failures.DAMAGED)
    assert damaged == f.CheckpointDamaged(
        at=AT, group=G, index=1, reason="found checkpoint_000001 damaged: a byte was changed"
    )
    assert again == started(3, 0, world_size=2)
    assert commands == [start(3, 0, world_size=2)]
    run.arrive()
    assert run.rank(v.CheckpointFoundDamaged, 1, **found) == ([], [])


def test_with_every_checkpoint_damaged_the_run_fails_until_somebody_restores_one() -> None:
    run = Run(1)
    run.arrive()
    run.commit(1)
    run.crash()
    run.open()
    run.arrive()
    run.rank(v.CheckpointFoundDamaged, index=0, reason="gone")
    facts, _ = run.rank(v.RankExited, status=-9, ours=True)
    assert isinstance(facts[-1], f.RunEnded)
    assert facts[-1].status == m.FAILED
    assert "every checkpoint of this run is damaged" in facts[-1].reason
    run.crash()
    assert run.open()[1] == [start(3, 0)]


def test_storage_that_refuses_ends_the_run_uncharged_and_what_was_begun_is_swept() -> None:
    run = Run(1, max_failures=5)
    run.arrive()
    run.rank(v.FilesDeclared, call=1, metrics=b"{}", files=FILES)
    run.rank(v.UploadGaveUp, index=0, error="the disk is full")
    facts, commands = run.rank(v.RankExited, status=-9, ours=True)
    ended, over = facts
    assert isinstance(ended, f.AttemptEnded)
    assert ended.charge == ""
    assert isinstance(over, f.RunEnded)
    assert over.reason == "storage failed: rank 0 could not upload its files: the disk is full"
    assert commands == [v.DeleteCheckpoints(directories=("checkpoint_000000",)), v.Finish()]


def test_what_an_upload_of_a_dead_attempt_began_is_swept() -> None:
    run = Run(1, max_failures=1)
    run.arrive()
    run.rank(v.FilesDeclared, call=1, metrics=b"{}", files=FILES)
    assert run.die()[1][-2:] == [v.DeleteCheckpoints(directories=("checkpoint_000000",)), start(2)]
    run.arrive()
    assert run.commit(1)[0][0].index == 1  # type: ignore[attr-defined]


def test_directories_that_no_fact_knows_are_swept_and_others_never() -> None:
    run = Run(1)
    run.arrive()
    run.commit(1)
    found = ("checkpoint_000000", "checkpoint_000001", "checkpoint_000009")
    assert run.post(v.DirectoriesFound, directories=found)[1] == [
        v.DeleteCheckpoints(directories=("checkpoint_000001", "checkpoint_000009"))
    ]
    assert run.post(v.DirectoriesFound, directories=("checkpoint_000000",)) == ([], [])


def deletions(commands: list[v.Command]) -> list[v.Command]:
    return [command for command in commands if isinstance(command, v.DeleteCheckpoints)]


def test_retention_deletes_after_the_fact_that_allows_it_and_never_the_newest() -> None:
    run = Run(1, keep=retention.Policy(1, "acc"))
    run.arrive()
    run.commit(1, b'{"acc":9}')
    facts, commands = run.commit(2, b'{"acc":1}')
    assert not any(isinstance(fact, f.CheckpointsRetired) for fact in facts)
    facts, commands = run.commit(3, b'{"acc":2}')
    assert facts[-1] == f.CheckpointsRetired(at=AT, group=G, indices=(1,))
    assert deletions(commands) == []  # somebody may be reading it: it goes with the next one
    assert sorted(run.state.checkpoints) == [0, 2]
    facts, commands = run.commit(4, b'{"acc":3}')
    assert facts[-1] == f.CheckpointsRetired(at=AT, group=G, indices=(2,))
    assert deletions(commands) == [v.DeleteCheckpoints(directories=("checkpoint_000001",))]
    run.rank(v.RankReturned, value=b"null")
    _, commands = run.rank(v.RankExited, status=0)
    assert commands == [v.DeleteCheckpoints(directories=("checkpoint_000002",))]
    _, commands = run.post(v.CheckpointsDeleted, directories=("checkpoint_000002",))
    assert commands == [v.Finish()]


def test_the_acknowledgement_comes_with_the_commit() -> None:
    run = Run(1)
    run.arrive()
    facts, commands = run.commit(1, b'{"loss":3}')
    assert facts == [
        f.CheckpointCommitted(
            at=AT,
            group=G,
            attempt=1,
            call=1,
            index=0,
            directory="checkpoint_000000",
            size=1,
            metrics=msgspec.Raw(b'{"loss":3}'),
        )
    ]
    assert commands == [v.Acknowledge(group=G, attempt=1, call=1, index=0, directory="checkpoint_000000")]


@pytest.mark.parametrize("status", [m.FINISHED, m.FAILED, m.STOPPED])
def test_a_run_that_has_ended_decides_nothing_more(status: str) -> None:
    run = Run(1)
    run.arrive()
    run._change(f.AttemptEnded(at=AT, group=G, attempt=1, outcome="finished"))
    run._change(f.RunEnded(at=AT, status=status))
    for event in (
        (v.Settle, {}),
        (v.NodeLost, {"node": "a", "reason": ""}),
        (v.DelayPassed, {"name": m.RETRY}),
        (v.RankExited, {"group": G, "attempt": 1, "rank": 0, "status": -9}),
    ):
        assert run.post(event[0], **event[1]) == ([], [])
