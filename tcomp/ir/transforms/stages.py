"""Tensor expressions in normal form: a body is a scalar expression, or a reduction of one; reductions inside of others stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tcomp.errors import IRError
from tcomp.ir import expr as E, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Dim, Expr, as_expr, const, loop_var, select
from tcomp.ir.reducers import Reducer
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Tensor
from tcomp.ir.transforms.scalar import Guards

HALF = ("float16", "bfloat16")


@dataclass(frozen=True, eq=False, slots=True)
class Stage:
    """`tensor[own axes]` is `body`, or its reduction by `reducer` over the rest of `axes` (variables with extents)."""

    tensor: Tensor
    axes: Mapping[Expr, Dim]
    body: Expr
    reducer: Reducer | None

    @property
    def reduced(self) -> tuple[Expr, ...]:
        """The axes that are reduced."""
        return tuple(self.axes)[self.tensor.ndim :]

    @property
    def value(self) -> Expr:
        """The element of the tensor."""
        return self.tensor[self.tensor.axes]


def extent(axis: Expr) -> Dim:
    """How many values a reduction axis takes."""
    return as_dim(axis.attr.extent) if axis.attr.extent is not None else int(axis.attr.hi) + 1


def stages(t: Tensor) -> list[Stage]:
    """A computed tensor, behind the reductions inside of its body."""
    assert t.body is not None
    found = list[Stage]()
    root = t.body
    axes = dict(zip(t.axes, t.shape, strict=True))
    around = axes | {v: extent(v) for e in E.walk(root) if e.op == "reduce" for v in e.attr[1]}

    def rule(e: Expr) -> Expr | None:
        if e.op != "reduce":
            return None
        own = [v for v in E.free_variables(e) if v in around]
        own.sort(key=list(around).index)
        inner = Tensor(f"{t.name}.{e.attr[0].name}", [around[v] for v in own], e.dtype, tuple(own), e)
        found.append(Stage(inner, {v: around[v] for v in (*own, *e.attr[1])}, e.args[0], e.attr[0]))
        return inner[inner.axes]

    reducer, reduced = root.attr if root.op == "reduce" else (None, ())
    body = E.rewrite(root.args[0] if reducer else root, rule)
    return [*found, Stage(t, axes | {v: around[v] for v in reduced}, body, reducer)]


def kind(reducer: Reducer, where: str) -> str:
    """The operator of a reduction. Raises `IRError` for one of the user's own: its derivative is not known."""
    known = {"add": "sum", "mul": "prod", "min": "min", "max": "max"}
    if reducer.op not in known:
        why = "derivatives are known of sums, products, minima and maxima"
        raise IRError(f"the reduction `{reducer.name}` has no derivative", where=where, why=why, hint="write it by those")
    return known[reducer.op]


def share(stage: Stage) -> tuple[Guards, Expr | None]:
    """(guards, factor): the derivative of a reduction by its operand, 0 where a guard does not hold; no factor is 1.

    Equal extreme values share the derivative equally, as those of torch's `amax`. The derivative of a product is that of the others, zeros
    included; its own derivative (a second one) is right where no factor is 0.
    """
    t, body, reduced = stage.tensor, stage.body, stage.reduced
    if stage.reducer is None or (op := kind(stage.reducer, t.name)) == "sum":
        return (), None

    def total(reduction: te.Reduction, value: Expr, name: str) -> Expr:
        return Tensor(f"{t.name}.{name}", t.shape, value.dtype, t.axes, reduction(value, reduced))[t.axes]

    one, zero = const(1.0, body.dtype), const(0.0, body.dtype)
    if op != "prod":
        extreme = E.equal(body, stage.value)
        return (extreme,), one / total(te.sum, select(extreme, one, zero), "ties")
    is_zero = E.equal(body, zero)
    zeros, others = total(te.sum, select(is_zero, one, zero), "zeros"), total(te.prod, select(is_zero, one, body), "nonzero")
    alone = select(E.equal(zeros, one), others, zero)
    return (), select(is_zero, alone, select(E.equal(zeros, zero), others / body, zero))


def accumulator(dtype: str) -> str:
    """The type in which adjoints are added: at least float32."""
    return "float32" if dtype in HALF else dtype


def wide(value: Expr) -> Expr:
    """A value in its accumulator's type, a rounding to 16 bits at its root left out."""
    dtype = accumulator(value.dtype)
    return value.args[0] if value.op == "cast" and value.args[0].dtype == dtype and value.dtype != dtype else E.cast(value, dtype)


def places(shape: Sequence[Dim], prefix: str = "a") -> tuple[Expr, ...]:
    """Variables that run over a shape."""
    return tuple(loop_var(f"{prefix}{n}", d) for n, d in enumerate(shape))


def require_float(t: Tensor, what: str) -> None:
    """Raises `IRError` unless the tensor has floats of at least 16 bits, which alone have derivatives."""
    if not is_float(t.dtype):
        raise IRError(
            f"{what} `{t!r}` has no derivative", why=f"elements of type {t.dtype} do not vary continuously", hint="te.cast to a float"
        )


def zeros(shape: Sequence[Dim], dtype: str, name: str) -> Tensor:
    """A tensor of zeros."""
    return Tensor(name, shape, dtype, places(shape), as_expr(0.0, dtype))


def results(found: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as results of a program: computed, and each another one; what is not is copied."""
    seen, own = set[Tensor](), list[Tensor]()
    for t in found:
        copied, at = te.is_placeholder(t) or t in seen, places(t.shape)
        own.append(Tensor(t.name, t.shape, t.dtype, at, t[at]) if copied else t)
        seen.add(t)
    return own
