"""Reverse mode: the adjoint of a tensor expression is a tensor expression (A. Griewank, A. Walther, Evaluating Derivatives, 2008, ch. 3).

A read `A[f(i)]` in the body of a tensor T adds, for every i, its derivative times the adjoint of T[i] to the adjoint of A at f(i). An
affine f is inverted (`polyhedral.inverse`): the adjoint of A at a place is a sum over the iterations that touch it, none or one of them
where f is injective. Else, of an index from data, it is a scatter: a loop over all i in row-major order that adds to A's adjoint.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import overload

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.dtypes import is_float
from tcomp.ir.expr import Expr, as_expr, const
from tcomp.ir.polyhedral.inverse import Piece, inverse
from tcomp.ir.simplify import same_shape, simplify
from tcomp.ir.te import Extern, Tensor
from tcomp.ir.transforms import scalar
from tcomp.ir.transforms.programs import reversed_program
from tcomp.ir.transforms.scalar import Guards
from tcomp.ir.transforms.stages import Stage, accumulator, places, require_float, results, share, stages, wide, zeros

Tensors = Tensor | Sequence[Tensor]


@overload
def vjp(outputs: Tensors, wrt: Tensor, cotangents: Tensors | None = None) -> Tensor: ...
@overload
def vjp(outputs: Tensors, wrt: Sequence[Tensor], cotangents: Tensors | None = None) -> list[Tensor]: ...
def vjp(outputs: Tensors, wrt: Tensors, cotangents: Tensors | None = None) -> Tensor | list[Tensor]:
    """Vector-Jacobian products: for each tensor of `wrt`, the derivative of sum(cotangent * output) over all outputs, as a tensor of the
    shape and dtype of that tensor; a list of them for a list.

    `outputs` and `wrt` are tensors of floats, or lists of them; `wrt` may be placeholders or anything that the outputs are computed from.
    `cotangents` are tensors like the outputs; left out, they are ones, so that the results are the gradients of a scalar output, or of the
    sum of all elements. The derivative by a tensor that no output depends on is zero.

    Equal elements share the derivative of a maximum or minimum over axes equally; conventions for other places without a derivative are
    those of `transforms.scalar`. 16-bit floats are added in float32, and rounded once for each tensor. Raises `IRError` for tensors of
    integers, and for reductions and programs whose derivative is not known.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    alone, wrt = isinstance(wrt, Tensor), [wrt] if isinstance(wrt, Tensor) else list(wrt)
    if cotangents is None:
        cotangents = [Tensor(f"{t.name}.ones", t.shape, t.dtype, places(t.shape), as_expr(1.0, t.dtype)) for t in outputs]
    cotangents = [cotangents] if isinstance(cotangents, Tensor) else list(cotangents)
    for t in (*outputs, *wrt):
        require_float(t, "the output" if t in outputs else "the variable")
    if len(cotangents) != len(outputs):
        raise IRError(f"{len(cotangents)} cotangents for {len(outputs)} outputs", hint="one for each output, in order")
    for t, c in zip(outputs, cotangents, strict=True):
        if c.dtype != t.dtype or not same_shape(c.shape, t.shape):
            raise IRError(f"the cotangent `{c!r}` is not like the output `{t!r}`", hint="same shape and dtype")
    found = results(_Adjoints(outputs, wrt, cotangents).found)
    return found[0] if alone else found


Contribution = tuple[Expr, Guards, Expr]  # a read, and its adjoint: a value where all guards hold


