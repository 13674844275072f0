"""Nothing outlives its owner, whoever is killed, in whatever state, with whatever training code has started."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from holdfast.engine.processes import WorkerExit
from tests.engine.node import Node, describe

KEY = ("group", 1, 0)
OTHER = ("group", 1, 1)
PATIENCE_S = 2.0

DRIVER, JANITOR, AGENT, PRISTINE, ZYGOTE, WORKER = ("driver", "janitor", "agent", "pristine", "zygote", "worker")
SECOND, BROOD = ("second worker", "brood")
STATES = ("running", "stopped", "native")
PAIRS = tuple(itertools.permutations((DRIVER, AGENT, ZYGOTE, WORKER), 2))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, own_driver=True)
    try:
        yield node
    finally:
        left = node.end()
    assert not left


def pids(node: Node, role: str) -> list[int]:
    if role == DRIVER:
        assert node.driver is not None
        return [node.driver.pid]
    return node.tree.pids(f"hf:{role}")


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # those who clean up are fast


def breed(node: Node, state: str) -> int:
    """Two workers, one of them with many descendants and in that state; its pid."""
    node.start(OTHER, "idle")
    node.start(KEY, "brood", state)
    node.started(OTHER)
    worker = node.started(KEY)
    assert node.said(KEY) == "bred"
    if state == "stopped":
        os.kill(worker, signal.SIGSTOP)
    return worker


def survivors(victims: Iterable[str]) -> set[str]:
    """Who must still be there."""
    if DRIVER in victims:
        left = set()
    elif JANITOR in victims or AGENT in victims:
        left = {DRIVER}
    elif ZYGOTE in victims:
        left = {DRIVER, JANITOR, AGENT, PRISTINE}
    elif WORKER in victims:
        left = {DRIVER, JANITOR, AGENT, PRISTINE, ZYGOTE, SECOND}
    else:
        left = {DRIVER, JANITOR, AGENT, PRISTINE, ZYGOTE, SECOND, WORKER, BROOD}
    return left - set(victims)


def kill_and_check(node: Node, worker: int, victims: tuple[str, ...]) -> None:
    roles = cast(node, worker)
    left = survivors(victims)
    for victim in victims:
        for pid in roles[victim]:
            kill(pid)
    assert_only(node, {pid for role in left for pid in roles[role]}, folder=AGENT in left)
    if victims == (DRIVER,):
        assert not node.job_folder.exists()


def cast(node: Node, worker: int) -> dict[str, list[int]]:
    """Every process of the tree by its role. A brood keeps the worker's name, but not its process group."""
    roles = {role: pids(node, role) for role in (DRIVER, JANITOR, AGENT, PRISTINE, ZYGOTE)}
    roles[WORKER] = [worker]
    roles[SECOND] = [pid for pid in node.tree.pids("hf:worker") if pid == os.getpgid(pid) != worker]
    known = set(itertools.chain(*roles.values()))
    roles[BROOD] = [pid for pid in node.tree.pids() if pid not in known]
    assert [len(found) for found in roles.values()] == [1, 1, 1, 1, 1, 1, 1, 8]
    return roles


