"""``__main__`` in a worker: it stands for the user's script, as it would in a process of multiprocessing's own.

A worker is forked from a zygote, whose ``__main__`` is none of the user's. Data loaders that start processes by spawn
or forkserver ask ``__main__`` for the script to load in the child, and pickle the script's classes by their name in it.
So the zygote gives itself a ``__main__`` that knows the script's place, and a worker puts the names that came with its
function into it. The script itself is not run again here.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types


def stand_in(path: str, module: str) -> None:
    """Have a ``__main__`` that stands for the script at ``path``, or for the module that was run by ``-m``."""
    main = types.ModuleType("__main__")
    if path:
        main.__file__ = path
    if module:
        main.__spec__ = importlib.util.find_spec(module)
    sys.modules["__main__"] = main


def adopt(function: object) -> None:
    """Give ``__main__`` the names of the script that travelled with its function."""
    plain = _plain(function)
    if plain is None or plain.__module__ != "__main__":
        return
    main = sys.modules["__main__"].__dict__
    for name, value in {**plain.__globals__, plain.__name__: plain}.items():
        if not (name.startswith("__") and name.endswith("__")):
            main.setdefault(name, value)


def _plain(function: object) -> types.FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        function = vars(type(function)).get("__call__")
    return function if isinstance(function, types.FunctionType) else None