class _Adjoints:
    """Contributions to the adjoints of tensors, expressions over `places` of their shape, until they are added."""

    def __init__(self, outputs: Sequence[Tensor], wrt: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
        self.parts: dict[Tensor, list[Expr]] = {}
        order = list(te.tensors(outputs))
        self.active = set(wrt)
        for t in order:
            if is_float(t.dtype) and any(u in self.active for u in t.inputs):
                self.active.add(t)
        for t, c in zip(outputs, cotangents, strict=True):
            self.add(t, c[places(t.shape)])
        done: dict[Tensor, Tensor | None] = {}
        order = [t for t in order if t in self.active]
        for n, t in reversed([*enumerate(order)]):
            done[t] = adjoint = self.total(t)
            if t.extern is not None:
                if all(u.extern is not t.extern for u in order[:n]):  # all results of the program have their adjoints by now
                    self.through_program(t.extern, done)
            elif t.body is not None and adjoint is not None:
                self.through(t, adjoint)
        self.found = [done.get(t) or zeros(t.shape, t.dtype, f"{t.name}.adjoint") for t in wrt]

    def add(self, t: Tensor, part: Expr) -> None:
        self.parts.setdefault(t, []).append(part)

    def total(self, t: Tensor) -> Tensor | None:
        """The adjoint of a tensor; None where it is zero."""
        parts, at = self.parts.get(t), places(t.shape)
        if not parts:
            return None
        if len(parts) == 1 and parts[0].op == "read" and parts[0].args == at and parts[0].dtype == t.dtype:
            whole = parts[0].attr
            if isinstance(whole, Tensor) and same_shape(whole.shape, t.shape):
                return whole
        body = E.cast(functools.reduce(operator.add, map(wide, parts)), t.dtype)
        return Tensor(f"{t.name}.adjoint", t.shape, t.dtype, at, body)

    def through(self, t: Tensor, adjoint: Tensor) -> None:
        """From the adjoint of a computed tensor to those of what it reads."""
        own = stages(t)
        for stage in own:
            if any(r.attr in self.active for r in E.reads(stage.body)):
                self.active.add(stage.tensor)
        for stage in reversed(own):
            total = adjoint if stage.tensor is t else self.total(stage.tensor)
            if total is None:
                continue
            guards, factor = share(stage)
            seed = total[stage.tensor.axes]
            known = {} if stage.reducer is not None or stage.body.op == "read" else {stage.body: stage.value}
            seed = seed if factor is None else seed * factor
            found = scalar.reverse(stage.body, seed, guards, self.wanted)
            self.contribute(stage, [(read, where, _known(value, known)) for read, where, value in found])

    def wanted(self, read: Expr) -> bool:
        return read.attr in self.active

    def contribute(self, stage: Stage, found: Sequence[Contribution]) -> None:
        """The adjoints of reads, for all iterations of a stage, added to those of the tensors that it reads."""
        scattered: dict[Tensor, list[Contribution]] = {}
        for read, guards, value in found:
            a, at = read.attr, places(read.attr.shape)
            pieces = inverse(stage.axes, read.args, guards, a.shape, at)
            if pieces is None:
                scattered.setdefault(a, []).append((read, guards, value))
            for piece in pieces or ():
                self.add(a, _gathered(piece, read, at, guards, value))
        for a, parts in scattered.items():
            self.add(a, _scattered(stage, a, parts)[places(a.shape)])

    def through_program(self, program: Extern, done: dict[Tensor, Tensor | None]) -> None:
        """From the adjoints of the results of a program to those of its inputs."""
        cotangents: list[Tensor | None] = [None] * len(program.results)
        for t, adjoint in done.items():
            if t.extern is program:
                cotangents[t.index] = adjoint
        if any(c is not None for c in cotangents):
            wanted = [n for n, u in enumerate(program.inputs) if u in self.active]
            for n, adjoint in zip(wanted, reversed_program(program, wanted, cotangents), strict=True):
                self.add(program.inputs[n], adjoint[places(adjoint.shape)])


def _known(value: Expr, known: dict[Expr, Expr]) -> Expr:
    """The expression with what is stored already in the place of its computation."""
    return E.rewrite(value, lambda e: e, dict(known)) if known else value


def _gathered(piece: Piece, read: Expr, at: Sequence[Expr], guards: Guards, value: Expr) -> Expr:
    """The sum of the values of the iterations of a piece that read the element `at`."""
    known = {**piece.values, read: E.read(read.attr, at)}

    def here(e: Expr) -> Expr:
        return E.substitute(e, known)

    term = simplify(wide(here(value)))
    term = E.select_where([piece.condition, *(simplify(here(g)) for g in guards)], term, const(0.0, term.dtype))
    return te.sum(term, piece.fibre) if piece.fibre else term


def _scattered(stage: Stage, a: Tensor, parts: Sequence[Contribution]) -> Tensor:
    """The sum of the values of all iterations at the places of `a` that they read, added in row-major order of the iterations."""
    inputs: Iterable[Tensor] = dict.fromkeys(r.attr for read, guards, value in parts for r in E.reads(value, *read.args, *guards))

    def program(parameters: Sequence[L.Buffer], results: Sequence[L.Buffer]) -> L.Stmt:
        (result,), buffers = results, dict(zip(inputs, parameters, strict=True))

        def of_buffers(e: Expr) -> Expr:
            return E.rewrite(e, lambda x: E.read(buffers[x.attr], x.args) if x.op == "read" and x.attr in buffers else None)

        def one(i: tuple[Expr, ...]) -> L.Stmt:
            mapping, steps = dict(zip(stage.axes, i, strict=True)), list[L.Stmt]()
            for read, guards, value in parts:
                place = E.read(result, read.args)
                index, new, *where = (of_buffers(E.substitute(e, mapping)) for e in (place, wide(value), *guards))
                step: L.Stmt = L.store(result, index.args, index + new)
                for guard in reversed(where):
                    step = L.If(simplify(guard), step)
                steps.append(step)
            return L.block(*steps)

        clear = L.over(a.shape, lambda i: L.store(result, i, 0), "z{}".format)
        return L.block(clear, L.over([*stage.axes.values()], one, "s{}".format))

    return te.extern((a.shape, accumulator(a.dtype)), list(inputs), program, f"{a.name}.scattered")
