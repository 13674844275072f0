"""What a zygote imports before it forks workers, and whether a fork is safe after it.

An import may start threads, which a fork does not copy. Pools of libraries that are known to make new ones are allowed;
anything else means that workers are forked from a zygote that has imported nothing. It must never run what it imports.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from holdfast.wire.messages import Environment
from holdfast.worker import kernel, main_module

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FORK_SAFE = frozenset(
    ("cv2", "jax", "jaxlib", "numba", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "torch", "torchvision")
)
"""Modules whose thread pools are known to survive a fork before their first use."""


def take_on(environment: Environment) -> str:
    """Become this environment, all but its modules. Returns a notice where something of it cannot be had."""
    if environment.variables:  # all of them: one that the driver has removed must not live on here
        os.environ.clear()
        os.environ.update(environment.variables)
    if environment.sys_path:
        sys.path[:] = environment.sys_path
    if environment.argv:
        sys.argv[:] = environment.argv
    main_module.stand_in(environment.main_path, environment.main_module)
    importlib.invalidate_caches()
    if environment.working_directory:
        try:
            os.chdir(environment.working_directory)
        except OSError as error:
            return f"workers start in {os.getcwd()}: {error}"
    return ""


def import_all(modules: Iterable[str]) -> str:
    """Import these, as far as a fork stays safe. Returns why it is not, or nothing."""
    pools = _Pools()
    sys.meta_path.insert(0, pools)
    try:
        for module in modules:
            attempt(module)
            reason = _unsafe(pools.threads)
            if reason:
                return f"importing {module} {reason}"
    finally:
        sys.meta_path.remove(pools)
    return ""


def _unsafe(allowed_threads: int) -> str:
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"starts threads ({names})"
    if _threads() > 1 + allowed_threads:
        return "starts native threads"
    for fd in open_files():
        if _target(fd).startswith("/dev/nvidia"):
            return f"opens {_target(fd)}"
    if kernel.children():
        return "starts processes"
    return ""


class _Pools:
    """A finder that counts the threads which fork-safe modules start while they are imported, by whomever."""

    def __init__(self) -> None:
        self.threads = 0
        self._inside = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._inside or fullname.partition(".")[0] not in FORK_SAFE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._count_during(spec.loader)
                return spec
        return None

    def _count_during(self, loader: object) -> None:
        execute: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def counted(module: ModuleType) -> None:
            before, self._inside = _threads(), True
            del loader.exec_module  # type: ignore[attr-defined]
            try:
                execute(module)
            finally:
                self._inside = False
                self.threads += max(0, _threads() - before)

        loader.exec_module = counted  # type: ignore[attr-defined]


def attempt(module: str) -> None:
    """Import this, or do without."""
    try:
        importlib.import_module(module)
    except BaseException:  # the worker will meet the same error, and can tell of it
        traceback.print_exc()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> list[int]:
    """Every open descriptor but the standard three."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _target(fd)]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
