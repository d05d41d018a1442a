"""Program: the host plan of a model, which says what runs when, on which memory.

A program is a list of steps over places (`Ref`) in five memories, each an array of bytes: input number `index`, output number `index`,
"weights", "workspace", and "dims" (the symbolic sizes, int64 each in the order of `Program.dims`). Printed:

    program<n{1..1000}, m{0..}> counted (m <= n * 2) workspace n * 8 + 16 sizes (n - 4) -> ([n, 2], [m]) {
      call scale(input0[0], workspace[0]; n) @first
      if input1[0] {
        copy n * 8 bytes from workspace[0] to output0[0]
      }
      for i in 0..n while workspace[n * 8] {
        set workspace[n * 8 + 8] = i + 1
        call below(workspace[n * 8 + 8], workspace[n * 8]; 3) @again
      }
    }

The CPU's entry function (`codegen.llvm.entry`) and the launch plan of a GPU (`codegen.cuda.launch_plan`) are made from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tcomp.errors import CodegenError
from tcomp.ir.expr import Dim, Expr, as_expr, loop_var, substitute
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.printer import Printer, quoted

MEMORIES = ("input", "output", "weights", "workspace", "dims")
NUMBERED = ("input", "output")  # of these there may be several


@dataclass(frozen=True, slots=True)
class Ref:
    """A place in memory: `offset` bytes into `base`, one of `MEMORIES`; `index` is the number of an input or output, else 0.

    The offset may depend on dims and on the variables of the `Repeat`s around.
    """

    base: str
    index: int
    offset: Dim

    def __str__(self) -> str:
        return _ProgramPrinter().place(self)


@dataclass(frozen=True, slots=True)
class Call:
    """Runs a kernel. `label` names it in profiles."""

    symbol: str
    buffers: tuple[Ref, ...]
    scalars: tuple[Expr, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Runs `then` if the byte at `cond` is not 0, else `otherwise`."""

    cond: Ref
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Runs `body` with var = 0, 1, ..., trips - 1; ends early once the byte at `condition` is 0 after an iteration."""

    var: Expr
    trips: Dim
    body: tuple[Step, ...]
    condition: Ref | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies `bytes` bytes between places that do not overlap."""

    dst: Ref
    src: Ref
    bytes: Dim


@dataclass(frozen=True, slots=True)
class SetIndex:
    """Stores an int64."""

    dst: Ref
    value: Expr


Step = Call | Branch | Repeat | Copy | SetIndex


