"""The inputs of a model: their dtypes and shapes, with the caller's shapes and dims applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from onnx import ValueInfoProto

from tcomp.errors import InputError, UnsupportedError
from tcomp.frontends.onnx import reader
from tcomp.ir.expr import Dim, as_dim, as_expr, dim

LARGEST = (1 << 29) - 1  # of a dim without a bound of its own: index arithmetic and shape arithmetic rely on some bound

Shape = list[int | str]  # sizes, names and formulas
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][\w.]*)|(//|[-+*()]))")


def signature(
    infos: Sequence[ValueInfoProto], shapes: Mapping[str, Sequence[int | str]], dims: Mapping[str, int | tuple[int, int]]
) -> list[tuple[str, str, tuple[Dim, ...]]]:
    """(name, dtype, shape) of the inputs. Raises `InputError` for shapes and dims that do not fit them.

    A size that the model writes as a formula of others ("past + 1") is that formula.
    """
    names = [i.name for i in infos]
    if unknown := [n for n in shapes if n not in names]:
        raise InputError(f"the model has no input `{unknown[0]}`", hint=f"its inputs are {', '.join(names)}")
    types = {i.name: reader.tensor_type(i.type, f"input `{i.name}`") for i in infos}
    given: dict[str, Shape] = {}
    sizes: dict[str, int | str] = {}  # what `shapes` says of the dims that the model names
    for name, (_, declared) in types.items():
        own: Shape = [d if d is not None else f"{name}_{axis}" for axis, d in enumerate(declared or [])]
        given[name] = list(shapes.get(name, own))
        if declared is None and name not in shapes:
            raise UnsupportedError(
                "the number of dimensions of an input is not known", where=f"input `{name}`", hint="give its shape with --shape"
            )
        if declared is not None and len(given[name]) != len(own):
            raise InputError(f"input `{name}` has {len(own)} dimensions, the shape given has {len(given[name])}")
        for d, size in zip(own, given[name], strict=False):
            if isinstance(d, str) and name in shapes and sizes.setdefault(d, size) != size:
                raise InputError(f"the shapes given say both {sizes[d]} and {size} for dim `{d}`", where=f"input `{name}`")
    symbols: dict[str, str] = {}  # name in the model -> name of the variable

    def variable_of(name: str) -> Dim:
        if name not in symbols:
            plain = re.sub(r"[^\w.]", "_", name)
            symbols[name] = plain if plain not in symbols.values() else f"{plain}_{len(symbols)}"
        return dim(symbols[name], 1, LARGEST)

    def size_of(name: str) -> Dim:
        value = dims.get(name, sizes.get(name, name))
        variable = variable_of(name)
        if isinstance(value, str):
            return variable if value == name else formula(value, size_of if value not in sizes else variable_of)
        return _extent(name, symbols[name], value)

    result = []
    for name, (dtype, _) in types.items():
        shape = tuple(formula(d, size_of) if isinstance(d, str) else _checked(d, name) for d in given[name])
        result.append((name, dtype, shape))
    if unknown := [n for n in dims if n not in symbols and n not in sizes]:
        listed = ", ".join(symbols) or "none: all its shapes are fixed"
        raise InputError(f"the model has no dim `{unknown[0]}`", hint=f"its symbolic dims are {listed}")
    for d, size in sizes.items():
        if d in dims and isinstance(size, int) and dims[d] != size:
            raise InputError(f"dim `{d}` is given as {dims[d]}, and as {size} by a shape")
    return result


def _checked(size: int, name: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InputError(f"a shape has the size {size!r}", where=f"input `{name}`", hint="sizes are integers, 0 or more")
    return size


def _extent(name: str, variable: str, given: int | tuple[int, int]) -> Dim:
    """The size that the caller gives a dim, or a variable with the range that the caller gives it."""
    match given:
        case int() if given >= 0 and not isinstance(given, bool):
            return given
        case (int(lo), int(hi)) if 0 <= lo <= hi:
            return lo if lo == hi else dim(variable, lo, hi)
    raise InputError(f"dim `{name}` is given as {given!r}", hint="an integer, or a pair (lowest, highest)")


# ---------------------------------------------------------------- formulas


def formula(text: str, size_of: Callable[[str], Dim]) -> Dim:
    """The size that a name or a formula of names, integers, `+ - * //` and parentheses stands for.

    Text that is no formula is a name.
    """
    tokens, position = [], 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            return size_of(text)
        tokens.append(match.group(match.lastindex or 0))
        position = match.end()
    if len(tokens) < 3 or len(tokens) > 100:
        return size_of(text)
    try:
        value, rest = _sum(tokens, size_of)
    except (IndexError, ValueError):
        return size_of(text)
    return size_of(text) if rest else as_dim(value)


def _sum(tokens: list[str], size_of: Callable[[str], Dim]) -> tuple[Dim, list[str]]:
    value, tokens = _product(tokens, size_of)
    while tokens and tokens[0] in "+-":
        other, rest = _product(tokens[1:], size_of)
        value = as_dim(as_expr(value) + other if tokens[0] == "+" else as_expr(value) - other)
        tokens = rest
    return value, tokens


def _product(tokens: list[str], size_of: Callable[[str], Dim]) -> tuple[Dim, list[str]]:
    value, tokens = _atom(tokens, size_of)
    while tokens and tokens[0] in ("*", "//"):
        other, rest = _atom(tokens[1:], size_of)
        if tokens[0] == "//" and (not isinstance(other, int) or other < 1):
            raise ValueError
        value = as_dim(as_expr(value) * other if tokens[0] == "*" else as_expr(value) // other)
        tokens = rest
    return value, tokens


def _atom(tokens: list[str], size_of: Callable[[str], Dim]) -> tuple[Dim, list[str]]:
    head, rest = tokens[0], tokens[1:]
    if head == "(":
        value, rest = _sum(rest, size_of)
        if rest[0] != ")":
            raise ValueError
        return value, rest[1:]
    if head.isdigit():
        return int(head), rest
    if not (head[0].isalpha() or head[0] == "_"):
        raise ValueError
    return size_of(head), rest
