"""Dataclasses whose values pydantic checks, made in Python as well as read from YAML."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

from text2sql_grpo.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class Bounds:
    """pydantic's `Field(ge=1)` for an annotated type, without importing pydantic."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(kind) | self._bounds


Positive = Annotated[int, Bounds(ge=1)]
NotNegative = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, le=2**32 - 1)]
AboveZero = Annotated[float, Bounds(gt=0, allow_inf_nan=False)]
Temperature = Annotated[float, Bounds(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Bounds(ge=0, le=1, allow_inf_nan=False)]
AboveZeroShare = Annotated[float, Bounds(gt=0, le=1, allow_inf_nan=False)]

_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": ">=",
    "greater than": ">",
    "less than or equal to": "<=",
    "an object": "a mapping",
    "a dictionary": "a mapping",
    "a valid dictionary": "a mapping",
    "a valid list": "a list",
}
_UNION_MEMBER = re.compile(r"\.(str$|dict\[|list\[|lax-or-strict\[).*")  # what pydantic appends to a key


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked(kind: type[T]) -> type[T]:
    """Make a frozen dataclass whose arguments pydantic checks and converts, like its own `dataclass`.

    Importing pydantic takes 0.1 s, which SQL workers and `--help` cannot spend: it is imported for the first
    object that is made with arguments. Defaults are not checked.
    """
    kind = dataclasses.dataclass(frozen=True)(kind)
    plain: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(plain)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        if not args and not kwargs:
            return plain(self)
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        try:
            arguments = ArgsKwargs(args, kwargs)
            adapter(kind).validator.validate_python(arguments, self_instance=self)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError(problems(error, kind)) from error

    setattr(kind, "__init__", init)  # noqa: B010 (mypy lets no method be assigned)
    setattr(kind, "__pydantic_config__", {"extra": "forbid", "allow_inf_nan": False})  # noqa: B010
    return kind


@functools.cache
def adapter(kind: type[T]) -> "TypeAdapter[T]":
    """Validator and serializer of a checked dataclass."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def nested_section(hint: Any) -> type | None:
    """Dataclass in a type such as `X` or `X | None`; None without one."""
    parts = (part for part in (hint, *get_args(hint)) if isinstance(part, type))
    return next(filter(dataclasses.is_dataclass, parts), None)


def problems(error: "ValidationError", kind: type, removed: Mapping[str, str] | None = None) -> str:
    """Describe everything that is wrong with the values of a checked dataclass, each by its dotted name.

    Args:
        removed: Advice for keys that were removed.
    """
    positions: dict[int | str, int | str] = dict(enumerate(f.name for f in dataclasses.fields(kind)))
    texts: dict[str, str] = {}
    for detail in error.errors():
        keys = [positions.get(key, key) for key in detail["loc"][:1]] + list(detail["loc"][1:])
        where = _UNION_MEMBER.sub("", ".".join(map(str, keys)))
        texts.setdefault(where, _problem(where, dict(detail), kind, removed or {}))
    return "; ".join(texts.values())


def _problem(where: str, detail: dict[str, Any], kind: type, removed: Mapping[str, str]) -> str:
    if detail["type"] == "unexpected_keyword_argument":
        if where in removed:
            return f"{where} was removed: {removed[where]}"
        import difflib  # SQL workers have no use for it

        *parents, name = detail["loc"]
        for parent in parents:
            kind = nested_section(get_type_hints(kind)[parent]) or kind
        known = [f.name for f in dataclasses.fields(kind)]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        return f"unknown key {where}: {hint}"
    if detail["type"] == "missing":
        return f"missing key {where}"
    if detail["type"] == "value_error":  # raised by a section, value included
        message = str(detail["ctx"]["error"])
        return f"{where}: {message}" if where else message
    message = str(detail["msg"])
    for word, shown in _WORDS.items():
        message = message.replace(word, shown)
    return f"{where} {message}, got {detail['input']!r}"
