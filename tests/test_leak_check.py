from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests import leaks

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]

# Forks twice and leaves the session, as daemons do; prints the grandchild's pid.
DAEMONISE = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    null = subprocess.DEVNULL
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=null, stderr=null)
    print(child.pid, flush=True)
    os._exit(0)
os.wait()
"""


def at_once(before: leaks.Snapshot) -> leaks.Leaks:
    return before.leaked(process_grace_s=0, other_grace_s=0)


def test_nothing_is_reported_when_nothing_is_left() -> None:
    before = leaks.Snapshot.take()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert not before.leaked()


def test_a_leaked_process_is_found_and_cleaned() -> None:
    before = leaks.Snapshot.take()
    with subprocess.Popen(SLEEPER) as child:
        found = at_once(before)
        assert [process.pid for process in found.processes] == [child.pid]
        assert f"process {child.pid} " in str(found)
        found.clean()
        assert not psutil.pid_exists(child.pid)


def test_a_process_that_nobody_waited_for_is_found() -> None:
    before = leaks.Snapshot.take()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = at_once(before)
    os.waitpid(pid, 0)
    assert [process.pid for process in found.processes] == [pid]


def test_a_daemonised_process_is_found() -> None:
    before = leaks.Snapshot.take()
    daemon = int(subprocess.run([sys.executable, "-c", DAEMONISE], check=True, capture_output=True, text=True).stdout)
    try:
        assert psutil.Process(daemon).ppid() != os.getpid(), "still in the family: the marker was not put to the test"
        assert [process.pid for process in at_once(before).processes] == [daemon]
    finally:
        os.kill(daemon, signal.SIGKILL)
    assert not before.leaked()


def test_a_leaked_thread_is_found() -> None:
    before = leaks.Snapshot.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over", daemon=True)
    thread.start()
    try:
        assert at_once(before).threads == (thread,)
        assert "thread 'left-over' (daemon)" in str(at_once(before))
    finally:
        release.set()
        thread.join()
    assert not at_once(before)


def test_a_thread_on_its_way_out_is_given_time() -> None:
    before = leaks.Snapshot.take()
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    assert not before.leaked()


def test_a_leaked_socket_is_found() -> None:
    before = leaks.Snapshot.take()
    left, right = socket.socketpair()
    with left, right:
        assert len(at_once(before).sockets) == 2
    assert not at_once(before)


def test_a_leaked_runtime_folder_is_found_and_cleaned() -> None:
    before = leaks.Snapshot.take()
    folder = Path(os.environ[leaks.RUNTIME_DIR]) / "left-over"
    (folder / "deep").mkdir(parents=True)
    found = at_once(before)
    found.clean()
    assert found.folders == (folder,)
    assert not at_once(before)


def test_the_check_is_cheap_when_nothing_is_left() -> None:
    def once() -> float:
        started = time.perf_counter()
        leaks.Snapshot.take().leaked()
        return time.perf_counter() - started

    assert min(once() for _ in range(5)) < 0.030


def test_a_leaking_test_fails(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    test = tmp_path / "test_leaks.py"
    test.write_text("import os\ndef test_it():\n    os.mkdir(os.environ['HOLDFAST_RUNTIME_DIR'] + '/left-over')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={tmp_path}", str(test)]
    inner = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=False)
    assert inner.returncode == pytest.ExitCode.TESTS_FAILED, inner.stdout + inner.stderr
    assert "left behind after the test:\nfolder" in inner.stdout
