"""Batches: a function of tensors as one of tensors with one more axis, along which it is applied to each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.broadcasting import require_same
from tcomp.ir.expr import Dim, Expr, loop_var
from tcomp.ir.simplify import as_dim
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.text.printer import unused

Place = tuple[Tensor, int]  # a tensor with the axis of the batch, and which that is


def vmap(function: Callable[..., Any], in_axes: int | None | Sequence[int | None] = 0, out_axis: int = 0) -> Callable[..., Any]:
    """`function`, from tensors to a tensor or several, of each part of a batch: `te.vmap(f)(A, B)[n, ...]` is `f(A[n], B[n])[...]`.

    `in_axes` says which axis of each input is that of the batch (None: the input is the same for all), one for all inputs or one for each;
    `out_axis` which one it is of the results. Negative axes count from the end. Calls may be nested. Raises `IRError` where axes do not
    exist, and `SizeMismatch` where batches differ in size.
    """

    def batched(*inputs: Tensor) -> Any:
        axes = [in_axes] * len(inputs) if in_axes is None or isinstance(in_axes, int) else list(in_axes)
        if len(axes) != len(inputs):
            raise IRError(f"{len(axes)} axes for {len(inputs)} inputs of a batch", hint="in_axes: one for each, None for those without")
        places: dict[Tensor, Place] = {}
        size: Dim | None = None
        parts = list[Tensor]()
        for t, axis in zip(inputs, axes, strict=True):
            if axis is None:
                parts.append(t)
                continue
            if not -t.ndim <= axis < t.ndim:
                raise IRError(f"`{t!r}` has no axis {axis} for a batch")
            axis %= t.ndim
            if size is not None:
                require_same(size, t.shape[axis], "the size of a batch")
            size = t.shape[axis]
            parts.append(te.placeholder((*t.shape[:axis], *t.shape[axis + 1 :]), t.dtype, t.name))
            places[parts[-1]] = t, axis
        if size is None:
            raise IRError("a batch without inputs that have one", hint="in_axes=None for inputs that are the same for all parts")
        outputs = function(*parts)
        several = isinstance(outputs, tuple | list)
        found = _batched(list(outputs) if several else [outputs], places, size, out_axis)
        return tuple(found) if several else found[0]

    return batched


def _batched(outputs: Sequence[Tensor], places: dict[Tensor, Place], size: Dim, out_axis: int) -> list[Tensor]:
    programs: dict[Extern, Extern] = {}
    for t in te.tensors(outputs):
        if t in places or not any(u in places for u in t.inputs):
            continue
        if t.extern is not None:
            if t.extern not in programs:
                programs[t.extern] = _program(t.extern, places, size)
            places[t] = Tensor(t.name, (size, *t.shape), t.dtype, extern=programs[t.extern], index=t.index), 0
        else:
            places[t] = _stage(t, places, size), 0
    results = []
    for t in outputs:
        if not -t.ndim - 1 <= out_axis <= t.ndim:
            raise IRError(f"the result of a batch of `{t!r}` has no axis {out_axis}")
        at = out_axis % (t.ndim + 1)
        own, axis = places.get(t, (t, None))
        if axis == at:
            results.append(own)
            continue
        shape = (*t.shape[:at], size, *t.shape[at:])
        results.append(te.compute(shape, lambda *i, own=own, axis=axis, at=at: _read(own, axis, i[at], (*i[:at], *i[at + 1 :])), t.name))
    return results


def _read(t: Tensor, axis: int | None, part: Expr, indices: Sequence[Expr]) -> Expr:
    return E.read(t, indices if axis is None else (*indices[:axis], part, *indices[axis:]))


def _stage(t: Tensor, places: Mapping[Tensor, Place], size: Dim) -> Tensor:
    assert t.body is not None
    batch = loop_var(unused("batch", {v.name for v in (*t.axes, *E.variables(t.body))}), size)

    def rule(e: Expr) -> Expr | None:
        return _read(*places[e.attr], batch, e.args) if e.op == "read" and e.attr in places else None

    return Tensor(t.name, (size, *t.shape), t.dtype, (batch, *t.axes), E.rewrite(t.body, rule))


def _program(program: Extern, places: Mapping[Tensor, Place], size: Dim) -> Extern:
    inputs = [places.get(u, (u, None)) for u in program.inputs]
    parameters = tuple(L.Buffer(b.name, b.dtype, u.shape) for b, (u, _) in zip(program.parameters, inputs, strict=True))
    results = tuple(L.Buffer(b.name, b.dtype, (size, *b.shape)) for b in program.results)
    new = {old: (b, axis) for old, b, (_, axis) in zip(program.parameters, parameters, inputs, strict=True)}
    new |= {old: (b, 0) for old, b in zip(program.results, results, strict=True)}
    taken = {s.var.name for s in L.walk(program.body) if isinstance(s, L.For)}
    batch = loop_var(unused("batch", taken), size)

    def place(b: L.Buffer, i: tuple[Expr, ...]) -> L.Place | None:
        if b not in new:
            return None
        buffer, axis = new[b]
        return buffer, i if axis is None else (*i[:axis], batch, *i[axis:])

    body = L.For(batch, as_dim(size), L.redirect(program.body, place))
    return Extern(tuple(u for u, _ in inputs), parameters, results, body)