def assert_only(node: Node, expected: set[int], *, folder: bool) -> None:
    """Within a moment these processes are there and nothing else."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := set(node.tree.pids())) != expected or node.folder.exists() != folder:
        assert expected <= found, f"gone: {expected - found}"
        assert time.monotonic() < deadline, f"left: {[describe(p) for p in found - expected]}, {node.folder.exists()=}"
        time.sleep(0.002)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victim", [DRIVER, JANITOR, AGENT, PRISTINE, ZYGOTE, WORKER])
def test_nothing_outlives_the_death_of(node: Node, victim: str, state: str) -> None:
    worker = breed(node.connect(), state)
    kill_and_check(node, worker, (victim,))


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=["+".join(pair) for pair in PAIRS])
def test_nothing_outlives_the_deaths_of(node: Node, number: int) -> None:
    victims = PAIRS[number]
    worker = breed(node.connect(), random.Random(number).choice(STATES))
    kill_and_check(node, worker, victims)


@pytest.mark.parametrize("state", STATES)
def test_nothing_outlives_the_death_of_all_but_the_janitor(node: Node, state: str) -> None:
    worker = breed(node.connect(), state)
    kill_and_check(node, worker, (DRIVER, AGENT, ZYGOTE, WORKER))


def test_a_worker_that_died_takes_its_descendants_before_its_exit_is_told(node: Node) -> None:
    worker = breed(node.connect(), "running")
    os.kill(worker, signal.SIGKILL)
    assert node.exited(KEY) == WorkerExit(-signal.SIGKILL)
    assert len(node.tree.pids()) == 6  # driver, janitor, agent, two zygotes, the other worker


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_workers_and_driver_heed_a_signal_for_everyone(node: Node, signal_number: int) -> None:
    node.connect().start(KEY, "idle")
    node.started(KEY)
    for role in (JANITOR, AGENT, PRISTINE, ZYGOTE):
        for pid in pids(node, role):
            os.kill(pid, signal_number)
    node.start(OTHER, "leave", 0)
    assert node.exited(OTHER) == WorkerExit(0)
    assert node.driver is not None
    assert os.getsid(node.agent) != os.getsid(node.driver.pid), "Ctrl-C must reach the driver alone"


FAULTS = (
    "janitor.ready",
    "agent.born",
    "pristine.ready",
    "zygote.bearing",
    "zygote.ready",
    "zygote.forked",
    "worker.born",
)


@pytest.mark.parametrize("place", FAULTS)
def test_nothing_outlives_a_death_during_the_start_at(tmp_path: Path, place: str) -> None:
    fault = f"{place}:kill:once={tmp_path}/fired"
    node = Node(tmp_path, own_driver=True, agent="run_hasty_agent", variables={"HOLDFAST_FAULTS": fault})
    deadline = time.monotonic() + 10
    while not (tmp_path / "fired").exists():
        assert time.monotonic() < deadline, "the fault was not reached"
        time.sleep(0.001)
    assert node.end() == []


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("victim", [DRIVER, JANITOR, AGENT, ZYGOTE])
def test_nothing_outlives_a_death_at_any_moment_of_the_start(tmp_path: Path, victim: str, number: int) -> None:
    node = Node(tmp_path, own_driver=True, agent="run_hasty_agent")
    assert node.driver is not None
    assert node.driver.stdout is not None
    node.driver.stdout.readline()  # the janitor's pid
    time.sleep((25 * number + random.Random(f"{victim} {number}").uniform(0, 25)) / 1000)
    for pid in pids(node, victim):
        kill(pid)
    if victim == DRIVER:
        left = node.tree.wait_until_empty(PATIENCE_S)
        assert left == []
    assert node.end() == []


def test_a_stopped_janitor_keeps_nothing_alive(node: Node) -> None:
    breed(node.connect(), "running")
    os.kill(node.tree.one("hf:janitor"), signal.SIGSTOP)
    assert node.driver is not None
    node.driver.kill()
    node.driver.wait()
    node.hang_up()  # as a dead driver's side of the agent's channel would
    assert_only(node, set(), folder=False)


def test_a_driver_that_exits_without_closing_leaves_nothing(node: Node) -> None:
    breed(node.connect(), "running")
    assert node.driver is not None
    node.driver.send_signal(signal.SIGTERM)
    node.driver.wait()
    assert_only(node, set(), folder=False)


def test_a_child_of_the_driver_that_holds_its_pipe_does_not_keep_the_tree_alive(node: Node) -> None:
    """A driver that forks keeps the janitor's standard input open beyond its own death."""
    breed(node.connect(), "running")
    assert node.driver is not None
    janitor = node.tree.one("hf:janitor")
    pipe = os.readlink(f"/proc/{janitor}/fd/0")
    write_end = next(
        fd
        for fd in os.listdir(f"/proc/{node.driver.pid}/fd")
        if os.readlink(f"/proc/{node.driver.pid}/fd/{fd}") == pipe
    )
    with subprocess.Popen(
        ["sleep", "1000"], stdout=os.open(f"/proc/{node.driver.pid}/fd/{write_end}", os.O_WRONLY)
    ) as holder:
        node.driver.kill()
        node.driver.wait()
        assert_only(node, set(), folder=False)
        holder.kill()
