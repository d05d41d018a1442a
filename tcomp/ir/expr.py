"""Scalar expressions: the one language of TE bodies, loop bodies, index arithmetic and symbolic dims.

An `Expr` is immutable and hash-consed: structurally equal expressions are the same object, so `is`, `==` and dict lookup
compare structure at the price of a pointer. (Use `equal`, `not_equal`, `<`, ... to build comparisons that are computed.)

    op          args                attr                   meaning
    const       -                   the value              a literal of `dtype`
    var         -                   VarInfo                loop variable, axis or symbolic dim, with its range
    add ... ne  a, b                -                      arithmetic, bitwise and comparison operators (`BINARY`)
    select      cond, a, b          -                      cond ? a : b; only the chosen side need be defined
    cast        a                   -                      conversion to `dtype` (float -> int truncates and saturates)
    bitcast     a                   -                      the same bits read as `dtype`
    fma         a, b, c             -                      a * b + c rounded once
    ldexp       a, n                -                      a * 2 ** n rounded once; n is a float with the value of an integer
    checked     i, n, given         -                      i; where not 0 <= i < n, the run ends with an error about the index `given`
    exp ...     a                   -                      elementary functions (`UNARY`)
    read        indices...          Tensor or Buffer       one element
    reduce      body                (Reducer, axes)        reduction of `body` over the axes, the last axis fastest

Integer `floordiv`/`mod` round towards minus infinity (index arithmetic); `truncdiv`/`truncmod` towards zero (C, ONNX).
Integer arithmetic wraps around. `min`/`max` return NaN when either side is NaN.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tcomp.errors import IRError
from tcomp.ir.dtypes import NARROW, dtype_name, integer_range, is_float, is_integer
from tcomp.ir.scalar_operators import (
    ARITHMETIC,
    ARITY,
    BINARY,
    COMPARISON,
    PREDICATES,
    UNARY,
    Bounds,
    binary_bounds,
    fold_binary,
    hull,
    numpy_operator,
    wrap,
)

INDEX = "int64"  # dtype of loop variables, indices and dims
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VarInfo:
    """Identity of a variable: name and inclusive range; `hi` is None when unbounded.

    `extent`, where given, is a symbolic size with 0 <= var < extent (loop variables of loops of symbolic size). `source` says how a size
    that follows from no shape is computed before a run. `exact` are likely values of a size, for which kernels are specialised; they do not
    change the meaning of a program."""

    name: str
    lo: int | None
    hi: int | None
    extent: Expr | None = None
    source: Source | None = None
    exact: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a symbolic size that follows from no shape: `value`, an expression of other sizes; or, where that is None, element
    number `element` (row-major) of input number `input`, which has elements of type `dtype`. `what` names the size in messages: a run whose
    inputs give it a value outside of its range is refused."""

    value: Expr | None = None
    input: int = 0
    element: int = 0
    dtype: str = "int64"
    what: str = ""


def _infix(op: str) -> tuple[Callable[[Expr, ExprLike], Expr], Callable[[Expr, ExprLike], Expr]]:
    """The method of the left operand, and that of the right one."""
    return lambda left, right: binary(op, left, right), lambda right, left: binary(op, left, right)


def _prefix(op: str) -> Callable[[Expr], Expr]:
    return lambda self: unary(op, self)


