"""A node in a test's hands: real janitor, agent, zygotes and workers, and an agent that does what the test says."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.launch import Boot, spawn_janitor
from holdfast.engine.processes import WorkerExit, WorkerKey
from holdfast.wire.messages import Environment
from tests.engine.inside import framed

PATIENCE_S = 20.0
MARKER = "HOLDFAST_TEST_TREE"


class Tree:
    """The processes that carry a marker of their own in their environment."""

    def __init__(self) -> None:
        self.marker = secrets.token_hex(8)
        self._mark = f"{MARKER}={self.marker}".encode()

    def environment(self) -> dict[str, str]:
        return {**os.environ, MARKER: self.marker}

    def pids(self, name: str = "") -> list[int]:
        """Those alive, by the name that the kernel knows."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if self._mark not in Path(f"/proc/{pid}/environ").read_bytes():
                    continue
                if not name or Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def one(self, name: str) -> int:
        (pid,) = self.pids(name)
        return pid

    def wait_until_empty(self, patience_s: float) -> list[str]:
        """What is left after that time. Looks twice: a scan can miss a process that is forked meanwhile."""
        deadline = time.monotonic() + patience_s
        while (left := self.pids() or self.pids()) and time.monotonic() < deadline:
            time.sleep(0.002)
        return [describe(pid) for pid in left]


def describe(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return f"{pid} {stat[0]}) {' '.join(stat[2].split()[:2])}"
    except OSError:
        return f"{pid} (gone)"


class Node:
    """Starts on creation. The driver is this process, or, with ``own_driver``, a process of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        own_driver: bool = False,
        agent: str = "run_agent",
        variables: dict[str, str] | None = None,
    ) -> None:
        self.base = folder
        self.tree = Tree()
        short = Path(os.environ.get("HOLDFAST_RUNTIME_DIR", "/var/tmp")) / secrets.token_hex(4)
        self.short = short
        short.mkdir(mode=0o700)
        self.job_folder = short / "job"
        self.folder = self.job_folder / "node"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(short / "s"))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self._stream: socket.socket | None = None
        self._data = b""
        self._events: list[list[Any]] = []
        boot = Boot(
            driver_pid=os.getpid(),
            node="n",
            address=str(short / "s"),
            secret=b"secret",
            folder=str(self.folder),
            job_folder=str(self.job_folder),
            sys_path=tuple(sys.path),
            agent=f"tests.engine.inside:{agent}",
            worker="tests.engine.inside:run_worker",
        )
        self.spawned_at = time.monotonic()
        self.driver: subprocess.Popen[bytes] | None = None
        self.janitor: subprocess.Popen[bytes] | None = None
        if own_driver:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.inside"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**self.tree.environment(), **(variables or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert self.driver.stdin is not None
            self.driver.stdin.write(msgspec.json.encode(boot) + b"\n")
            self.driver.stdin.flush()
        else:
            before = os.environ.get(MARKER)
            os.environ[MARKER] = self.tree.marker
            try:
                self.janitor = spawn_janitor(boot)
            finally:
                del os.environ[MARKER]
                if before is not None:
                    os.environ[MARKER] = before

    def connect(self) -> Node:
        """Wait for the agent."""
        self._stream, _ = self._listener.accept()
        self._stream.settimeout(PATIENCE_S)
        self.agent = self.event("hello")[2]
        return self

    # What the agent can be told

    def tell(self, name: str, *arguments: object) -> None:
        assert self._stream is not None
        self._stream.sendall(framed((name, arguments)))

    def prepare(self, environment: Environment) -> str:
        self.tell("prepare", environment)
        return str(self.event("prepared")[2])

    def start(
        self,
        key: WorkerKey,
        behaviour: str,
        *arguments: object,
        environment: Environment | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        first = json.dumps([behaviour, *arguments]).encode() + b"\n"
        self.tell("start", key, environment or Environment(), str(self.log(key)), variables or {}, first)

    def log(self, key: WorkerKey) -> Path:
        return self.base / "logs" / key[0] / f"attempt_{key[1]}" / f"rank_{key[2]}.log"

    def printed(self, key: WorkerKey) -> str:
        return self.log(key).read_text()

    # What the agent tells

    def event(self, kind: str, key: WorkerKey | None = None) -> list[Any]:
        """The next event of this kind (and worker); others are kept."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for event in self._events:
                if event[1] == kind and (key is None or tuple(event[2]) == key):
                    self._events.remove(event)
                    return event
            assert time.monotonic() < deadline, f"no {kind} {key} among {self._events}"
            self._receive()

    def _receive(self) -> None:
        assert self._stream is not None
        part = self._stream.recv(1 << 16)
        assert part, f"the agent is gone; it had told {self._events}; {self.zygotes_log()}"
        self._data += part
        while len(self._data) >= 4 and len(self._data) >= (end := 4 + int.from_bytes(self._data[:4], "little")):
            self._events.append(msgspec.msgpack.decode(self._data[4:end]))
            self._data = self._data[end:]

    def hangs_up(self) -> bool:
        """Whether the agent ends its side."""
        try:
            while True:
                self._receive()
        except (AssertionError, ConnectionError):
            return True

    def hang_up(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def started(self, key: WorkerKey) -> int:
        return int(self.event("started", key)[3])

    def said(self, key: WorkerKey) -> Any:
        return json.loads(self.event("said", key)[3])

    def exited(self, key: WorkerKey) -> WorkerExit:
        return msgspec.convert(self.event("exited", key)[3], WorkerExit)

    def events_so_far(self) -> list[list[Any]]:
        return self._events

    def zygotes_log(self) -> str:
        log = self.folder / "zygotes.log"
        return log.read_text() if log.exists() else ""

    def end(self) -> list[str]:
        """End everything in the normal way, and return what is left."""
        self.hang_up()
        self._listener.close()
        if self.janitor is not None:
            assert self.janitor.stdin is not None
            self.janitor.stdin.close()
            self.janitor.wait(PATIENCE_S)
        if self.driver is not None:
            self.driver.kill()
            self.driver.communicate()
        left = self.tree.wait_until_empty(2.0)
        for pid in self.tree.pids():
            os.kill(pid, signal.SIGKILL)
        if self.folder.exists():
            left.append(str(self.folder))
        shutil.rmtree(self.short)
        return left
