"""Running a program at every level: reference, loops as lowered, loops as scheduled, machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import as_expr, evaluate_int
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.layout import Layout
from tcomp.ir.loops import Kernel, hoist_temporaries
from tcomp.ir.verify.loops import verify_kernel
from tcomp.target import Target
from tests.codegen.jit import BODY, HOST, PARALLEL_FOR, compile_kernel
from tests.schedules.programs import Program, bound

Layouts = Sequence[Layout | None]


@PARALLEL_FOR
def parallel_for(pool: int, body: int, closure: int, extent: int) -> None:
    for begin in reversed(range(0, extent, 3)):
        BODY(body)(closure, begin, min(begin + 3, extent))


POOL = (ctypes.c_void_p * 1)(ctypes.cast(parallel_for, ctypes.c_void_p))


def expected(program: Program, seed: int = 0) -> list[np.ndarray]:
    return evaluate(program.outputs, program.arrays(seed), program.dims)


def interpreted(program: Program, kernel: Kernel, layouts: Layouts = (), seed: int = 0, shuffle: int | None = None) -> list[np.ndarray]:
    """The results of a kernel whose buffers lie in `layouts` (of inputs, then outputs). Padding of temporaries holds garbage."""
    verify_kernel(kernel)
    arrays, views = _arrays(program, kernel, layouts, seed)
    run_kernel(kernel, views, program.dims, shuffle=shuffle, garbage=True)
    return _results(program, arrays, layouts)


def native(program: Program, kernel: Kernel, layouts: Layouts = (), target: Target = HOST, threads: bool = False) -> list[np.ndarray]:
    arrays, views = _arrays(program, kernel, layouts, 0)
    kernel, temporaries = hoist_temporaries(kernel)
    places = [np.full([evaluate_int(as_expr(d), program.dims) for d in b.shape], 77).astype(to_numpy(b.dtype)) for b in temporaries]
    scalars = [program.dims[v] for v in kernel.scalars]
    compile_kernel(kernel, target)(*views.values(), *places, *scalars, pool=ctypes.addressof(POOL) if threads else None)
    return _results(program, arrays, layouts)


def _arrays(program: Program, kernel: Kernel, layouts: Layouts, seed: int) -> tuple[list[np.ndarray], dict]:
    tensors = [*program.inputs, *program.outputs]
    given = program.arrays(seed)
    physical = []
    for t, layout in zip(tensors, layouts or [None] * len(tensors), strict=True):
        layout = layout or Layout.identity(t.ndim)
        array = given[t] if t in given else np.zeros(program.shape(t), to_numpy(t.dtype))
        physical.append(np.ascontiguousarray(layout.to_physical(array)))
    return physical, bound(kernel, physical, program.dims)


def _results(program: Program, arrays: Sequence[np.ndarray], layouts: Layouts) -> list[np.ndarray]:
    tensors = [*program.inputs, *program.outputs]
    found = []
    for t, array, layout in list(zip(tensors, arrays, layouts or [None] * len(tensors), strict=True))[len(program.inputs) :]:
        found.append((layout or Layout.identity(t.ndim)).from_physical(array, program.shape(t)))
    return found