class Expr:
    """A node of a scalar expression. Made by the functions of this module, never by calling the class."""

    __slots__ = ("_bounds", "_reads", "_variables", "args", "attr", "dtype", "op")
    op: str
    dtype: str
    args: tuple[Expr, ...]
    attr: Any
    _bounds: Bounds | None  # these three are computed when first asked for
    _reads: tuple[Expr, ...] | None
    _variables: tuple[Expr, ...] | None

    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __floordiv__, __rfloordiv__ = _infix("floordiv")
    __mod__, __rmod__ = _infix("mod")
    __and__, __rand__ = _infix("and")
    __or__, __ror__ = _infix("or")
    __lt__, __gt__ = _infix("lt")
    __le__, __ge__ = _infix("le")
    __pow__, __rpow__ = _infix("pow")
    __xor__, __rxor__ = _infix("xor")
    __lshift__, __rlshift__ = _infix("shl")
    __rshift__, __rrshift__ = _infix("shr")
    __neg__, __abs__, __invert__ = _prefix("neg"), _prefix("abs"), _prefix("not")

    def __bool__(self) -> bool:
        if self.op == "const":
            return bool(self.attr)
        why = "Python's `if`, `and`, `or`, `not` ask for one now, the value is known only when the program runs"
        hint = "use te.select(cond, a, b) and the operators &, |, ~"
        raise IRError("an expression has no truth value while the program is being written", where=str(self), why=why, hint=hint)

    def __index__(self) -> int:
        if self.op == "const" and not is_float(self.dtype):
            return int(self.attr)
        raise IRError("a symbolic expression was used where an integer is needed", where=str(self))

    def __float__(self) -> float:
        if self.op == "const":
            return float(self.attr)
        hint = "use the functions of te (te.exp) or of NumPy (np.exp) in the place of those of math"
        raise IRError("an expression was used where Python needs a number", where=str(self), hint=hint)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """NumPy's functions of expressions are expressions."""
        if not all(isinstance(x, Expr | int | float) or (hasattr(x, "item") and x.ndim == 0) for x in operands):
            return NotImplemented  # of a tensor, which answers itself; of an array
        numbers = [x.item() if hasattr(x, "item") else x for x in operands]
        return operation(numpy_operator(ufunc, method, options), *numbers)

    def __str__(self) -> str:
        from tcomp.ir.text.printer import Printer  # it prints, and imports, what is defined here

        return Printer().expression(self)

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and unpickling must go through the intern table, or identity would no longer be equality.
        if self.op == "var":
            v = self.attr
            return var, (v.name, v.lo, v.hi, self.dtype, v.extent, v.source, v.exact)
        return _make, (self.op, self.dtype, self.args, self.attr)

    def __deepcopy__(self, memo: object) -> Expr:
        return self  # immutable; copying operand by operand would recurse as deep as the expression

    @property
    def name(self) -> str:
        """The name of a variable."""
        assert self.op == "var"
        return str(self.attr.name)


ExprLike = Expr | int | float | bool
Dim = int | Expr  # an extent: a plain int where known, else an expression over symbolic dims

_interned: dict[tuple[Any, ...], Expr] = {}  # operands before users
_adding = threading.RLock()  # held while the table changes; looking up a node that exists needs no lock
_FEWEST_TO_DROP = 1 << 16  # nodes in the table before it is worth looking for those that nobody uses any more
_drop_at = _FEWEST_TO_DROP


def _references(table: Mapping[Any, Expr], key: Any) -> int:
    """How many references there are to a node in a table."""
    return sys.getrefcount(table[key])


_ALONE = _references({0: object.__new__(Expr)}, 0)  # where nobody but the table has one


