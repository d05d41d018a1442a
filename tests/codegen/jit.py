"""Runs kernels natively inside the test process."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.codegen.llvm.math import lower
from tcomp.ir import expr as E
from tcomp.ir.expr import Expr
from tcomp.ir.loops import Buffer, Kernel
from tcomp.runtime.native_code import Call
from tcomp.target import CpuTarget

HOST = CpuTarget.host()
ISA = "avx512" if HOST.vector_bits == 512 else "avx2" if HOST.has("fma") else "neon"  # of `fma_tile`, for this machine
_engines: list[Any] = []  # code must outlive the callables that are made of it

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def spill_count(asm: str) -> int:
    """How many vector registers are stored to or loaded from the stack: 0 in a kernel whose tile fits the registers."""
    x86 = r"-?\d*\(%rsp\), %[xyz]mm\d+|%[xyz]mm\d+, -?\d*\(%rsp\)"
    aarch64 = r"\b(?:str|ldr|stp|ldp|stur|ldur)\s+q\d+,(?: q\d+,)? \[(?:sp|x29)"
    return len(re.findall(f"{x86}|{aarch64}", asm))


def expand(e: Expr, target: CpuTarget) -> Expr:
    """An expression without elementary functions and without operators that the target lacks."""
    memo: dict[Expr, Expr] = {}

    def rule(node: Expr) -> Expr | None:
        lowered = lower(node, target)
        return None if lowered is None else E.rewrite(lowered, rule, memo)

    return E.rewrite(e, rule, memo)


def engine(*objects: bytes) -> Any:
    """Objects that import nothing but each other, in memory for as long as the engine lives."""
    machine = llvm.Target.from_triple(HOST.triple).create_target_machine(cpu=HOST.cpu, features=HOST.llvm_features, jit=True)
    made = llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{HOST.triple}"'), machine)
    for data in objects:
        made.add_object_file(llvm.ObjectFileRef.from_data(data))
    made.finalize_object()
    return made


def load_objects(*objects: bytes) -> Callable[[str], int]:
    """The addresses of the symbols of objects that stay loaded."""
    _engines.append(engine(*objects))
    return _engines[-1].get_function_address


@functools.lru_cache(maxsize=8)  # some tests run a kernel several times, with and without threads
def _loaded(ir_text: str, target: CpuTarget, name: str) -> int:
    return load_objects(compile_ir(ir_text, target))(name)


def compile_kernel(kernel: Kernel, target: CpuTarget = HOST, over: Collection[tuple[Buffer, Buffer]] = ()) -> Callable[..., None]:
    """f(*arrays, *scalars, pool=None); `pool` is the address of a struct whose first field is `parallel_for`."""
    address = _loaded(emit_kernel(kernel, target, over), target, kernel.name)
    types = [ctypes.c_void_p] * (1 + len(kernel.buffers)) + [ctypes.c_int64] * len(kernel.scalars)
    function = ctypes.CFUNCTYPE(None, *types)(address)

    def run(*args: Any, pool: int | None = None) -> None:
        arrays: Sequence[np.ndarray] = args[: len(kernel.buffers)]
        function(ctypes.byref(Call(pool=pool)), *(a.ctypes.data for a in arrays), *args[len(kernel.buffers) :])

    return run


def kernel(name: str, inputs: Sequence[Any], outputs: Sequence[Any], body: Any, scalars: Sequence[Any] = ()) -> Kernel:
    return Kernel(name, (*inputs, *outputs), tuple(outputs), tuple(scalars), body)
