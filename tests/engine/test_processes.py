"""Workers as real processes below a real janitor, agent and zygotes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.processes import WorkerExit
from holdfast.wire.messages import Environment
from holdfast.worker import kernel
from tests.engine.node import Node

KEY = ("group", 1, 0)
OTHER = ("group", 1, 1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node.connect()
    finally:
        left = node.end()
    assert not left


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder of modules that an environment may preload."""
    folder = tmp_path / "modules"
    folder.mkdir()
    return folder


def environment(modules: Path, *preload: str, **variables: str) -> Environment:
    return Environment(preload=preload, variables=variables, sys_path=(str(modules), *sys.path))


def write_module(modules: Path, name: str, text: str) -> str:
    (modules / f"{name}.py").write_text(textwrap.dedent(text))
    return name


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_code_is_told(node: Node, code: int) -> None:
    node.start(KEY, "leave", code)
    assert node.exited(KEY) == WorkerExit(code)


@pytest.mark.parametrize(("argument", "code", "printed"), [(4, 4, ""), (None, 0, ""), ("no more", 1, "no more\n")])
def test_sys_exit_ends_a_worker_as_it_ends_a_script(node: Node, argument: object, code: int, printed: str) -> None:
    node.start(KEY, "leave_by_sys_exit", argument)
    assert node.exited(KEY) == WorkerExit(code)
    assert node.printed(KEY) == printed


def test_an_exception_of_the_entry_is_in_the_log(node: Node) -> None:
    node.start(KEY, "leave_by_exception")
    assert node.exited(KEY) == WorkerExit(1)
    assert "ValueError: no good" in node.printed(KEY)


def test_a_signal_is_told(node: Node) -> None:
    node.start(KEY, "idle")
    os.kill(node.started(KEY), signal.SIGTERM)
    assert node.exited(KEY) == WorkerExit(-signal.SIGTERM)


def test_a_kill_of_ours_is_ours(node: Node) -> None:
    node.start(KEY, "idle")
    node.started(KEY)
    node.tell("kill", KEY)
    assert node.exited(KEY) == WorkerExit(-signal.SIGKILL, ours=True)


def test_a_kill_at_any_moment_of_the_start_ends_in_one_exit(node: Node) -> None:
    for rank in range(20):
        node.start(("group", 1, rank), "idle")
        node.tell("kill", ("group", 1, rank))
    for rank in range(20):
        assert node.exited(("group", 1, rank)) == WorkerExit(-signal.SIGKILL, ours=True)


def test_a_worker_that_had_died_before_our_kill_is_not_ours(node: Node) -> None:
    node.start(KEY, "idle")
    worker = node.started(KEY)
    zygote = node.tree.one("hf:zygote")
    os.kill(zygote, signal.SIGSTOP)  # so that the exit is not told yet
    pidfd = os.pidfd_open(worker)
    os.kill(worker, signal.SIGKILL)
    kernel.wait_for_end(pidfd)
    os.close(pidfd)
    node.tell("kill", KEY)
    node.prepare(Environment())  # answered when the kill was handled
    os.kill(zygote, signal.SIGCONT)
    assert node.exited(KEY) == WorkerExit(-signal.SIGKILL, ours=False)


def test_the_last_message_comes_before_the_exit(node: Node) -> None:
    for attempt in range(10):
        key = ("group", attempt, 0)
        node.start(key, "say_and_die", 1000)
        rows = 0
        while (event := next_event(node, key))[1] == "rows":
            rows += event[3]
        assert (rows, event[1]) == (1000, "said")
        assert next_event(node, key)[1] == "exited"


def next_event(node: Node, key: tuple[str, int, int]) -> list[object]:
    while not node.events_so_far():
        node._receive()
    event = node.events_so_far().pop(0)
    return next_event(node, key) if event[1] == "started" else event


def test_everything_printed_before_a_kill_is_in_the_log(node: Node) -> None:
    node.start(KEY, "print_and_die")
    node.exited(KEY)
    assert node.printed(KEY).splitlines() == [
        "printed by Python",
        "written to stderr",
        "printed by a subprocess",
        "printed by C",
        "the last line",
    ]


def test_a_log_is_appended_to(node: Node) -> None:
    for _ in range(2):
        node.start(KEY, "leave_by_sys_exit", "once more")
        node.exited(KEY)
    assert node.printed(KEY) == "once more\nonce more\n"


