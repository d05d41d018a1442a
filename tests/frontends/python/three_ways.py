"""A program run as plain Python, by the interpreter, and as machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import tcomp
from tcomp.frontends.python import Program
from tcomp.ir.dims import bind_dims
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Kernel
from tcomp.ir.verify.loops import verify_kernel

Arrays = dict[str, np.ndarray]


def plain(program: Program, arrays: Arrays, numbers: Mapping[str, Any]) -> Arrays:
    copies = {name: a.copy() for name, a in arrays.items()}
    program(**copies, **{name: n for name, n in numbers.items() if name in program.parameters})
    return copies


def interpreted(kernel: Kernel, arrays: Arrays, numbers: Mapping[str, Any]) -> Arrays:
    verify_kernel(kernel)
    copies = {name: a.copy() for name, a in arrays.items()}
    run_kernel(kernel, {b: copies[b.name] for b in kernel.buffers}, {v: numbers[v.name] for v in kernel.scalars if v.name in numbers})
    return copies


def native(kernel: Kernel, arrays: Arrays, numbers: Mapping[str, Any]) -> Arrays:
    copies = {name: a.copy() for name, a in arrays.items()}
    told_by_shapes = bind_dims([(b.name, b.shape, copies[b.name].shape) for b in kernel.buffers])
    sizes = {v.name: numbers[v.name] for v in kernel.scalars if v not in told_by_shapes}
    tcomp.build(kernel, threads=1)(*(copies[b.name] for b in kernel.buffers), **sizes)
    return copies


def check(
    program: Program,
    arrays: Arrays,
    numbers: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    rtol: float = 0,
    results: Callable[[Arrays], Arrays] = lambda arrays: arrays,
) -> Kernel:
    """The results agree: exactly in the interpreter, within `rtol` in machine code (which fuses multiplications and additions)."""
    kernel = program.kernel(**(fixed or {}))
    expected = results(plain(program, arrays, numbers))
    for how, run in (("interpreter", interpreted), ("machine code", native)):
        for name, result in results(run(kernel, arrays, numbers)).items():
            np.testing.assert_allclose(result, expected[name], rtol=rtol, atol=rtol, err_msg=f"{name}, {how}")
    return kernel
