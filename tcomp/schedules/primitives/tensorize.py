"""Hardware instructions in place of loops."""

from __future__ import annotations

from tcomp.errors import IRError, ScheduleError
from tcomp.ir import loops as L
from tcomp.ir.instruction import Instruction, match
from tcomp.schedules.handles import Loop
from tcomp.schedules.instructions import named
from tcomp.schedules.primitives.editing import find_loop, refuse, replaced


def tensorize(kernel: L.Kernel, loop: Loop, instruction: Instruction | str, reassociate: bool = False) -> L.Kernel:
    """Execute a loop, and all that stands inside of it, by one machine instruction (see `tcomp.schedules.instructions`).

    Legal when the loops are the meaning of the instruction, up to their order: each moves the operands by the strides, and as often, as a
    loop of the meaning; dtypes, conversions and the reducer are the same; nothing else stands inside. An instruction that adds floats in
    an order of its own needs `reassociate`. Whether the target has the instruction is checked when code is generated. Good for the
    innermost tile: multiply-add on whole register tiles, dot products of bytes, tensor cores.

      >>> from tcomp.schedules.instructions import fma_tile
      >>> A, B, k = te.placeholder((2, 8), name="A"), te.placeholder((8, 32), name="B"), te.reduce_axis(8, "k")
      >>> s = Schedule(te.compute((2, 32), lambda i, j: te.sum(A[i, k] * B[k, j], k), name="C"))
      >>> s.reorder("C.k", "C.i", "C.j")
      >>> outer, inner = s.split("C.k", 4)
      >>> s.tensorize(inner, fma_tile(2, 2, 4))
      >>> print(s.loops[outer])
      for C.k.o in 0..2 {
        call `fma_tile(2, 2, 4, avx512, float32)` {
          for C.k.i in 0..4 {
            for C.i in 0..2 {
              for C.j in 0..32 {
                C[C.i, C.j] += A[C.i, C.k.i + C.k.o * 4] * B[C.k.i + C.k.o * 4, C.j]
              }
            }
          }
        }
      }
    """
    target = find_loop(kernel, loop)
    if any(isinstance(s, L.Call) and any(x is target for x in L.walk(s)) for s in L.walk(kernel.body)):
        raise refuse(f"loop `{loop}` is executed by an instruction already")
    try:
        wanted = instruction if isinstance(instruction, Instruction) else named(instruction)
        match(wanted, target)
    except ScheduleError:
        raise
    except IRError as error:
        raise refuse(f"{error.why or error.what}\n{error.where}") from None
    if wanted.reassociates and not reassociate:
        raise refuse(f"`{wanted.name}` adds floats in an order of its own", "allow it by tensorize(..., reassociate=True)")
    return replaced(kernel, {target: L.Call(wanted, target)})


def check_calls(kernel: L.Kernel) -> None:
    """Refuses a kernel in which an instruction would no longer execute what it means."""
    for s in L.walk(kernel.body):
        if isinstance(s, L.Call):
            try:
                match(s.instruction, s.body)
            except IRError as error:
                raise refuse(f"it would change what `{s.instruction.name}` executes: {error.why}") from None
