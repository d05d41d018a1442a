"""Programs of one's own as Python functions on arrays: tensor expressions by their default schedule, or any schedule or kernel as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, overload

import numpy as np

from tcomp.backends import Backend, backend_of
from tcomp.backends.kernel import compile_loops
from tcomp.errors import InputError, ScheduleError, TargetError
from tcomp.ir.dims import bind_dims
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Expr, const, dim, substitute
from tcomp.ir.graph import KERNEL, Graph, Node, Value
from tcomp.ir.loops import Kernel
from tcomp.ir.polyhedral.in_range import quick_kernel, safe_kernel, safe_tensors
from tcomp.ir.simplify import prove
from tcomp.ir.te import Tensor
from tcomp.options import CompileOptions
from tcomp.pipeline import package
from tcomp.runtime import LoadedModel, Module
from tcomp.schedules.index_checks import checked_first
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule, inputs_and_outputs
from tcomp.target import Target

MAX_SHAPES = 256  # combinations of shapes and sizes that an `InPlace` remembers, of some hundred bytes each


AnyTarget = Target | Backend | str | None


@overload
def build(program: Schedule | Kernel, target: AnyTarget = None, threads: int | None = None, assume: Sequence[Expr] = ()) -> InPlace: ...
@overload
def build(
    program: Tensor | Sequence[Tensor], target: AnyTarget = None, threads: int | None = None, assume: Sequence[Expr] = ()
) -> Computed: ...
def build(program: Any, target: AnyTarget = None, threads: int | None = None, assume: Sequence[Expr] = ()) -> InPlace | Computed:
    """Machine code of a program, as a Python function.

    Tensor expressions (a tensor to compute, or a list of placeholders and then of tensors to compute) get the default schedule, and
    become `f(*inputs)`, which returns the results; see `Computed`. A schedule or a kernel is compiled as it is, and becomes
    `f(*arrays)` over the kernel's buffers, which it works on in place; see `InPlace`.

    `target` defaults to this machine, `threads` to all cores that the process may use. `assume` are conditions on symbolic sizes, such as
    `n <= m`, which every call checks. Raises `IRError` for what is not a program, and for an access that is outside of its array in some
    iteration; `CodegenError` for loops that the target has no code for. Accesses that are in range for some sizes or data only are checked
    in the call, which raises `OutOfRangeError`, an `IndexError`.
    """
    backend = backend_of(target)
    if isinstance(program, Schedule | Kernel):
        return InPlace(program if isinstance(program, Schedule) else Schedule(program), backend, threads, assume)
    return Computed(*inputs_and_outputs(program), backend, threads, assume)


class Built:
    """What a compiled function shows of its code: the `schedule` that it was compiled by, and texts."""

    schedule: Schedule
    backend: Backend

    def loops(self) -> str:
        """The scheduled loops."""
        return str(self.schedule.kernel)

    def source(self) -> str:
        """The code as the target's compiler gets it: LLVM IR, or CUDA C++."""
        return self._listing(0)

    def asm(self) -> str:
        """The code as assembly, or PTX."""
        return self._listing(1)

    def _listing(self, number: int) -> str:
        stages = self.backend.stages
        if number >= len(stages):
            raise TargetError(f"`{self.backend.target}` shows {', '.join(stages) or 'no texts'} of its kernels", hint="print f.loops()")
        return self.backend.listing(stages[number], self.schedule)


