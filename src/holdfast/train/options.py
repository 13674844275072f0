"""Options that explain themselves: an unknown one is an error that names the nearest valid one, and so are wrong
values.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

from holdfast.errors import ConfigurationError

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def options(kind: type[T]) -> type[T]:
    """A frozen dataclass whose constructor refuses unknown options by name and then calls ``check``."""
    made = dataclasses.dataclass(frozen=True)(kind)
    names = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]
    construct: Callable[..., None] = made.__init__

    def checked(self: Any, *arguments: Any, **given: Any) -> None:
        refuse_unknown(kind.__name__, given, names)
        if len(arguments) > len(names):
            raise ConfigurationError(f"{kind.__name__} takes at most {len(names)} values: {', '.join(names)}")
        construct(self, *arguments, **given)
        self.check()

    checked.__wrapped__ = construct  # type: ignore[attr-defined]
    made.__init__ = checked  # type: ignore[method-assign]
    return made


def refuse_unknown(owner: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """ConfigurationError for the first name that is not among the valid ones."""
    known = list(valid)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigurationError(f"{owner} has no option {name!r}. {hint}Its options are: {', '.join(known)}.")


def require(holds: bool, owner: str, option: str, value: object, want: str) -> None:
    """ConfigurationError unless ``holds``."""
    if not holds:
        raise ConfigurationError(f"{owner}({option}={value!r}): {option} must be {want}")


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