def _make(op: str, dtype: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
    # Floats are keyed by their bits: 0.0 == -0.0 and nan != nan would break "identity is equality"; dtypes tell True, 1 and 1.0 apart.
    key = (op, dtype, args, attr.hex() if isinstance(attr, float) else attr)
    return _add(key, op, dtype, args, attr) if (found := _interned.get(key)) is None else found


def _add(key: tuple[Any, ...], op: str, dtype: str, args: tuple[Expr, ...], attr: Any) -> Expr:
    """A new node, unless another thread has just made it."""
    node = object.__new__(Expr)
    node.op, node.dtype, node.args, node.attr = op, dtype, args, attr
    node._bounds = node._reads = node._variables = None
    with _adding:
        if len(_interned) >= _drop_at:
            _drop_unused()
        return _interned.setdefault(key, node)


def _drop_unused() -> None:
    """Forget the nodes that the table alone holds, users before their operands. (Weak references would do so at once, and take longer than
    all else that making a node takes.)"""
    global _drop_at
    dropped: dict[tuple[Any, ...], Expr] = {}
    with _adding:
        keys = [*_interned]
        while keys:
            key = keys.pop()  # a key has references to operands
            if _references(_interned, key) == _ALONE:
                dropped[key] = _interned.pop(key)
                if _references(dropped, key) > _ALONE:  # another thread has found it in between
                    _interned[key] = dropped[key]
                del dropped[key]
        _drop_at = max(_FEWEST_TO_DROP, 2 * len(_interned))


# ---------------------------------------------------------------- construction


def const(value: Any, dtype: Any = INDEX) -> Expr:
    """A literal. Integers are wrapped to the range of `dtype`; `value` may be a Python or NumPy scalar. Those of narrow types are the
    `bitcast` of one."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63 and dtype == INDEX:
        return _make("const", INDEX, (), value)
    dtype = dtype_name(dtype)
    if dtype in NARROW:
        from tcomp.ir import narrow  # written in expressions

        return narrow.literal(value, dtype)
    return _make("const", dtype, (), float(value) if is_float(dtype) else bool(value) if dtype == "bool" else wrap(int(value), dtype))


def var(
    name: str,
    lo: int | None = None,
    hi: int | None = None,
    dtype: str = INDEX,
    extent: Expr | None = None,
    source: Source | None = None,
    exact: tuple[int, ...] = (),
) -> Expr:
    """A variable with an inclusive integer range."""
    if (found := _interned.get(key := ("var", dtype, name, lo, hi, extent, source, exact))) is None:
        return _add(key, "var", dtype, (), VarInfo(name, lo, hi, extent, source, exact))
    return found


def loop_var(name: str, extent: Dim) -> Expr:
    """A variable that runs over 0 <= var < extent."""
    hi, symbolic = bounds(extent)[1], extent if isinstance(extent, Expr) and extent.op != "const" else None
    return var(name, 0, None if hi is None else max(hi, 0) - 1, extent=symbolic)


def dim(name: str, lo: int = 1, hi: int | None = None, exact: tuple[int, ...] = ()) -> Expr:
    """A symbolic size with an inclusive range, to be used in shapes. Kernels have code of their own for `exact` sizes."""
    return var(name, lo, hi, exact=exact)


def as_expr(value: ExprLike, dtype: str = INDEX) -> Expr:
    """Python numbers become constants of `dtype`; expressions pass through."""
    return value if isinstance(value, Expr) else const(value, dtype)


def binary(op: str, a: ExprLike, b: ExprLike) -> Expr:
    """`a op b`; Python numbers take the dtype of the other side. Raises `IRError` when dtypes differ."""
    if not isinstance(a, Expr):
        a = const(a, b.dtype if isinstance(b, Expr) else INDEX)
    if not isinstance(b, Expr):
        b = const(b, a.dtype)
    if a.dtype != b.dtype:
        raise IRError(f"`{op}` of {a.dtype} and {b.dtype}", where=f"{a}  and  {b}", hint="insert te.cast(x, dtype)")
    if a.dtype in NARROW:
        raise _no_arithmetic(op, a.dtype)
    dtype = "bool" if op in COMPARISON else a.dtype
    if a is b or a.op == "const" or b.op == "const":
        if a.op == b.op == "const" and (folded := fold_binary(op, a.attr, b.attr, a.dtype)) is not None:
            return const(folded, dtype)
        if (same := _identity(op, a, b)) is not None:
            return same
    return _make(op, dtype, (a, b))


def _no_arithmetic(op: str, dtype: str) -> IRError:
    hint = "compute with te.cast(x, dtype) in a wider type, and cast the result"
    return IRError(f"`{op}` of {dtype}", why="elements of narrow types are stored, moved and converted, not computed with", hint=hint)


def _identity(op: str, a: Expr, b: Expr) -> Expr | None:
    """Identities that hold bit for bit for every value, NaN and -0.0 included, of equal operands or constants."""
    exact, same = not is_float(a.dtype), a is b
    left, right = (e.attr if e.op == "const" else None for e in (a, b))
    match op:
        case "add" | "sub" if right == 0 and exact:
            return a
        case "add" if left == 0 and exact:
            return b
        case "sub" if same and is_integer(a.dtype):
            return const(0, a.dtype)
        case "mul" | "div" | "floordiv" | "truncdiv" if right == 1 and a.dtype != "bool":
            return a
        case "mul" if left == 1 and a.dtype != "bool":
            return b
        case "mul" if exact and 0 in (left, right):
            return const(0, a.dtype)
        case "mod" | "truncmod" if right == 1 and exact and a.dtype != "bool":
            return const(0, a.dtype)
        case "min" | "max" | "and" | "or" if same:
            return a
        case "and" | "or" if a.dtype == "bool" and "const" in (a.op, b.op):
            known, other = (a, b) if a.op == "const" else (b, a)
            return other if known.attr == (op == "and") else known
        case "lt" | "le" | "eq" | "ne" if same and exact:
            return const(op in ("le", "eq"), "bool")
    return None


def unary(op: str, a: Expr) -> Expr:
    """An elementary function or sign operator; `PREDICATES` give bool, all others keep the dtype."""
    if op not in UNARY:
        raise IRError(f"unknown function `{op}`")
    if a.dtype in NARROW:
        raise _no_arithmetic(op, a.dtype)
    if a.op == "const" and (op == "neg" or (op == "not" and a.dtype == "bool")):
        return const(-a.attr if op == "neg" else not a.attr, a.dtype)
    if not is_float(a.dtype) and (op in PREDICATES or op in ("floor", "ceil", "round", "trunc")):
        return const(False, "bool") if op in PREDICATES else a
    return _make(op, "bool" if op in PREDICATES else a.dtype, (a,))


def select(cond: ExprLike, a: ExprLike, b: ExprLike) -> Expr:
    """`a` where `cond`, else `b`. The side not chosen may be undefined (an out-of-range read): it is not evaluated."""
    cond = as_expr(cond, "bool")
    if not isinstance(a, Expr):
        a = as_expr(a, b.dtype if isinstance(b, Expr) else INDEX)
    b = as_expr(b, a.dtype)
    if cond.dtype != "bool" or a.dtype != b.dtype:
        raise IRError(f"select of ({cond.dtype}, {a.dtype}, {b.dtype})", where=f"select({cond}, {a}, {b})", hint="insert te.cast")
    if cond.op == "const":
        return a if cond.attr else b
    return a if a is b else _make("select", a.dtype, (cond, a, b))


def select_where(conditions: Sequence[Expr], a: Expr, b: Expr) -> Expr:
    """`a` where all conditions hold, else `b`, with a select for each of the `nested` conditions."""
    for condition in reversed(nested(conditions)):
        a = select(condition, a, b)
    return a


def cast(a: ExprLike, dtype: Any) -> Expr:
    """Conversion. float -> integer truncates towards zero (out of range saturates, NaN gives 0); to bool tests != 0. From and to narrow
    types as `narrow.convert` says, by simpler operations."""
    dtype = dtype_name(dtype)
    a = as_expr(a, dtype)
    if a.dtype == dtype:
        return a
    if dtype in NARROW or a.dtype in NARROW:
        from tcomp.ir import narrow  # written in expressions

        return narrow.convert(a, dtype)
    if a.op == "const" and (not is_integer(dtype) or not is_float(a.dtype)):
        return const(a.attr != 0 if dtype == "bool" else a.attr, dtype)
    return _make("cast", dtype, (a,))


def bitcast(a: Expr, dtype: str) -> Expr:
    """The same bits as another type of the same width."""
    if a.op == "bitcast" and a.dtype in NARROW:
        (a,) = a.args
    return a if a.dtype == dtype else _make("bitcast", dtype, (a,))


def checked(index: Expr, extent: Dim, given: Expr | None = None) -> Expr:
    """`index`, an int64; the run ends with an error about the index `given` (default: the same) where it is not in 0 <= index < extent.

    Nothing else follows from the check: what must not be accessed out of range is clamped as well. An error about a `given` that is in
    range is one about a division by zero (see `tcomp.ops.elementwise.divisor`).
    """
    n, (lo, hi) = as_expr(extent), bounds(index)
    least = bounds(n)[0]
    if lo is not None and lo >= 0 and hi is not None and least is not None and hi < least:
        return index
    return _make("checked", INDEX, (index, n, index if given is None else given))


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c with a single rounding."""
    return _make("fma", a.dtype, (a, b, c))


def ldexp(a: Expr, n: Expr) -> Expr:
    """a * 2 ** n with a single rounding."""
    return _make("ldexp", a.dtype, (a, n))


def binary_function(op: str, what: str) -> Callable[[ExprLike, ExprLike], Expr]:
    """The function of two operands that applies `op`; `what` is its docstring."""

    def function(a: ExprLike, b: ExprLike) -> Expr:
        return binary(op, a, b)

    function.__doc__ = what
    return function


equal = binary_function("eq", "a == b, as an expression.")
not_equal = binary_function("ne", "a != b, as an expression.")
minimum = binary_function("min", "The smaller one; NaN if one is.")
maximum = binary_function("max", "The larger one; NaN if one is.")


def read(source: Any, indices: Sequence[ExprLike]) -> Expr:
    """One element of a TE tensor or of a loop-program buffer; indices of other integer types are cast to `INDEX`."""
    args = tuple(cast(as_expr(i), INDEX) for i in indices)
    if len(args) != len(source.shape):
        raise IRError(f"`{source.name}` has {len(source.shape)} dimensions and was indexed with {len(args)}")
    return _make("read", source.dtype, args, source)


def reduce(reducer: Any, body: Expr, axes: Sequence[Expr]) -> Expr:
    """The reduction of `body` by a `tcomp.ir.reducers.Reducer` over the axes, the last axis fastest."""
    return _make("reduce", body.dtype, (body,), (reducer, tuple(axes))) if axes else body


def row_major(indices: Sequence[ExprLike], shape: Sequence[Dim]) -> Expr:
    """The position of an element among those of a dense array."""
    position = const(0)
    for i, n in zip(indices, shape, strict=True):
        position = position * n + i
    return position


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Conjunction; True when empty."""
    return functools.reduce(operator.and_, conditions, const(True, "bool"))


def conjuncts(e: Expr) -> list[Expr]:
    """The conditions that a condition is the conjunction of."""
    found, stack = list[Expr](), [e]
    while stack:
        part = stack.pop()
        if part.op == "and" and part.dtype == "bool":
            stack += part.args[::-1]
        else:
            found.append(part)
    return found


def nested(conditions: Sequence[Expr]) -> list[Expr]:
    """Conditions to be tested one inside the other, outermost first, that hold together where all of these hold.

    The first joins all conditions without reads. Those with reads follow, as their indices may be in range only where the others hold.
    """
    single = [c for condition in conditions for c in conjuncts(condition)]
    plain = all_of([c for c in single if not reads(c)])
    return [plain, *(c for c in single if reads(c))]


# ---------------------------------------------------------------- traversal


def operation(op: str, *args: Any) -> Expr:
    """The operator `op`, one of `ARITY`, applied to as many operands."""
    if op in BINARY or op in UNARY:
        return binary(op, *args) if op in BINARY else unary(op, *args)
    if op == "checked":
        return checked(*args)
    return (select if op == "select" else fma if op == "fma" else ldexp)(*args)


def with_args(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """`e` with other operands; constants are folded again."""
    if args == e.args:
        return e
    if e.op in ARITY:
        return operation(e.op, *args)
    if e.op == "bitcast":
        return bitcast(args[0], e.dtype)
    return cast(args[0], e.dtype) if e.op == "cast" else _make(e.op, e.dtype, args, e.attr)


def postorder(roots: Sequence[T], operands: Callable[[T], Sequence[T]]) -> Iterator[T]:
    """All nodes reachable from the roots, each once, operands before users (depth-first). `operands` is called when a node is reached."""
    seen: set[T] = set()
    stack: list[Any] = [*reversed(roots)]
    while stack:
        node = stack.pop()
        if node is _READY:
            yield stack.pop()
        elif node not in seen:
            seen.add(node)
            if inside := operands(node):
                stack += (node, _READY)
                stack += inside[::-1]
            else:
                yield node


_READY = object()  # on the stack of `postorder`: the operands of the node below have been passed


def walk(*roots: Expr, operands: Callable[[Expr], Sequence[Expr]] = operator.attrgetter("args")) -> Iterator[Expr]:
    """Every distinct sub-expression once, operands before users. `operands` says which ones are entered."""
    return postorder(roots, operands)


def value_operands(e: Expr) -> tuple[Expr, ...]:
    """The operands whose values count: indices of reads do not."""
    return () if e.op == "read" else e.args


def written_size(e: Expr) -> tuple[int, int]:
    """(operators, depth) of an expression written out as a tree, where what is shared counts each time."""
    found: dict[Expr, tuple[int, int]] = {}
    for x in walk(e):
        operands = [found[a] for a in x.args]
        found[x] = 1 + sum(size for size, _ in operands), 1 + max((depth for _, depth in operands), default=0)
    return found[e]


def needed_operands(e: Expr) -> list[Expr]:
    """The sub-expressions of `e` that are evaluated whenever it is, operands before users; without `e` itself.

    Sides of selects are left out, and so are the indices of reads.
    """
    return [*walk(e, operands=lambda x: x.args[:1] if x.op == "select" else () if x.op == "read" else x.args[::-1])][:-1]


def rewrite(e: Expr, rule: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None) -> Expr:
    """Bottom-up: operands first, then `rule` on the rebuilt node (None keeps it). Shared sub-expressions are rewritten once; those in
    `memo` are replaced by their value there."""
    memo = {} if memo is None else memo
    if (known := memo.get(e)) is not None:
        return known
    stack = [e]
    while stack:
        node = stack[-1]
        if node not in memo:
            args, rebuilt = node.args, node
            if args:
                if missing := [arg for arg in args if arg not in memo]:
                    stack.extend(reversed(missing))
                    continue
                rebuilt = with_args(node, tuple([memo[arg] for arg in args]))
            replaced = rule(rebuilt)
            memo[node] = rebuilt if replaced is None else replaced
        stack.pop()
    return memo[e]


def substitute(e: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Replace variables (or whole sub-expressions), all at once."""
    if not any(v in mapping for v in variables(e)) and all(key.op == "var" for key in mapping):
        return e
    return rewrite(e, lambda node: node, dict(mapping))


def variables(*roots: Expr) -> tuple[Expr, ...]:
    """Free and bound variables, in order of first use."""
    if len(roots) != 1:
        return tuple(dict.fromkeys(v for root in roots for v in variables(root)))
    (root,) = roots
    if root.op == "var":
        return roots  # it does not hold itself: a cycle would keep it alive
    if root._variables is None:
        root._variables = tuple([e for e in walk(root, operands=_variables_or_args) if e.op == "var"])
    return root._variables


def with_sources(sizes: Iterable[Expr], known: Container[Expr] = ()) -> list[Expr]:
    """Sizes in topological order: each after those that it is computed from (see `Source`). `known` ones, and what only they need, are left
    out."""

    def sources(v: Expr) -> tuple[Expr, ...]:
        return () if v in known or v.attr.source is None or v.attr.source.value is None else variables(v.attr.source.value)

    return [v for v in postorder([*sizes], sources) if v not in known]


def _variables_or_args(e: Expr) -> tuple[Expr, ...]:
    return e.args if e._variables is None else e._variables


def free_variables(root: Expr, memo: dict[Expr, frozenset[Expr]] | None = None) -> frozenset[Expr]:
    """The variables that an expression depends on: those that no reduction inside binds. `memo` keeps those of its sub-expressions."""
    memo = {} if memo is None else memo
    if root not in memo:
        for e in walk(root):
            if e not in memo:
                inside = frozenset((e,)) if e.op == "var" else frozenset[Expr]().union(*(memo[a] for a in e.args))
                memo[e] = inside.difference(e.attr[1]) if e.op == "reduce" else inside
    return memo[root]


def with_extents(*roots: Expr) -> list[Expr]:
    """All variables, those in the extents of variables included."""
    found: dict[Expr, None] = {}
    todo = list(roots)
    while todo:
        new = [v for v in variables(todo.pop()) if v not in found]
        found |= dict.fromkeys(new)
        todo += [v.attr.extent for v in new if v.attr.extent is not None]
    return list(found)


def reads(*roots: Expr) -> tuple[Expr, ...]:
    """All distinct reads of tensors or buffers, in order of first use."""
    if len(roots) != 1:
        return tuple(dict.fromkeys(r for root in roots for r in reads(root)))
    (root,) = roots
    if root._reads is None:
        root._reads = tuple([e for e in walk(*root.args) if e.op == "read"])
    return (*root._reads, root) if root.op == "read" else root._reads


# ---------------------------------------------------------------- ranges


def bounds(e: Dim) -> Bounds:
    """The inclusive range of an integer expression, derived from the ranges of its variables; cached on the node."""
    if not isinstance(e, Expr):
        return e, e
    if e._bounds is None:
        ready = all(a._bounds is not None for a in _ranged(e))
        for x in (e,) if ready else walk(e, operands=_ranged):  # operands first: no recursion along a deep expression
            if x._bounds is None:
                x._bounds = _within_type(_bounds_of(x), x.dtype)
        assert e._bounds is not None
    return e._bounds


def _ranged(e: Expr) -> tuple[Expr, ...]:
    """The operands whose ranges decide the range of `e`, while that is not known."""
    return e.args if e._bounds is None and (e.op in ARITHMETIC or e.op in ("neg", "select", "cast")) else ()


def _within_type(found: Bounds, dtype: str) -> Bounds:
    """The range, widened where it exceeds that of the type: what may wrap around may be anything."""
    lo, hi = found
    if is_integer(dtype):
        least, most = integer_range(dtype)
        low, high = lo is not None and lo < least, hi is not None and hi > most
        if low or high:
            return (None if low else lo, None if high else hi) if dtype == INDEX else (least, most)
    return lo, hi


def _bounds_of(e: Expr) -> Bounds:
    if is_float(e.dtype) or e.dtype in NARROW:
        return None, None
    found: Bounds | None = None
    match e.op:
        case "const":
            return int(e.attr), int(e.attr)
        case "var":
            return e.attr.lo, e.attr.hi
        case "neg":
            found = binary_bounds("sub", (0, 0), bounds(e.args[0]))
        case "select":
            return hull(bounds(e.args[1]), bounds(e.args[2]))
        case "cast" if not is_float(e.args[0].dtype):
            (a, b), (lo, hi) = bounds(e.args[0]), integer_range(e.dtype)
            found = (a, b) if a is not None and b is not None and lo <= a and b <= hi else None
        case op if op in ARITHMETIC:
            found = binary_bounds(e.op, bounds(e.args[0]), bounds(e.args[1]))
    if found is not None:
        return found
    return (None, None) if e.dtype == INDEX else integer_range(e.dtype)


# ---------------------------------------------------------------- evaluation


def evaluate_int(e: Dim, values: Mapping[Expr, int]) -> int:
    """The value of an integer expression, given its variables. Raises `IRError` on a variable without a value."""
    if not isinstance(e, Expr):
        return e
    if (result := substitute(e, {v: const(values[v]) for v in variables(e) if v in values})).op != "const":
        raise IRError("not all variables of an integer expression are known", where=str(result))
    return int(result.attr)
