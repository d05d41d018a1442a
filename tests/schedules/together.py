"""Machine code of many scheduled kernels, compiled together, each called between inaccessible pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tcomp.codegen.llvm.kernel import define
from tcomp.codegen.llvm.kernel_module import KernelModule
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.errors import CodegenError
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import as_expr, evaluate_int
from tcomp.ir.loops import GPU_AXES, SERIAL, Allocate, Buffer, For, Kernel, Stmt, hoist_temporaries
from tcomp.runtime.native_code import Call
from tcomp.schedules.primitives.editing import rebuild, swap_buffer
from tests.codegen.jit import HOST, engine
from tests.runtime.guarded import between_guards
from tests.schedules.running import POOL
from tests.schedules.subject import Failure, Subject, compare

Case = tuple[Subject, Kernel]  # the kernel as scheduled


def run_native(cases: Sequence[Case], opt_level: int) -> tuple[dict[int, Failure], int]:
    """The kernels of the cases, compiled together and called: failures by position, and how many make no code."""
    module, failures, names, refused = KernelModule("fuzz", HOST), dict[int, Failure](), dict[int, str](), 0
    kernels = {n: replace(_for_cpu(kernel), name=f"kernel{n}") for n, (_, kernel) in enumerate(cases)}
    for n, kernel in kernels.items():
        try:
            _define(module, kernel)
            names[n] = kernel.name
        except CodegenError:
            refused += 1
        except Failure as failure:
            failures[n] = failure
    try:
        code = engine(compile_ir(module.text(), HOST, opt_level))
    except CodegenError as error:
        if len(cases) == 1:
            return {0: Failure("LLVM refuses the code", str(error))}, 0
        for n, case in enumerate(cases):  # to know which
            failures.update((n, failure) for failure in run_native([case], opt_level)[0].values())
        return failures, refused
    for n, name in names.items():
        try:
            _call(code.get_function_address(name), kernels[n], cases[n][0])
        except Failure as failure:
            failures[n] = failure
    return failures, refused


def _for_cpu(kernel: Kernel) -> Kernel:
    """What is meant for a GPU, in one thread."""

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, For) and s.kind in GPU_AXES:
            return replace(s, kind=SERIAL, body=rebuild(s.body, edit))
        if isinstance(s, Allocate) and s.buffer.scope == "shared":
            new = Buffer(s.buffer.name, s.buffer.dtype, s.buffer.shape)
            return Allocate(new, rebuild(swap_buffer(s.body, s.buffer, new, lambda indices: indices), edit))
        return None

    return hoist_temporaries(kernel.with_body(rebuild(kernel.body, edit)))[0]


def _define(module: KernelModule, kernel: Kernel) -> None:
    try:
        define(module, kernel)
    except CodegenError:
        raise
    except Exception as error:
        raise Failure(f"{type(error).__name__} in code generation", str(error)) from error


def _call(address: int, kernel: Kernel, subject: Subject) -> None:
    """Two calls: every array ends at an inaccessible page, then starts at one."""
    dims, arrays = subject.dims, subject.arrays()
    temporaries = kernel.buffers[len(arrays) :]
    arrays += [np.full([evaluate_int(as_expr(d), dims) for d in b.shape], 85).astype(to_numpy(b.dtype)) for b in temporaries]
    names = {f"{n}:{b.name}": np.ascontiguousarray(a) for n, (b, a) in enumerate(zip(kernel.buffers, arrays, strict=True))}
    types = [ctypes.c_void_p] * (1 + len(arrays)) + [ctypes.c_int64] * len(kernel.scalars)
    count = len(kernel.buffers) - len(temporaries)
    for at_start in (False, True):
        with between_guards(names, at_start) as (placed, faults):
            places, call = [a.ctypes.data for a in placed], ctypes.byref(Call(pool=ctypes.addressof(POOL)))
            ctypes.CFUNCTYPE(None, *types)(address)(call, *places, *(dims[v] for v in kernel.scalars))
            found = [a.reshape(-1).copy() for b, a in zip(kernel.buffers[:count], placed, strict=False) if b in kernel.outputs]
        if faults:
            raise Failure("machine code leaves its buffers", "; ".join(faults))
        outputs = tuple(b for b in kernel.buffers[:count] if b in kernel.outputs)
        compare("wrong in machine code", replace(kernel, outputs=outputs), found, subject.plain)