def test_messages_reach_a_worker_in_order_whatever_their_size(node: Node) -> None:
    node.start(KEY, "echo")
    texts = ["short", "x" * 3_000_000, "last"]
    for text in texts:
        node.tell("send", KEY, text.encode() + b"\n")
    assert [node.said(KEY) for _ in texts] == texts
    node.tell("kill", KEY)
    node.exited(KEY)
    node.tell("send", KEY, b"dropped\n")


def test_a_paused_worker_has_to_wait_and_loses_nothing(node: Node) -> None:
    node.start(KEY, "flood", 1_000_000)
    node.tell("pause", KEY)
    node.exited(KEY)
    sent = int(node.printed(KEY).split()[1])
    assert sent < 100_000
    assert sum(event[3] for event in node.events_so_far() if event[1] == "rows") == sent


def test_a_paused_worker_can_be_resumed(node: Node) -> None:
    node.start(KEY, "echo")
    node.started(KEY)
    node.tell("pause", KEY)
    node.tell("send", KEY, b"one\n")
    node.prepare(Environment())
    assert not [event for event in node.events_so_far() if event[1] == "said"]
    node.tell("resume", KEY)
    assert node.said(KEY) == "one"


def test_garbage_on_the_socket_ends_the_worker(node: Node) -> None:
    node.start(KEY, "garbage")
    assert node.exited(KEY).status == -signal.SIGKILL
    assert "wrote to its agent's socket" in node.printed(KEY)


def test_a_worker_is_itself_alone(node: Node) -> None:
    """Its own random numbers, descriptors, process group, signals; on top of the same environment."""
    environment = Environment(preload=("numpy.random",), working_directory="/", argv=("script.py", "--fast"))
    assert node.prepare(environment) == ""
    found = []
    for rank in range(3):
        key = ("group", 1, rank)
        node.start(key, "look_around", "numpy", environment=environment, variables={"MINE_RANK": str(rank)})
        found.append(node.said(key))
        assert node.exited(key).status == 0
    for rank, worker in enumerate(found):
        assert worker["preloaded"]
        assert worker["variables"] == {"MINE_RANK": str(rank)}
        assert worker["cwd"] == "/"
        assert worker["argv"] == ["script.py", "--fast"]
        assert worker["group"] == worker["pid"]
        assert worker["sigterm_is_default"]
        log = str(node.log(("group", 1, rank)))  # kept, for stacks that are asked for
        assert [link.partition(":")[0] for link in sorted(worker["descriptors"])] == [log, "socket"]
    for generator in ("random", "numpy"):
        assert len({worker[generator] for worker in found}) == 3
    assert len({worker["parent"] for worker in found}) == 1


def test_variables_are_set_before_modules_are_imported(node: Node, modules: Path) -> None:
    write_module(modules, "reads_at_import", "import os; SEEN = os.environ.get('OMP_NUM_THREADS')")
    parents = set()
    for threads in ("3", "7"):
        chosen = environment(modules, "reads_at_import", OMP_NUM_THREADS=threads)
        node.start(KEY, "look_around", "reads_at_import", environment=chosen)
        found = node.said(KEY)
        node.exited(KEY)
        assert found["seen_at_import"] == threads
        parents.add(found["parent"])
    assert len(parents) == 2, "two environments must have two zygotes"


def test_a_module_that_starts_a_thread_means_fresh_processes(node: Node, modules: Path) -> None:
    text = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True, name='mine').start()"
    chosen = environment(modules, write_module(modules, "threaded", text))
    node.start(KEY, "look_around", "threaded", environment=chosen)
    assert node.prepare(chosen) == "workers start as fresh processes: importing threaded starts threads (mine)"
    assert not node.said(KEY)["preloaded"]
    assert node.exited(KEY) == WorkerExit(0)


NATIVE_THREAD = """
    import {first}, ctypes
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
"""


def test_an_unknown_native_thread_means_fresh_processes(node: Node, modules: Path) -> None:
    """Also beside a known pool: numpy's."""
    chosen = environment(modules, write_module(modules, "native", NATIVE_THREAD.format(first="numpy")))
    assert node.prepare(chosen) == "workers start as fresh processes: importing native starts native threads"


def test_pools_of_known_modules_are_allowed_whoever_imports_them(node: Node, modules: Path) -> None:
    chosen = environment(modules, write_module(modules, "innocent", "import numpy"), OPENBLAS_NUM_THREADS="4")
    assert node.prepare(chosen) == ""
    node.start(KEY, "look_around", "innocent", environment=chosen)
    assert node.said(KEY)["preloaded"]


