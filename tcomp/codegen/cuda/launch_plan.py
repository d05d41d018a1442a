"""The code of a CUDA artifact: machine code of every kernel for every architecture, and the launch plan, as JSON.

    {"kernels": {SYMBOL: {"launches": [{"function": "SYMBOL_0", "grid": [SIZE, SIZE, SIZE], "block": [256, 1, 1],
                                        "buffers": [0, 2], "scalars": [0], "shared": 0, "barriers": 0,
                                        "reports": false}],
                          "cubin": {"sm_90a": BASE64}, "ptx": BASE64,
                          "usage": {"sm_90a": {"SYMBOL_0": [registers, shared, spilled, stack]}}}},
     "steps": [{"call": SYMBOL, "label": "conv1", "buffers": [PLACE], "scalars": [SIZE]},
               {"branch": PLACE, "then": [...], "else": [...]},
               {"repeat": "i", "trips": SIZE, "body": [...], "condition": PLACE or null},
               {"copy": PLACE, "from": PLACE, "bytes": SIZE}, {"index": PLACE, "value": SIZE}],
     "workspace": SIZE, "sizes": [SIZE, ...], "checks": [SIZE, ...], "outputs": [[SIZE, ...], ...]}

A SIZE is an integer, ["dim", n] (of the artifact), ["scalar", n] (of the kernel, in grids), ["loop", name], or [operator, SIZE, SIZE]; a
PLACE is [memory, index, SIZE]: an offset in bytes into input or output `index`, or into the weights or the workspace. A launch takes
buffers of its kernel by number, then scalars as 64-bit integers; "shared": bytes that it requests for each block; "barriers": how many its
text has. One that "reports" also takes the address of three int64 and the number of the call, and writes there, if it is the first that
finds a value out of range: the number + 1, the value, and how many are possible. "sizes" of values: no run may happen if one is negative or
beyond all memory, or if one of the "checks" is not 0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from tcomp.codegen.cuda.kernel import Launch, emit_kernel
from tcomp.codegen.cuda.nvrtc import compile_text
from tcomp.errors import CodegenError
from tcomp.ir import loops as L
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.loops import Kernel
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step, size_data, walk
from tcomp.ir.verify.program import verify_program
from tcomp.target import CudaTarget, capability

SET_INDEX = "tcomp_set_index"  # stores the number of an iteration
_SET_INDEX_TEXT = f"""extern "C" __global__ void __launch_bounds__(1) {SET_INDEX}_0(long long* place, const long long value) {{
  *place = value;
}}
"""


def kernel_code(kernel: Kernel, target: CudaTarget, trace: Sequence[object] = ()) -> bytes:
    """A kernel (temporaries hoisted) compiled for every architecture of the target: its entry in "kernels"."""
    text, launches = emit_kernel(kernel, target, trace)
    scalars = {v: ["scalar", n] for n, v in enumerate(kernel.scalars)}
    described = [_launch_data(launch, scalars) for launch in launches]
    own = any(
        isinstance(s, L.Call) and all(capability(x)[1] for x in s.instruction.features if x.startswith("sm_")) for s in L.walk(kernel.body)
    )
    return _dumped({"launches": described, **_binaries(text, target, kernel.name, own)})


def _launch_data(launch: Launch, scalars: Mapping[Expr, Any]) -> dict[str, Any]:
    grid = [size_data(d, scalars, launch.function) for d in launch.grid]
    return {f.name: getattr(launch, f.name) for f in fields(launch)} | {"grid": grid}


def call_code(kernel: Kernel, sizes: Mapping[Expr, int], target: CudaTarget) -> bytes:
    """The code section of one call of a kernel (temporaries hoisted): its buffers are inputs, its scalars have these sizes."""
    buffers = tuple(Ref("input", n, 0) for n in range(len(kernel.buffers)))
    call = Call(kernel.name, buffers, tuple(as_expr(sizes[v]) for v in kernel.scalars), kernel.name)
    return program_code(Program((), 0, (), (call,)), {kernel.name: kernel_code(kernel, target)}, target)


def program_code(program: Program, kernels: Mapping[str, bytes], target: CudaTarget) -> bytes:
    """The code section of an artifact. `kernels` are the results of `kernel_code` by symbol. Raises `IRError` for a malformed program."""
    verify_program(program)
    dims: dict[Expr, Any] = {d: ["dim", n] for n, d in enumerate(program.dims)}
    steps = [_step(step, dims) for step in program.steps]
    entries = {symbol: json.loads(code) for symbol, code in kernels.items()}
    if any(isinstance(step, SetIndex) for step in walk(program.steps)):
        launch = Launch(f"{SET_INDEX}_0", (1, 1, 1), (1, 1, 1), (0,), (0,))
        entries[SET_INDEX] = {"launches": [_launch_data(launch, {})], **_binaries(_SET_INDEX_TEXT, target, SET_INDEX)}
    outputs = [[size_data(d, dims, "an output") for d in shape] for shape in program.output_shapes]
    workspace = size_data(program.workspace, dims, "the workspace")
    sizes = [size_data(d, dims, "a value") for d in program.sizes]
    checks = [size_data(d, dims, "a check") for d in program.checks]
    content = {"kernels": entries, "steps": steps, "workspace": workspace, "sizes": sizes, "checks": checks, "outputs": outputs}
    return _dumped(content)


def _binaries(text: str, target: CudaTarget, name: str, own: bool = False) -> dict[str, Any]:
    """Machine code by architecture; portable code of the oldest, for GPUs newer than all of them. Where instructions are an architecture's
    `own` the code is portable to no other, and says so (`.target sm_90a`)."""
    archs, oldest = target.archs, min(target.archs, key=capability)
    oldest = oldest if own else f"sm_{capability(oldest)[0]}"
    compiled = {arch: compile_text(text, arch, name) for arch in dict.fromkeys([*archs, oldest])}
    return {
        "cubin": {arch: base64.b64encode(compiled[arch].cubin).decode() for arch in archs},
        "ptx": base64.b64encode(compiled[oldest].ptx.rstrip(b"\0")).decode(),
        "usage": {arch: {f: list(astuple(u)) for f, u in compiled[arch].usage.items()} for arch in archs},
    }


def _dumped(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _step(step: Step, names: Mapping[Expr, Any]) -> dict[str, Any]:
    """`names` are the dims and the variables of the loops around."""
    match step:
        case Call(symbol, buffers, scalars, label):
            places, sizes = [_place(b, names) for b in buffers], [size_data(d, names, label) for d in scalars]
            return {"call": symbol, "label": label, "buffers": places, "scalars": sizes}
        case Branch(cond, then, otherwise):
            sides = [[_step(s, names) for s in side] for side in (then, otherwise)]
            return {"branch": _place(cond, names), "then": sides[0], "else": sides[1]}
        case Repeat(var, trips, body, condition):
            inside = {**names, var: ["loop", var.name]}
            trip_count, end = size_data(trips, names, "a loop"), None if condition is None else _place(condition, inside)
            return {"repeat": var.name, "trips": trip_count, "body": [_step(s, inside) for s in body], "condition": end}
        case Copy(dst, src, count):
            return {"copy": _place(dst, names), "from": _place(src, names), "bytes": size_data(count, names, "a copy")}
        case SetIndex(dst, value):
            return {"index": _place(dst, names), "value": size_data(value, names, "a loop")}


def _place(ref: Ref, names: Mapping[Expr, Any]) -> list[Any]:
    if ref.base not in ("input", "output", "weights", "workspace"):
        raise CodegenError(f"a launch plan cannot refer to {ref.base}")
    return [ref.base, ref.index, size_data(ref.offset, names, ref.base)]
