"""The interpreter of programs: NumPy arrays for the memories, callables for the kernels, and every place checked.

The workspace starts as bytes of 0x55, so that what depends on its former content shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tcomp.errors import InputError, IRError, TcompError
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Dim, Expr, as_expr, evaluate_int, variables
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.interpreters.semantics import Array
from tcomp.ir.loops import Kernel
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step

FILLING = 0x55
Code = Callable[[Sequence[Array], Sequence[int]], None]  # of a kernel: memory as bytes from each buffer's place on, and the scalars


def run_program(
    program: Program,
    kernels: Mapping[str, Code],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    weights: Array,
    dims: Sequence[int] = (),
) -> tuple[int, ...]:
    """Run a program on C-contiguous arrays; outputs are written in place. Returns the dims, which kernels may have changed.

    `kernels` are given by symbol (`interpreted` makes one of a loop program). `weights` are the bytes of the weights section, `dims` the
    values of `program.dims`. Raises `InputError` where an array or dim is missing or a size is impossible, `IRError` where a step reaches
    outside of a memory.
    """
    if len(dims) != len(program.dims):
        raise InputError(f"{len(dims)} dims instead of {len(program.dims)}")
    runner = _Runner(program, kernels, np.array(dims, np.int64))
    counted = {d for d, _ in program.counted}
    if bad := [s for s in program.sizes if counted.isdisjoint(variables(as_expr(s))) and not 0 <= runner.size(s, {}) < 1 << 63]:
        raise InputError(f"the size {bad[0]} is negative or beyond all memory")
    if bad := [s for s in program.checks if runner.size(s, {})]:
        raise InputError(f"the dims contradict each other: {bad[0]} is not 0")
    constant = {("weights", 0): _bytes(weights)} | {("input", n): _bytes(array) for n, array in enumerate(inputs)}
    for memory in constant.values():
        memory.flags.writeable = False
    runner.memory |= constant | {("output", n): _bytes(array) for n, array in enumerate(outputs)}
    runner.memory["workspace", 0] = np.full(runner.size(program.workspace, {}), FILLING, np.uint8)
    runner.steps(program.steps, {})
    return tuple(map(int, runner.dims))


def interpreted(kernel: Kernel) -> Code:
    """The code of a kernel whose temporaries are hoisted, run by the interpreter of loop programs."""

    def code(memory: Sequence[Array], scalars: Sequence[int]) -> None:
        values, arrays = dict(zip(kernel.scalars, scalars, strict=True)), {}
        for b, given in zip(kernel.buffers, memory, strict=True):
            dtype, shape = to_numpy(b.dtype), [evaluate_int(d, values) for d in b.shape]
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            if size > given.size:
                raise IRError(f"`{b.name}` of kernel `{kernel.name}` has {size} bytes, and {given.size} are there")
            arrays[b] = given[:size].view(dtype).reshape(shape)
        try:
            run_kernel(kernel, arrays, values)
        except ValueError as error:
            raise IRError(f"kernel `{kernel.name}` writes to an input or to weights", why=str(error)) from error

    return code


def _bytes(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise InputError("an array is not contiguous")
    return array.reshape(-1).view(np.uint8)


class _Runner:
    def __init__(self, program: Program, kernels: Mapping[str, Code], dims: Array) -> None:
        self.program, self.kernels, self.dims = program, kernels, dims
        self.memory = {("dims", 0): dims.view(np.uint8)}

    def steps(self, steps: Sequence[Step], loops: Mapping[Expr, int]) -> None:
        for step in steps:
            match step:
                case Call(symbol, buffers, scalars, label):
                    if symbol not in self.kernels:
                        raise InputError(f"no code for the kernel `{symbol}`")
                    memory = [self.place(ref, loops) for ref in buffers]
                    try:
                        self.kernels[symbol](memory, [self.size(n, loops) for n in scalars])
                    except TcompError as error:
                        raise error.restated(IRError, where=f"call `{label}`: {error.where}") from error
                case Branch(cond, then, otherwise):
                    self.steps(then if self.flag(cond, loops) else otherwise, loops)
                case Repeat(var, trips, body, condition):
                    for n in range(self.size(trips, loops)):
                        self.steps(body, {**loops, var: n})
                        if condition is not None and not self.flag(condition, {**loops, var: n}):
                            break
                case Copy(dst, src, count):
                    size = self.size(count, loops)
                    self.place(dst, loops, size)[:size] = self.place(src, loops, size)[:size]
                case SetIndex(dst, value):
                    self.place(dst, loops, 8)[:8] = np.array([self.size(value, loops)], np.int64).view(np.uint8)

    def size(self, size: Dim, loops: Mapping[Expr, int]) -> int:
        return evaluate_int(size, {**dict(zip(self.program.dims, map(int, self.dims), strict=True)), **loops})

    def flag(self, ref: Ref, loops: Mapping[Expr, int]) -> bool:
        return bool(self.place(ref, loops, 1)[0])

    def place(self, ref: Ref, loops: Mapping[Expr, int], needed: int = 0) -> Array:
        """The memory from a place on, of which `needed` bytes must exist."""
        if (ref.base, ref.index) not in self.memory:
            raise InputError(f"there is no {ref.base} {ref.index}")
        memory, offset = self.memory[ref.base, ref.index], self.size(ref.offset, loops)
        if not 0 <= offset <= memory.size - needed:
            raise IRError(f"{needed} bytes at `{ref}` are at {offset} of {memory.size} bytes")
        return memory[offset:]
