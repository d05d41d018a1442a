"""Operators on arrays of strings: functions from arrays to arrays, by ONNX's definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime.host_steps.regex import Pattern
from tcomp.runtime.host_steps.steps import STRING, Array, SavedArray, restored_array, strings

MAX_CHARACTERS = 1 << 28  # of one result: a chain of concatenations doubles a text with every step
_FLOATS = ("float16", "float32", "float64")
_NAN = object()  # the key of all NaNs
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def is_text(array: Array) -> bool:
    """Whether it is an array of strings."""
    return array.dtype == object


def mapped(function: Callable[[Any], Any], x: Array, dtype: Any) -> Array:
    """The function of each element."""
    result = np.empty(x.size, dtype)
    result[:] = [function(element) for element in x.reshape(-1)]
    return result.reshape(x.shape)


@dataclass(frozen=True)
class NormalizeAttributes:
    """`case`: "LOWER", "UPPER" or "NONE"."""

    case: str
    is_case_sensitive: bool
    stopwords: tuple[str, ...]


def normalize(arguments: Sequence[Array], attributes: NormalizeAttributes) -> list[Array]:
    """StringNormalizer: words [C] or [1, C] without stopwords, in lower or upper case; where none is left, one that is empty."""
    (x,) = arguments
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise InputError(f"StringNormalizer takes words of the shape [C] or [1, C], not {[*x.shape]}")

    def key(word: str) -> str:
        return word if attributes.is_case_sensitive else word.lower()

    stops = {key(word) for word in attributes.stopwords}
    words = [word for word in x.reshape(-1) if not stops or key(word) not in stops]
    change: Callable[[str], str] = {"LOWER": str.lower, "UPPER": str.upper}.get(attributes.case, str)
    words = [change(word) for word in words] or [""]
    return [strings(words, (len(words),) if x.ndim == 1 else (1, len(words)))]


def concatenate(arguments: Sequence[Array], attributes: object) -> list[Array]:
    """StringConcat: elementwise, with broadcasting."""
    a, b = np.broadcast_arrays(*arguments)
    if sum(len(x) + len(y) for x, y in zip(a.flat, b.flat, strict=True)) > MAX_CHARACTERS:
        raise InputError(f"StringConcat makes more than {MAX_CHARACTERS} characters")
    return [strings((x + y for x, y in zip(a.flat, b.flat, strict=True)), a.shape)]


@dataclass(frozen=True)
class SplitAttributes:
    """`delimiter` is "" for white space; `most` splits are done, at most, where it is not None."""

    delimiter: str
    most: int | None


def split(arguments: Sequence[Array], attributes: SplitAttributes) -> list[Array]:
    """StringSplit: parts in a new last axis, filled up with empty strings, and the number of parts of each."""
    (x,) = arguments
    most = -1 if attributes.most is None else attributes.most
    parts = [text.split(attributes.delimiter or None, most) for text in x.flat]
    width = max(map(len, parts), default=0)
    filled = [word for words in parts for word in (*words, *[""] * (width - len(words)))]
    return [strings(filled, (*x.shape, width)), np.array([len(words) for words in parts], np.int64).reshape(x.shape)]


@dataclass(frozen=True)
class MatchAttributes:
    """`pattern`: see `regex`."""

    pattern: str


def full_match(arguments: Sequence[Array], pattern: Pattern) -> list[Array]:
    """RegexFullMatch: whether each string as a whole matches."""
    return [mapped(pattern.full_match, arguments[0], np.bool_)]


def compiled(attributes: MatchAttributes) -> Pattern:
    """The pattern. Raises InputError for one that cannot be used."""
    return Pattern(attributes.pattern)


@dataclass(frozen=True)
class LookUpAttributes:
    """`values[n]` is the result for `keys[n]`, the first of equal ones; `default` [1] that for what is not a key."""

    keys: SavedArray
    values: SavedArray
    default: SavedArray


@dataclass(frozen=True)
class Table:
    """Values by key, those for all that is not a key, and the type of the keys."""

    found: dict[Any, Any]
    default: Array
    keys: np.dtype[Any]


def tabulated(attributes: LookUpAttributes) -> Table:
    """The table of a look-up. Raises InputError or ArtifactError where its parts do not fit together."""
    keys, values, default = map(restored_array, (attributes.keys, attributes.values, attributes.default))
    if keys.size != values.size or default.size != 1 or values.dtype != default.dtype:
        raise InputError("the keys, the values and the default of a look-up do not fit together")
    pairs = zip(reversed(keys.reshape(-1)), reversed(values.reshape(-1)), strict=True)
    return Table({_key(k): v for k, v in pairs}, default.reshape(-1), keys.dtype)


def _key(element: Any) -> Any:
    """One that equals itself: NaN is looked up like other numbers."""
    return _NAN if isinstance(element, float | np.floating) and np.isnan(element) else element


def look_up(arguments: Sequence[Array], table: Table) -> list[Array]:
    """LabelEncoder and CategoryMapper: the value of the key that equals an element, or the default."""
    (x,) = arguments
    if x.dtype != table.keys:
        raise InputError(f"keys of {table.keys} are looked up in an array of {x.dtype}")

    def value(element: Any) -> Any:
        return table.found.get(_key(element), table.default[0])

    if is_text(x):
        return [mapped(value, x, table.default.dtype)]
    elements, places = np.unique(x, return_inverse=True)
    return [mapped(value, elements, table.default.dtype)[places.reshape(x.shape)]]


@dataclass(frozen=True)
class CastAttributes:
    """`to`: the element type of the result."""

    to: str


def cast(arguments: Sequence[Array], attributes: CastAttributes) -> list[Array]:
    """Cast from or to strings: numbers in their shortest notation, NaN, INF and -INF."""
    (x,), to = arguments, attributes.to
    if to == STRING:
        return [x if is_text(x) else mapped(_written, x, object)]
    if not is_text(x):
        return [x.astype(to)]
    with np.errstate(over="ignore"):
        return [mapped(_float if to in _FLOATS else _integer, x, to)]


def castable(attributes: CastAttributes) -> CastAttributes:
    """The attributes. Raises InputError for a type to which strings cannot be cast."""
    if attributes.to not in (STRING, *_FLOATS, *_INTEGERS):
        raise InputError(f"strings cannot be cast to {attributes.to}")
    return attributes


def _written(number: Any) -> str:
    if isinstance(number, np.bool_):
        return str(int(number))
    if isinstance(number, np.floating):
        return "NaN" if np.isnan(number) else ("INF" if number > 0 else "-INF") if np.isinf(number) else str(number)
    return str(number)


def _float(text: str) -> float:
    if "_" in text:  # Python's own notation
        raise InputError(f"{text[:40]!r} is not a number")
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text[:40]!r} is not a number") from None


def _integer(text: str) -> int:
    try:
        return int(text) if "_" not in text and len(text) <= 400 else int("")
    except ValueError:
        raise InputError(f"{text[:40]!r} is not an integer") from None