def test_a_module_that_leaves_a_process_means_fresh_processes(node: Node, modules: Path) -> None:
    text = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    chosen = environment(modules, write_module(modules, "spawning", text))
    assert node.prepare(chosen) == "workers start as fresh processes: importing spawning starts processes"
    assert node.tree.pids("sleep") == []


def test_a_module_that_kills_its_process_means_fresh_processes(node: Node, modules: Path) -> None:
    text = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    chosen = environment(modules, write_module(modules, "crashing", text))
    assert node.prepare(chosen) == "workers start as fresh processes: importing modules died (-11)"
    node.start(KEY, "leave", 0, environment=chosen)
    assert node.exited(KEY) == WorkerExit(0)


def test_a_module_that_cannot_be_imported_is_left_to_the_worker(node: Node, modules: Path) -> None:
    names = (write_module(modules, "broken", "1 / 0"), write_module(modules, "exiting", "raise SystemExit(3)"))
    chosen = environment(modules, *names, "no_such_module")
    assert node.prepare(chosen) == ""
    node.start(KEY, "look_around", "broken", environment=chosen)
    assert not node.said(KEY)["preloaded"]
    assert "ZeroDivisionError" in node.zygotes_log()


def test_a_missing_working_directory_is_told(node: Node) -> None:
    assert "/no/such/folder" in node.prepare(Environment(working_directory="/no/such/folder"))


def test_a_dead_zygote_takes_its_workers_and_is_replaced(node: Node) -> None:
    node.start(KEY, "brood")
    node.start(OTHER, "idle")
    assert node.said(KEY) == "bred"
    node.started(OTHER)
    os.kill(node.tree.one("hf:zygote"), signal.SIGKILL)
    for key in (KEY, OTHER):
        assert node.exited(key) == WorkerExit(-signal.SIGKILL, lost=True)
    assert sorted(names(node)) == ["hf:agent", "hf:janitor", "hf:pristine"]
    node.start(KEY, "leave", 0)
    assert node.exited(KEY) == WorkerExit(0)


def test_a_zygote_that_does_not_answer_is_replaced(node: Node) -> None:
    node.tell("lose_patience")
    node.start(KEY, "idle")
    worker = node.started(KEY)
    os.kill(node.tree.one("hf:zygote"), signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    assert node.exited(KEY) == WorkerExit(-signal.SIGKILL, lost=True)


def test_the_exit_of_a_worker_waits_for_all_that_it_had_started(node: Node) -> None:
    node.start(OTHER, "idle")
    node.start(KEY, "brood", "leaving")
    assert node.exited(KEY) == WorkerExit(0)
    assert sorted(names(node)) == ["hf:agent", "hf:janitor", "hf:pristine", "hf:worker", "hf:zygote"]


def test_idle_zygotes_are_retired(node: Node) -> None:
    for number in range(8):
        node.prepare(Environment(variables={"N": str(number)}))
    assert 1 <= len(node.tree.pids("hf:zygote")) <= 4


def test_workers_go_on_without_the_pristine_zygote_and_the_agent_ends_when_it_is_needed(node: Node) -> None:
    node.start(KEY, "idle")
    node.started(KEY)
    os.kill(node.tree.one("hf:pristine"), signal.SIGKILL)
    node.start(OTHER, "leave", 0)
    assert node.exited(OTHER) == WorkerExit(0)
    node.tell("prepare", Environment(variables={"ANOTHER": "1"}))
    assert node.hangs_up()
    assert node.tree.wait_until_empty(2.0) == []


def test_close_ends_everything_but_agent_and_janitor(node: Node) -> None:
    node.start(KEY, "brood")
    assert node.said(KEY) == "bred"
    node.tell("close")
    node.event("closed")
    assert sorted(names(node)) == ["hf:agent", "hf:janitor"]


def names(node: Node) -> list[str]:
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in node.tree.pids()]


def test_an_environment_may_be_larger_than_a_datagram(node: Node, modules: Path) -> None:
    large = {f"MINE_{number}": "x" * 50_000 for number in range(40)}
    chosen = environment(modules, **large)
    assert node.prepare(chosen) == ""
    node.start(KEY, "look_around", "json", environment=chosen, variables={"MINE_OWN": "y" * 500_000})
    assert node.said(KEY)["variables"] == {**large, "MINE_OWN": "y" * 500_000}


def test_a_variable_that_the_environment_lacks_is_not_there(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_OLD", "1")
    node = Node(tmp_path).connect()
    try:
        node.start(KEY, "look_around", "json", environment=environment(modules, MINE_NEW="2"))
        assert node.said(KEY)["variables"] == {"MINE_NEW": "2"}
    finally:
        left = node.end()
    assert not left
