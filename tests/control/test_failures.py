"""What failures are called, which one is the root, and who pays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control import failures as fs
from holdfast.journal.facts import RankFailure


def failure(rank: int, kind: str = fs.EXCEPTION, message: str = "", error: str = "", **more: Any) -> RankFailure:
    return RankFailure(rank=rank, kind=kind, message=message, error=error, **more)


RESET = failure(0, message="[Errno 104] Connection reset by peer", error="ConnectionResetError")
KILLED = failure(1, fs.KILLED, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("status", "options", "kind", "message"),
    [
        (3, {}, fs.EXITED, "exited with code 3 before its function returned"),
        (0, {}, fs.EXITED, "exited with code 0 before its function returned"),
        (-9, {}, fs.KILLED, "was killed by SIGKILL"),
        (-15, {}, fs.KILLED, "was killed by SIGTERM"),
        (-11, {}, fs.CRASHED, "crashed with SIGSEGV"),
        (-6, {}, fs.CRASHED, "crashed with SIGABRT"),
        (-62, {}, fs.KILLED, "was killed by signal 62"),
        (-9, {"oom": True}, fs.OOM, "was killed by the kernel because the machine ran out of memory (SIGKILL)"),
        (-9, {"lost": True}, fs.NODE_LOST, "died together with the process that forks workers on its node"),
        (-9, {"started": False}, fs.STARTUP, "was killed by SIGKILL, before the function's first line"),
        (1, {"started": False}, fs.STARTUP, None),
        (-9, {"started": False, "oom": True}, fs.OOM, None),
        (-9, {"started": False, "lost": True}, fs.NODE_LOST, None),
    ],
)
def test_an_exit_is_called_by_its_cause(status: int, options: dict[str, bool], kind: str, message: str | None) -> None:
    found = fs.exit_failure(2, status, **{"started": True, **options}, calls=7)
    assert (found.rank, found.kind, found.calls) == (2, kind, 7)
    assert message is None or found.message == message


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        (fs.EXCEPTION, fs.MAX_FAILURES),
        (fs.KILLED, fs.MAX_FAILURES),
        (fs.OOM, fs.MAX_FAILURES),
        (fs.CRASHED, fs.MAX_FAILURES),
        (fs.EXITED, fs.MAX_FAILURES),
        (fs.NODE_LOST, fs.MAX_FAILURES),
        (fs.MISMATCH, fs.MAX_FAILURES),
        (fs.FILES, fs.MAX_FAILURES),
        (fs.STARTUP, fs.CONTROLLER_LIMIT),
        (fs.STORAGE, ""),
        (fs.DAMAGED, ""),
    ],
)
def test_every_kind_has_the_budget_that_pays_for_it(kind: str, budget: str) -> None:
    assert fs.paid_by(kind) == budget


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ConnectionResetError", ""),
        ("BrokenPipeError", ""),
        ("EOFError", ""),
        ("torch.distributed.DistBackendError", ""),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
        ("RuntimeError", "NCCL error: remote process exited"),
    ],
)
def test_the_loss_of_a_peer_is_known_by_type_or_text(error: str, message: str) -> None:
    assert fs.looks_like_peer_loss(failure(0, error=error, message=message))


@pytest.mark.parametrize(
    "found", [failure(0, error="ValueError", message="bad"), failure(0, fs.KILLED, "connection reset by a SIGKILL")]
)
def test_other_failures_are_not_taken_for_it(found: RankFailure) -> None:
    assert not fs.looks_like_peer_loss(found)


def test_nothing_has_no_root() -> None:
    assert fs.attribute([]) == ()


@pytest.mark.parametrize("arrived", [[RESET, KILLED], [KILLED, RESET]])
def test_a_death_is_the_root_of_a_broken_connection_in_any_order_of_arrival(arrived: list[RankFailure]) -> None:
    assert fs.attribute(arrived) == (KILLED, msgspec.structs.replace(RESET, consequence=True))


def test_a_broken_connection_is_the_root_when_nothing_else_failed() -> None:
    other = msgspec.structs.replace(RESET, rank=2)
    assert fs.attribute([RESET]) == (RESET,)
    assert fs.attribute([RESET, other]) == (RESET, other)


def test_of_several_roots_the_first_to_arrive_is_the_root_and_none_is_a_consequence() -> None:
    first, second = failure(2, error="ValueError", message="a"), failure(0, error="KeyError", message="b")
    assert fs.attribute([first, second]) == (first, second)


@pytest.mark.parametrize("kind", [fs.DAMAGED, fs.STORAGE])
def test_damage_and_storage_explain_whatever_else_went_wrong(kind: str) -> None:
    explained = failure(1, kind, "found checkpoint_000002 damaged", checkpoint=2)
    assert fs.attribute([KILLED, RESET, explained])[0] == explained


def test_a_rank_that_raised_has_said_why_its_files_are_gone() -> None:
    gone = failure(1, fs.FILES, "could not upload its files: no such file")
    raised = failure(1, error="ValueError", message="bad")
    assert fs.attribute([gone, raised]) == (raised,)
    assert fs.attribute([gone]) == (gone,)


def test_a_budget_is_used_up_by_one_charge_more_than_it_allows() -> None:
    limits = {fs.MAX_FAILURES: 2, fs.CONTROLLER_LIMIT: -1}
    assert not fs.exhausted(fs.MAX_FAILURES, {fs.MAX_FAILURES: 2}, limits)
    assert fs.exhausted(fs.MAX_FAILURES, {fs.MAX_FAILURES: 3}, limits)
    assert fs.exhausted(fs.MAX_FAILURES, {fs.MAX_FAILURES: 1}, {fs.MAX_FAILURES: 0})
    assert not fs.exhausted(fs.CONTROLLER_LIMIT, {fs.CONTROLLER_LIMIT: 10_000}, limits)


def test_the_wait_after_failed_starts_doubles_up_to_ten_seconds() -> None:
    assert [fs.backoff_s(n) for n in range(1, 5)] == [0.1, 0.2, 0.4, 0.8]
    assert fs.backoff_s(30) == 10.0
    assert fs.backoff_s(5000) == 10.0
