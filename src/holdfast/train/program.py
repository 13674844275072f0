"""The user's function on its way to the workers: pickled, with an error that names what cannot be, and the environment
that their zygote needs.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import xxhash

from holdfast.errors import ConfigurationError, PicklingError
from holdfast.wire.messages import Environment

_HEAVY = ("numpy", "torch", "pandas", "scipy", "sklearn", "jax", "pyarrow", "transformers")


def check_function(function: object) -> Callable[..., Any]:
    """The function itself, if a trainer can call it."""
    if not callable(function):
        raise ConfigurationError(f"train_loop_per_worker must be a function, not {function!r:.80}")
    required = [
        parameter
        for parameter in _positional(function)
        if parameter.default is inspect.Parameter.empty and parameter.kind != inspect.Parameter.VAR_POSITIONAL
    ]
    if len(required) > 1:
        raise ConfigurationError(
            f"{name_of(function)} takes {len(required)} arguments; a training function takes one, "
            "its train_loop_config, or none"
        )
    return function


def name_of(function: Callable[..., Any]) -> str:
    """``module:qualname``, by which a run knows its function again."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def fingerprint(config: object) -> str:
    """A short text that differs when ``train_loop_config`` does.

    Values that JSON cannot hold are told apart by how they are pickled. Where that is not the same every time, a run
    that has finished is taken to have changed, and goes on from its newest checkpoint.
    """

    def describe(value: object) -> str:
        pickled: bytes = cloudpickle.dumps(value)
        return f"<{type(value).__module__}.{type(value).__qualname__} {xxhash.xxh3_64_hexdigest(pickled)}>"

    try:
        text = msgspec.json.encode(config, enc_hook=describe, order="deterministic")
    except (TypeError, ValueError):
        text = describe(config).encode()
    return xxhash.xxh3_64_hexdigest(text)


def pack(function: Callable[..., Any], config: Mapping[str, Any] | None) -> bytes:
    """The function and its arguments, pickled. PicklingError names the object that cannot be."""
    arguments = (dict(config or {}),) if _positional(function) else ()
    try:
        return bytes(cloudpickle.dumps((function, arguments)))
    except Exception as error:
        culprit = _culprit(function, config) or f"{name_of(function)} or its train_loop_config"
        raise PicklingError(
            f"{culprit} cannot be sent to the workers: {error}. Make it inside the training function instead, "
            "or pass what it is made from."
        ) from error


def environment(function: Callable[..., Any], runtime: Mapping[str, Any]) -> Environment:
    """What the workers' zygote imports, and under which variables, paths and sources. ``runtime`` is the user's."""
    preload = tuple(sorted(_modules_used_by(function)))
    folder = runtime.get("working_dir")
    folder = None if folder is None else os.path.abspath(os.path.expanduser(folder))
    main = sys.modules["__main__"]
    return Environment(
        preload=preload,
        variables={**os.environ, **(runtime.get("env_vars") or {})},
        sys_path=tuple(sys.path) if folder is None else (folder, *map(os.path.abspath, sys.path)),
        working_directory=folder or os.getcwd(),
        argv=tuple(sys.argv),
        main_path=os.path.abspath(path) if (path := getattr(main, "__file__", None)) else "",
        main_module=getattr(getattr(main, "__spec__", None), "name", None) or "",
        sources=_sources() if folder is None else f"{_sources()};{_sources_below(folder, preload)}",
    )


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return [parameter for parameter in parameters if parameter.kind in kinds]


def _culprit(function: Callable[..., Any], config: Mapping[str, Any] | None) -> str:
    """Which named object cannot be pickled."""
    for where, value in _candidates(function, config):
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{where} ({type(value).__module__}.{type(value).__qualname__})"
    return ""


def _candidates(function: Callable[..., Any], config: Mapping[str, Any] | None) -> Iterator[tuple[str, object]]:
    for key, value in (config or {}).items():
        yield f"train_loop_config[{key!r}]", value
    while isinstance(function, functools.partial):
        for name, value in (*enumerate(function.args, 1), *function.keywords.items()):
            yield f"argument {name} of the functools.partial of {name_of(function)}", value
        function = function.func
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        return
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        yield f"the variable {name!r} that {plain.__name__} uses", cell.cell_contents
    for name in _names_in(plain.__code__):
        if name in plain.__globals__:
            yield f"the global {name!r} that {plain.__name__} uses", plain.__globals__[name]


def _modules_used_by(function: Callable[..., Any]) -> set[str]:
    """Modules that the function names or imports, and the heavy ones that this process has loaded anyway."""
    found = {name for name in _HEAVY if name in sys.modules}
    if "numpy" in found:
        found.add("numpy.random")  # numpy loads it late, and reseeding a worker needs it
    plain = inspect.unwrap(function)
    if isinstance(plain, types.FunctionType):
        for name in _names_in(plain.__code__):
            value = plain.__globals__.get(name)
            module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(module, str):
                found.add(module)
        found.update(_imports_in(plain.__code__))
        found.add(plain.__module__)
    return {
        name
        for name in found
        if name.partition(".")[0] not in ("__main__", "holdfast", "builtins", *sys.stdlib_module_names)
    }


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _imports_in(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and instruction.argval:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports_in(constant)


def _sources() -> str:
    """A short text that differs when a module file of the user's own that this process has loaded has changed."""
    ours = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)))
    marks = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(path, str) or path.startswith(ours):
            continue
        try:
            status = os.stat(path)
        except OSError:
            continue
        marks.append(f"{name}:{status.st_mtime_ns}:{status.st_size}")
    return xxhash.xxh3_64_hexdigest(";".join(sorted(marks)).encode())


def _sources_below(folder: str, modules: Iterable[str]) -> str:
    """The state of the files of these modules that lie in ``folder``, loaded here or not."""
    marks = []
    for name in sorted({module.partition(".")[0] for module in modules}):
        top = Path(folder, name)
        for path in (top.with_suffix(".py"), *sorted(top.rglob("*.py"))):
            with contextlib.suppress(OSError):
                status = path.stat()
                marks.append(f"{path}:{status.st_mtime_ns}:{status.st_size}")
    return ";".join(marks)
