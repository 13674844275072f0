"""Metrics as JSON text: what a report may hold, and the way back.

JSON has no NaN and no infinity, and a diverging loss must not be lost, so these travel as ``{"$float": "nan"}``. NumPy
scalars become Python numbers. Anything else that JSON cannot hold is an error that names the key and the conversion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import MetricsError

_PLAIN = frozenset({float, int, str, bool})
_FLOAT = "$float"
_encoder = msgspec.json.Encoder()
_encode = _encoder.encode


def encode_metrics(metrics: Mapping[str, Any]) -> bytes:
    """The JSON object of one report's metrics."""
    if type(metrics) is dict:
        for value in metrics.values():
            if type(value) not in _PLAIN:
                break
        else:
            text = _encode_plain(metrics)
            if text is not None:
                return text
    elif not isinstance(metrics, Mapping):
        raise MetricsError(f"report takes a dict of metrics, not {_kind(metrics)}: {metrics!r:.80}")
    return encode_value(metrics, "")


def encode_value(value: Any, name: str = "value") -> bytes:
    """The JSON text of any value that metrics may hold."""
    plain = _plain(value, name)
    try:
        return _encode(plain)
    except (ValueError, OverflowError) as error:
        raise MetricsError(f"metrics hold something that JSON cannot: {error}") from error


def decode_metrics(text: bytes | msgspec.Raw) -> Any:
    """Metrics, or a list of them, as they were reported."""
    found = msgspec.json.decode(text)
    return _restore(found) if _FLOAT.encode() in bytes(text) else found


def _encode_plain(metrics: dict[str, Any]) -> bytes | None:
    """The text of a flat dict, or None when it holds something that needs a closer look."""
    try:
        text = _encode(metrics)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if b"null" in text else text


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    module = type(value).__module__.partition(".")[0]
    if module == "numpy" and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), path)
    raise MetricsError(f"metric {path!r} is {_kind(value)}, which JSON cannot hold. {_advice(module, value)}")


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int):
        return str(key)
    raise MetricsError(f"metrics{f' under {path!r}' if path else ''} have the key {key!r:.60}; keys must be text")


def _advice(module: str, value: Any) -> str:
    if module in ("torch", "jax", "jaxlib", "tensorflow"):
        return "Pass a number: call .item() on it (or .tolist() for more than one value)."
    if module == "numpy":
        return "Pass a list: call .tolist() on it."
    if isinstance(value, set | frozenset):
        return "Pass a list: call sorted() on it."
    return "Pass numbers, text, lists and dicts, for example str(value)."


def _kind(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _restore(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and _FLOAT in value:
            return float(value[_FLOAT])
        return {key: _restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item) for item in value]
    return value
