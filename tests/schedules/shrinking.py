"""Smaller programs and fewer steps that still fail in the same way, printed as a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import indent

from tcomp.errors import TcompError
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.loops import (
    Accumulate,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Stmt,
    Store,
    block,
    children,
    expressions,
    walk,
    with_children,
)
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.analysis.footprint import at_sizes
from tcomp.schedules.primitives.editing import rebind
from tcomp.schedules.trace import Step
from tests.schedules.fuzzing import Run
from tests.schedules.subject import Failure, Subject
from tests.schedules.together import run_native

ATTEMPTS = 3000


def failure(subject: Subject, steps: Sequence[Step], native: bool, opt_level: int = 0) -> Failure | None:
    run = Run(subject)
    try:
        run.repeat(steps)
    except Failure as found:
        return found
    return run_native([run.case], opt_level)[0].get(0) if native else None


class Shrinker:
    """Greedy: the first smaller case that fails alike is taken, until none does."""

    def __init__(self, subject: Subject, steps: Sequence[Step], found: Failure) -> None:
        self.subject, self.steps, self.found = subject, list(steps), found
        self.native = "machine code" in found.kind or "LLVM" in found.kind or "code generation" in found.kind
        self.attempts = 0

    def shrink(self) -> None:
        while self.attempts < ATTEMPTS and (self._drop_steps() or self._simplify()):
            pass

    def _fails(self, subject: Subject, steps: Sequence[Step]) -> bool:
        self.attempts += 1
        try:
            verify_kernel(subject.kernel)
            _ = subject.plain
        except (TcompError, ValueError):
            return False
        found = failure(subject, steps, self.native)
        if found is None or found.kind != self.found.kind:
            return False
        self.subject, self.steps, self.found = subject, list(steps), found
        return True

    def _drop_steps(self) -> bool:
        return any(self._fails(self.subject, self.steps[:n] + self.steps[n + 1 :]) for n in reversed(range(len(self.steps))))

    def _simplify(self) -> bool:
        kernel, dims = self.subject.kernel, self.subject.dims
        for v, n in dims.items():
            for smaller in range(v.attr.lo or 0, n):
                if self._fails(Subject(kernel, {**dims, v: smaller}), self.steps):
                    return True
        if dims and self._fails(Subject(replace(at_sizes(kernel, dims), scalars=()), {}), self.steps):
            return True
        return any(self._fails(Subject(smaller, dims), self.steps) for smaller in smaller_kernels(kernel) if self.attempts < ATTEMPTS)

    def test(self, name: str) -> str:
        """A test for test_regressions.py."""
        kernel, steps = (indent(text, 8 * " ") for text in (str(self.subject.kernel), "\n".join(map(str, self.steps))))
        sizes = "".join(f"        {v.name}={n},\n" for v, n in self.subject.dims.items())
        quotes = '"""'
        return (
            f"def test_{name}() -> None:  # {self.found.kind}\n    check(\n        {quotes}\n{kernel}\n        {quotes},\n"
            f"        {quotes}\n{steps}\n        {quotes},\n{sizes}    )\n"
        )


def smaller_kernels(kernel: Kernel) -> Iterator[Kernel]:
    for body in smaller(kernel.body):
        yield kernel.with_body(body)
    used = {b for s in walk(kernel.body) for b in _touched(s)}
    for unused in [b for b in kernel.buffers if b not in used]:
        if kernel.outputs != (unused,):
            rest = tuple(b for b in kernel.buffers if b is not unused)
            yield replace(kernel, buffers=rest, outputs=tuple(b for b in kernel.outputs if b is not unused))


def _touched(s: Stmt) -> list[Buffer]:
    own = [s.buffer] if isinstance(s, Store | Accumulate) else []
    return own + [r.attr for r in E.reads(*expressions(s))]


def smaller(s: Stmt) -> Iterator[Stmt]:
    """Statements with one thing less, the largest first."""
    match s:
        case Block(stmts):
            for n in range(len(stmts)):
                yield block(*stmts[:n], *stmts[n + 1 :])
        case For(v, extent, body, _):
            yield rebind(body, {v: as_expr(0)})
            if isinstance(extent, int):
                for n in range(1, extent):
                    w = E.loop_var(v.name, n)
                    yield replace(s, var=w, extent=n, body=rebind(body, {v: w}))
        case If(_, then, otherwise):
            yield then
            if otherwise is not None:
                yield otherwise
                yield replace(s, otherwise=None)
        case Allocate(b, body):
            if not any(b in _touched(x) for x in walk(body)):
                yield body
        case Accumulate(b, indices, value, reducer):
            yield Store(b, indices, value)
            for e in simpler(value):
                yield Accumulate(b, indices, e, reducer)
        case Store(b, indices, value):
            for e in simpler(value):
                yield Store(b, indices, e)
            for n, i in enumerate(indices):
                for e in simpler(i):
                    yield Store(b, (*indices[:n], e, *indices[n + 1 :]), value)
    inner = children(s)
    for n, child in enumerate(inner):
        for other in smaller(child):
            yield with_children(s, [*inner[:n], other, *inner[n + 1 :]])


def simpler(e: Expr) -> Iterator[Expr]:
    """One operand instead of the whole, somewhere in an expression."""
    if e.op in ("const", "var"):
        return
    if e.op != "read":
        yield from (a for a in e.args if a.dtype == e.dtype)
    if e.dtype not in ("bool", "int64"):
        yield E.const(1, e.dtype)
    for n, a in enumerate(e.args):
        for other in simpler(a):
            yield E.with_args(e, (*e.args[:n], other, *e.args[n + 1 :]))
