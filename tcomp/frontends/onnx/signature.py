"""The inputs of a model, with the caller's shapes and dims applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
from onnx import ValueInfoProto

from tcomp.errors import InputError, TcompError, UnsupportedError
from tcomp.frontends.onnx import reader
from tcomp.ir.expr import INDEX, Dim, as_expr, dim, substitute, variables, walk
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.expression_parser import parse_expr

LARGEST = (1 << 29) - 1  # of a dim without a bound of its own: index arithmetic and shape arithmetic rely on some bound

MAX_FORMULA = 1000  # characters; longer text is a name
OPERATIONS = {"const", "var", "add", "sub", "neg", "mul", "floordiv"}  # in a formula

Shape = Sequence[int | str]  # sizes, names and formulas
Range = int | tuple[int, int] | list[int]  # a size, the lowest and the highest one, or sizes that get code of their own
MAX_EXACT = 16  # of these
Shapes = Mapping[str, Shape]  # by the name of an input
Dims = Mapping[str, Range]  # by the name of a dim
Values = Mapping[str, np.ndarray]  # by the name of an input


def signature(
    infos: Sequence[ValueInfoProto], shapes: Shapes, dims: Dims, distinct: bool = False, others: Container[str] = ()
) -> list[tuple[str, str, tuple[Dim, ...]]]:
    """(name, dtype, shape) of the inputs. A size that the model writes as a formula of others ("past + 1") is that formula. Where sizes
    are `distinct`, names say nothing: unless `dims` has it, a name stands for one size where it is first met, for others elsewhere. Raises
    `InputError` for shapes and dims (but `others`) that do not fit the inputs, `UnsupportedError` for inputs of unknown rank or type."""
    names = [i.name for i in infos]
    if unknown := [n for n in shapes if n not in names]:
        raise InputError(f"the model has no input `{unknown[0]}`", hint=f"its inputs are {', '.join(names)}")
    kinds = {i.name: i.type for i in infos}
    types = {name: reader.tensor_type(kind, f"input `{name}`") for name, kind in kinds.items()}
    given: dict[str, Shape] = {}
    met: set[str] = set()
    sizes: dict[str, int | str] = {}  # what `shapes` says of the dims that the model names
    for name, (_, declared) in types.items():
        own: Shape = [d if d is not None else f"{name}_{axis}" for axis, d in enumerate(declared or [])]
        if distinct and name not in shapes:
            own = [f"{name}_{n}" if isinstance(d, str) and d not in dims and (d in met or d in own[:n]) else d for n, d in enumerate(own)]
            met.update(d for d in own if isinstance(d, str))
        given[name] = shapes.get(name, own)
        if declared is None and name not in shapes:
            what = "the number of dimensions of an input is not known"
            raise UnsupportedError(what, where=f"input `{name}`", hint="give its shape with --shape")
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
        """A name of the caller's: in `shapes`, those of the model mean nothing (in `x=1,3,h*32,w*32` they may be the same)."""
        variable = variable_of(name)
        return size_in(dims[name], name, symbols[name]) if name in dims else variable

    def declared_size(name: str) -> Dim:
        """A name of the model's."""
        given = sizes.get(name, name)
        return formula(given, size_of) if isinstance(given, str) else given

    result = []
    for name, (dtype, _) in types.items():
        for d in given[name]:
            if isinstance(d, bool) or not (isinstance(d, str) or (isinstance(d, int) and d >= 0)):
                raise InputError(f"a shape has the size {d!r}", where=f"input `{name}`", hint="sizes are integers, 0 or more")
        meaning = size_of if name in shapes else declared_size
        result.append((name, dtype, tuple(formula(d, meaning) if isinstance(d, str) else d for d in given[name])))
    if unknown := [n for n in dims if n not in symbols and n not in sizes and n not in others]:
        listed = ", ".join(symbols) or "none: all its shapes are fixed"
        raise InputError(f"the model has no dim `{unknown[0]}`", hint=f"its symbolic dims are {listed}")
    for d, size in sizes.items():
        if d in dims and d not in symbols and dims[d] != size:
            raise InputError(f"dim `{d}` is given as {dims[d]}, and as {size} by a shape")
    return result


def size_in(given: Range, name: str, symbol: str) -> Dim:
    """The size of a dim for which a range is given, a variable `symbol` where it stays free. Raises `InputError` for other text."""
    match given:
        case int(size) if size >= 0 and not isinstance(size, bool):
            return size
        case tuple((int(lo), int(hi))) if 0 <= lo <= hi:
            return lo if lo == hi else dim(symbol, lo, hi)
        case list(exact) if _are_sizes(exact):
            return dim(symbol, 1, LARGEST, tuple(sorted({*exact})))
    hint = f"an integer, a pair (lowest, highest), or a list of up to {MAX_EXACT} sizes that get code of their own"
    raise InputError(f"dim `{name}` is given as {given!r}", hint=hint)


def _are_sizes(given: list[int]) -> bool:
    return 0 < len(given) <= MAX_EXACT and all(type(n) is int and 1 <= n <= LARGEST for n in given)


def formula(text: str, size_of: Callable[[str], Dim]) -> Dim:
    """The size that a name or a formula of names, integers, `+ - * //` and parentheses stands for. Text that is not a formula is a name."""
    try:
        named = {name: dim(name) for name in re.findall(r"[A-Za-z_][\w.]*", text)}
        found = parse_expr(text, named) if len(text) <= MAX_FORMULA else dim(text)
    except TcompError:
        return size_of(text)
    parts = [*walk(found)]
    divided = all(e.args[1].op == "const" and e.args[1].attr >= 1 for e in parts if e.op == "floordiv")
    sized = divided and all(e.op in OPERATIONS and e.dtype == INDEX for e in parts)
    if not sized or found.op == "var" or re.fullmatch(r"[-\s\d]*", text):
        return size_of(text)
    return as_dim(substitute(found, {v: as_expr(size_of(v.name)) for v in variables(found)}))
