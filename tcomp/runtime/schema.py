"""JSON of artifacts, checked by the fields of dataclasses (`read`). A field is a `str`, `bool`, `int` or bounded integer (`Annotated[int,
range(...)]`), a union of such types and None, a dataclass (an object), `tuple[T, ...]` (an array), `dict[str, Any]` (any object) or `Any`.
Keys that no field names are ignored; a field with a default may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tcomp.errors import ArtifactError

Where = tuple[str | int, ...]  # a path of keys and indices
T = TypeVar("T")

LIMIT = 1 << 62  # of sizes and offsets, so that sums of two do not overflow 64 bits
Count = Annotated[int, range(LIMIT + 1)]

_NAMES: dict[type, str] = {
    str: "a string", bool: "true or false", int: "an integer", float: "a number", dict: "an object", list: "an array", NoneType: "null",
}  # fmt: skip
_MISSING = object()


def load_json(data: bytes, what: str) -> Any:
    """The JSON in `data`. Raises ArtifactError, saying `what` it should have been."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(data.decode(), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise ArtifactError(f"{what} of the artifact is not valid JSON", why=str(problem)) from None


def read(kind: type[T], value: Any, *where: str | int) -> T:
    """JSON as an instance of a type; `where` is its path, for messages. Raises ArtifactError that names the first field that is wrong."""
    return cast(T, _reader(cast(Any, kind))(value, where))


def refuse(where: Where, expected: str) -> NoReturn:
    """Raises ArtifactError: something else was expected at this path."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where).lstrip(".")
    raise ArtifactError(f"the artifact is malformed: expected {expected}", where=path)


@cache
def _reader(kind: Any) -> Callable[[Any, Where], Any]:
    """A function from (JSON, path) to an instance of `kind`: types are inspected once."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: refuse(where, "a value") if value is _MISSING else value
    if origin is Annotated:
        bounds: range = arguments[1]
        expected = f"an integer in [{bounds.start}, {bounds.stop - 1}]"
        return lambda value, where: value if type(value) is int and value in bounds else refuse(where, expected)
    if origin is tuple:
        element = _reader(arguments[0])

        def array(value: Any, where: Where) -> Any:
            return tuple([element(v, (*where, n)) for n, v in enumerate(value)]) if type(value) is list else refuse(where, "an array")

        return array
    if origin in (Union, UnionType):
        plain_of = {a: get_args(a)[0] if get_origin(a) is Annotated else dict if is_dataclass(a) else a for a in arguments}
        options = {plain_of[a]: _reader(a) for a in arguments}  # by the type that JSON has
        expected = " or ".join(_NAMES[option] for option in options)
        return lambda value, where: options[type(value)](value, where) if type(value) in options else refuse(where, expected)
    if is_dataclass(kind) and isinstance(kind, type):
        members = [(name, _reader(hint)) for name, hint in get_type_hints(kind, include_extras=True).items()]
        defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}

        def record(value: Any, where: Where) -> Any:
            if type(value) is not dict:
                refuse(where, "an object")
            given = {
                name: reader(value.get(name, _MISSING), (*where, name)) for name, reader in members if name in value or name not in defaults
            }
            return kind(**given)

        return record
    plain = origin or kind
    return lambda value, where: value if type(value) is plain else refuse(where, _NAMES[plain])
