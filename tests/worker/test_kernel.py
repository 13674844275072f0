"""The kernel calls that the process tree rests on."""

from __future__ import annotations

import os
import subprocess

import pytest

from holdfast.worker import kernel


def test_children_are_found_on_any_kernel() -> None:
    with subprocess.Popen(["sleep", "1000"]) as one, subprocess.Popen(["sleep", "1000"]) as other:
        try:
            assert {one.pid, other.pid} <= set(kernel.children())
            assert set(kernel.children()) == set(kernel._children_by_scan(os.getpid()))
        finally:
            one.kill()
            other.kill()


def test_the_kernels_own_list_of_children_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_read", lambda path: b"12 3456 " if path.endswith("/children") else b"")
    monkeypatch.setattr(os, "listdir", lambda path: {"/proc/self/task": ["1", "2"]}[path])
    assert kernel.children() == [12, 3456, 12, 3456]


def test_only_a_child_is_killed() -> None:
    """A pid that was read a moment ago may be somebody else's by now."""
    assert kernel.kill_child(os.getpid()) is None
    with subprocess.Popen(["sleep", "1000"]) as child:
        pidfd = kernel.kill_child(child.pid)
        assert pidfd is not None
        kernel.wait_for_end(pidfd)
        assert kernel.has_ended(pidfd)
        os.close(pidfd)
    assert child.returncode == -9
