"""Machine code of many scheduled kernels, compiled together, each called once between guard zones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tcomp.codegen.llvm.expressions import KernelModule
from tcomp.codegen.llvm.kernel import define
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.errors import CodegenError
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import as_expr, evaluate_int
from tcomp.ir.loops import GPU_AXES, SERIAL, Allocate, Buffer, For, Kernel, Stmt, hoist_temporaries
from tcomp.runtime.native_code import Call
from tcomp.schedules.primitives.editing import rebuild, swap_buffer
from tests.codegen.jit import HOST, engine
from tests.schedules.running import POOL
from tests.schedules.subject import Failure, Subject, compare

GUARD = 128  # bytes on both sides of an array
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
    """One call, every array between guard zones that must not change."""
    dims, arrays = subject.dims, subject.arrays()
    temporaries = kernel.buffers[len(arrays) :]
    arrays += [np.full([evaluate_int(as_expr(d), dims) for d in b.shape], 85).astype(to_numpy(b.dtype)) for b in temporaries]
    blocks = [np.full(2 * GUARD + a.nbytes, 0xA5, np.uint8) for a in arrays]
    for block, a in zip(blocks, arrays, strict=True):
        block[GUARD : GUARD + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    types = [ctypes.c_void_p] * (1 + len(blocks)) + [ctypes.c_int64] * len(kernel.scalars)
    call = ctypes.byref(Call(pool=ctypes.addressof(POOL)))
    ctypes.CFUNCTYPE(None, *types)(address)(call, *(b.ctypes.data + GUARD for b in blocks), *(dims[v] for v in kernel.scalars))
    for b, block in zip(kernel.buffers, blocks, strict=True):
        if np.any(block[:GUARD] != 0xA5) or np.any(block[-GUARD:] != 0xA5):
            raise Failure("machine code writes out of bounds", f"beside {b.name}")
    count = len(kernel.buffers) - len(temporaries)
    outputs = [b for b in kernel.buffers[:count] if b in kernel.outputs]
    found = [block[GUARD:-GUARD].view(a.dtype) for b, block, a in zip(kernel.buffers, blocks, arrays, strict=True) if b in outputs]
    compare("wrong in machine code", replace(kernel, outputs=tuple(outputs)), found, subject.plain)