@dataclass(frozen=True, slots=True)
class Program:
    """`dims` in the order of the call's array; `workspace` in bytes; `output_shapes` in the order of the outputs. No run may happen whose
    dims make one of `sizes` (extents, and bytes of values whether they are stored or not) negative, or larger than an int64, or one of
    `checks` other than 0. The dims that are `counted`, -1 at first, are written by steps; each comes with what it never exceeds, over the
    others; what mentions them is checked after the run."""

    dims: tuple[Expr, ...]
    workspace: Dim
    output_shapes: tuple[tuple[Dim, ...], ...]
    steps: tuple[Step, ...]
    sizes: tuple[Dim, ...] = ()
    checks: tuple[Dim, ...] = ()
    counted: tuple[tuple[Expr, Dim], ...] = ()

    def __str__(self) -> str:
        return "\n".join(_ProgramPrinter().program(self))


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps and those inside them, in program order."""
    for step in steps:
        yield step
        if isinstance(step, Branch):
            yield from walk((*step.then, *step.otherwise))
        elif isinstance(step, Repeat):
            yield from walk(step.body)


def calls(steps: Sequence[Step]) -> list[Call]:
    """The kernel calls in program order: the order of the profile."""
    return [step for step in walk(steps) if isinstance(step, Call)]


def with_sizes(program: Program, values: Mapping[Expr, Expr]) -> Program:
    """The program with variables in its sizes replaced; dims stay as they are."""

    def replaced(part: Any, values: Mapping[Expr, Expr]) -> Any:
        match part:
            case Expr():
                return as_dim(substitute(part, values))
            case tuple():
                return tuple([replaced(p, values) for p in part])
            case Call(symbol, buffers, scalars, label):
                return Call(symbol, replaced(buffers, values), tuple(as_expr(replaced(e, values)) for e in scalars), label)
            case SetIndex(dst, value):
                return SetIndex(replaced(dst, values), as_expr(replaced(value, values)))
            case Repeat(var, trips, body, condition):
                extent = replaced(trips, values)
                number = loop_var(var.name, extent)
                return Repeat(number, extent, *(replaced(inside, {**values, var: number}) for inside in (body, condition)))
            case Ref() | Branch() | Copy():
                return replace(part, **{f.name: replaced(getattr(part, f.name), values) for f in fields(part)})
        return part

    return replace(program, **{f.name: replaced(getattr(program, f.name), values) for f in fields(program) if f.name != "dims"})


def refs(step: Step) -> tuple[Ref, ...]:
    """The places that a step itself, not those inside it, reads or writes."""
    match step:
        case Call(_, buffers):
            return buffers
        case Branch(cond):
            return (cond,)
        case Repeat(condition=condition):
            return () if condition is None else (condition,)
        case Copy(dst, src):
            return dst, src
        case SetIndex(dst):
            return (dst,)


def size_data(d: Dim, names: Mapping[Expr, Any], where: str) -> Any:
    """A size as JSON, which `runtime.plan` computes: a number, what `names` says of a variable, or [operator, size, size]. Raises
    `CodegenError` for any other."""
    e = as_expr(d)
    if e in names:
        return names[e]
    if e.op == "const":
        return int(e.attr)
    if e.op in ("add", "sub", "mul", "floordiv", "mod", "truncdiv", "truncmod", "min", "max"):
        return [e.op, *(size_data(a, names, where) for a in e.args)]
    raise CodegenError(f"the size {e} cannot be computed on the host", where=where)


class _ProgramPrinter(Printer):
    """Text of programs; `text.parser` reads it back."""

    sources = True

    def program(self, program: Program) -> list[str]:
        dims, shapes = self.dims(list(program.dims)), ", ".join(map(self.shape, program.output_shapes))
        sizes = f" sizes ({', '.join(map(self.size, program.sizes))})" if program.sizes else ""
        sizes += f" checks ({', '.join(map(self.size, program.checks))})" if program.checks else ""
        limits = ", ".join(f"{self.size(d)} <= {self.size(limit)}" for d, limit in program.counted)
        dims += f" counted ({limits})" if limits else ""
        head = f"program{dims} workspace {self.size(program.workspace)}{sizes} -> ({shapes}) {{"
        return [head, *self.inner(program.steps, "  "), "}"]

    def inner(self, steps: Sequence[Step], indent: str) -> list[str]:
        return [line for step in steps for line in self.step(step, indent)]

    def step(self, step: Step, indent: str) -> list[str]:
        inside = indent + "  "
        match step:
            case Call(symbol, buffers, scalars, label):
                sizes = f"; {', '.join(map(self.size, scalars))}" if scalars else ""
                return [f"{indent}call {quoted(symbol)}({', '.join(map(self.place, buffers))}{sizes}) @{quoted(label)}"]
            case Branch(cond, then, otherwise):
                other = [indent + "} else {", *self.inner(otherwise, inside)] if otherwise else []
                return [f"{indent}if {self.place(cond)} {{", *self.inner(then, inside), *other, indent + "}"]
            case Repeat(var, trips, body, condition):
                with self.bindings([(var, trips)]) as binding:
                    end = "" if condition is None else f" while {self.place(condition)}"
                    return [f"{indent}for {binding}{end} {{", *self.inner(body, inside), indent + "}"]
            case Copy(dst, src, count):
                return [f"{indent}copy {self.size(count)} bytes from {self.place(src)} to {self.place(dst)}"]
            case SetIndex(dst, value):
                return [f"{indent}set {self.place(dst)} = {self.size(value)}"]

    def place(self, ref: Ref) -> str:
        return f"{quoted(ref.base)}{ref.index if ref.base in NUMBERED else ''}[{self.size(ref.offset)}]"

    def size(self, size: Dim) -> str:
        return self.term(size, 0, "") if isinstance(size, Expr) else str(size)