class Computed(Built):
    """Compiled tensor expressions. `f(*inputs)` returns the result, or a tuple of several; `f(*inputs, *outputs)` fills arrays
    for the results and returns None."""

    def __init__(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], backend: Backend, threads: int | None, assume: Sequence[Expr] = ()
    ) -> None:
        outputs, self._requirements = safe_tensors(outputs, assume)
        values = [Value(f"{n}:{t.name}", t.dtype, t.shape) for n, t in enumerate([*inputs, *outputs])]
        self._signature = f"({', '.join(map(repr, inputs))}) -> {', '.join(map(repr, outputs))}"
        self.backend, self.schedule = backend, backend.schedule(lower("kernel", inputs, outputs))
        if not backend.on_device:
            self.schedule.kernel = checked_first(self.schedule.kernel, lambda k: backend.schedule(k).kernel)
        self._inputs = len(inputs)
        self._shapes = [(t.name, t.shape) for t in inputs]
        self._fitting = set[Any]()  # shapes that satisfy the requirements
        name = ", ".join(t.name for t in outputs)
        self.module = _module(name, self.schedule, values[: len(inputs)], values[len(inputs) :], backend, threads)

    def __repr__(self) -> str:
        return f"<tcomp function {self._signature}>"

    def __call__(self, *arrays: Any) -> Any:
        if self._requirements:
            self._check([np.shape(a) for a in arrays[: self._inputs]])
        results = self.module(*arrays[: self._inputs])
        if len(arrays) <= self._inputs:
            return results
        for place, result in zip(arrays[self._inputs :], results if isinstance(results, tuple) else (results,), strict=True):
            np.copyto(place, result, casting="no")
        return None

    def _check(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises `OutOfRangeError` or `InputError` where sizes do not satisfy what the program requires of them."""
        if (key := (*shapes,)) not in self._fitting and len(shapes) == self._inputs:
            sizes = bind_dims([(*declared, shape) for declared, shape in zip(self._shapes, shapes, strict=True)])
            for r in self._requirements:
                r.check(sizes)
            if len(self._fitting) >= MAX_SHAPES:
                self._fitting.clear()
            self._fitting.add(key)


class InPlace(Built):
    """A compiled kernel. `f(*arrays)` takes one array for each of the kernel's buffers, in order, reads and writes them where they are, and
    returns None. Sizes of the kernel that no array's shape tells follow as integers, in order or by name. Arrays are C-contiguous, of the
    declared dtypes, and do not overlap where one is written; what fits not raises `InputError`. `module` is the code of most calls; sizes
    that need more guards than others have code of their own, which is made when they first come. `schedule` is that of most calls."""

    def __init__(self, schedule: Schedule, backend: Backend, threads: int | None, assume: Sequence[Expr] = ()) -> None:
        if backend.on_device:
            raise TargetError("a kernel on a GPU cannot work on NumPy arrays in place", hint="build for a CPU, or build the tensors")
        source = schedule.source
        if assume:
            source = replace(source, assumptions=(*source.assumptions, *assume))
        safe, self._requirements = safe_kernel(source)
        self.kernel = safe  # steps may look at the same memory by other shapes
        # To the artifact all buffers are inputs, of independent extents: that they fit together is checked here. Inputs without elements
        # carry the sizes, in their shapes.
        buffers = [
            Value(f"{n}:{b.name}", b.dtype, [dim(f"{n}[{axis}]", 0) if isinstance(d, Expr) else d for axis, d in enumerate(b.shape)])
            for n, b in enumerate(self.kernel.buffers)
        ]
        sizes = [Value(f"size {v.name}", "bool", (dim(v.name, 0), 0)) for v in self.kernel.scalars]

        self.backend = backend

        def made(kernel: Kernel) -> LoadedModel:
            compiled = schedule.copy() if kernel is source else Schedule(kernel).replay(schedule.trace)
            loops = checked_first(compiled.kernel, lambda k: backend.schedule(k).kernel)
            compiled.kernel = replace(loops, name="kernel")  # whatever the program is called: the name becomes a symbol
            self.schedule = compiled if not hasattr(self, "schedule") else self.schedule  # that of most calls is made first
            return _module(self.kernel.name, compiled, [*buffers, *sizes], [], backend, threads, carriers=len(sizes))

        quick, self._guarded = quick_kernel(safe), cache(lambda: made(safe))
        try:
            self.module = made(quick[0]) if quick is not None else self._guarded()
        except ScheduleError:  # the steps are those of the guarded one
            quick, self.module = None, self._guarded()
        self._condition = quick and quick[1]  # on sizes, for the module to be safe
        self._expected = [(b.name, to_numpy(b.dtype), b in self.kernel.outputs) for b in self.kernel.buffers]
        written = [n for n, (_, _, is_written) in enumerate(self._expected) if is_written]
        self._disjoint = [(w, n) for w in written for n in range(len(buffers)) if n not in written or n > w]
        self._known: dict[Any, tuple[LoadedModel, list[np.ndarray]]] = {}  # by shapes and sizes: code, and the inputs that carry the sizes

    def __repr__(self) -> str:
        return f"<tcomp function {self.kernel.name}({', '.join(map(repr, self.kernel.buffers))})>"

    def __call__(self, *arguments: Any, **sizes: int) -> None:
        count = len(self._expected)
        arrays = list(arguments[:count])
        if len(arrays) < count:
            raise InputError(f"`{self.kernel.name}` takes {count} arrays ({', '.join(x[0] for x in self._expected)}), got {len(arrays)}")
        for n, (name, dtype, written) in enumerate(self._expected):
            array = arrays[n]
            if type(array) is not np.ndarray or array.dtype is not dtype:
                array = arrays[n] = self._admitted(array, name, dtype)
            flags = array.flags
            if not (flags.c_contiguous and flags.aligned and (flags.writeable or not written)):
                dense = flags.c_contiguous and flags.aligned
                why = "it is read-only, and the kernel writes it" if dense else f"its strides are {array.strides}"
                hint = "" if flags.c_contiguous else "np.ascontiguousarray makes a copy that does"
                raise InputError(f"the array for `{name}` cannot be used in place", why=why, hint=hint)
        for one, other in self._disjoint:
            if np.may_share_memory(arrays[one], arrays[other]):
                names = f"`{self._expected[one][0]}` and `{self._expected[other][0]}`"
                raise InputError(f"the arrays for {names} overlap", why="the kernel writes one of them", hint="pass a copy")
        key = (*[a.shape for a in arrays], arguments[count:], *sizes.items())
        try:
            module, carriers = self._known[key]
        except (KeyError, TypeError):
            module, carriers = self._chosen([a.shape for a in arrays], arguments[count:], sizes)
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            self._known[key] = module, carriers
        module(*arrays, *carriers)

    def _admitted(self, array: Any, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """The same memory as a plain array of the plain dtype."""
        if not isinstance(array, np.ndarray):
            raise InputError(f"`{name}` is a {type(array).__name__}", why="the kernel works on NumPy arrays in place", hint="pass an array")
        if array.dtype != dtype:
            raise InputError(f"`{name}` has elements of type {array.dtype}", why=f"the kernel takes {dtype}", hint=f".astype(np.{dtype})")
        return np.asarray(array).view(dtype)

    def _chosen(
        self, shapes: Sequence[tuple[int, ...]], rest: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[LoadedModel, list[np.ndarray]]:
        """The code for these sizes, and arrays whose shapes tell them. Raises `InputError` where shapes contradict those declared, or a
        size is missing."""
        scalars = self.kernel.scalars
        declared = [(b.name, b.shape, shape) for b, shape in zip(self.kernel.buffers, shapes, strict=True)]
        solved = bind_dims(declared)
        unsolved = [v.name for v in scalars if v not in solved]
        positional = [name for name in unsolved if name not in named]
        if len(rest) != len(positional) or not set(named) <= set(unsolved):
            takes = f"`{self.kernel.name}` takes " + ("the sizes " + ", ".join(unsolved) if unsolved else "no sizes")
            got = ", ".join([*map(repr, rest), *(f"{k}={v!r}" for k, v in named.items())]) or "none"
            raise InputError(f"{takes} behind its arrays, got {got}"[:300])
        given = {**dict(zip(positional, rest, strict=True)), **named}
        for name, value in given.items():
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 62:
                raise InputError(f"the size `{name}` is {value!r:.40}", why="sizes are integers from 0 to 2^62")
        known = bind_dims(declared, {v: solved[v] if v in solved else int(given[v.name]) for v in scalars})
        for r in self._requirements:
            r.check(known)
        quick = self._condition is None or prove(substitute(self._condition, {v: const(n) for v, n in known.items()}))
        return self.module if quick else self._guarded(), [np.empty((known[v], 0), np.bool_) for v in scalars]


def _module(
    name: str, schedule: Schedule, inputs: Sequence[Value], outputs: Sequence[Value], backend: Backend, threads: int | None,
    carriers: int = 0,
) -> LoadedModel:  # fmt: skip
    """A module of one kernel, called `name` in messages; the last `carriers` inputs are not among its buffers."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    node = Node(KERNEL, inputs[: len(inputs) - carriers], outputs, {}, name, (Graph("kernel", inputs, outputs, ()),))
    kernels = {node: compile_loops(schedule, backend)}
    artifact = package(Graph("program", inputs, outputs, (node,)), kernels, CompileOptions(backend, threads=threads))
    return Module.load(artifact, threads=threads)
