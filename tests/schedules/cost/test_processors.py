"""Every processor of the machine table: the default schedules of products fit its registers, and LLVM keeps the accumulators there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.ir import te
from tcomp.ir.loops import Kernel, hoist_temporaries
from tcomp.machines import FEATURES
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget

PROCESSORS = [(arch, cpu) for arch in ("x86_64", "aarch64") for cpu in FEATURES[arch]]  # whose assembly is understood here
LOADED_AHEAD = {"nehalem", "haswell", "broadwell", "skylake", "znver1", "znver2", "znver3"}
"""LLVM's scheduler moves the first loads of an unrolled loop ahead of its first products on these, two more than there are registers for."""
VECTOR_TO_STACK = re.compile(r"%[xyz]mm\d+, -?\d*\(%r[sb]p\)|\b(?:str|stp|stur)\s+q\d+,(?: q\d+,)? \[(?:sp|x29)")


def product() -> Kernel:
    a, b, k = te.placeholder((256, 256), name="A"), te.placeholder((256, 256), name="B"), te.reduce_axis(256, "k")
    return lower("product", [a, b], [te.compute((256, 256), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")])


def convolution() -> Kernel:
    x, w = te.placeholder((30, 30, 64), name="x"), te.placeholder((3, 3, 64, 64), name="w")
    i, j, c = te.reduce_axis(3, "i"), te.reduce_axis(3, "j"), te.reduce_axis(64, "c")
    y = te.compute((28, 28, 64), lambda h, v, o: te.sum(x[h + i, v + j, c] * w[i, j, c, o], [i, j, c]), name="C")
    return lower("convolution", [x, w], [y])


def depthwise() -> Kernel:
    x, w = te.placeholder((30, 30, 64), name="x"), te.placeholder((3, 3, 64), name="w")
    i, j = te.reduce_axis(3, "i"), te.reduce_axis(3, "j")
    return lower("depthwise", [x, w], [te.compute((28, 28, 64), lambda h, v, c: te.sum(x[h + i, v + j, c] * w[i, j, c], [i, j]), name="C")])


def innermost_loops(asm: str) -> Iterator[str]:
    """The text of every loop without another one inside: from a label to the last jump back to it."""
    lines, labels, spans = asm.splitlines(), dict[str, int](), dict[int, int]()
    for n, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = n
        elif (jump := re.match(r"\s+(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*?(\.L\w+)$", line)) and jump[1] in labels:
            spans[labels[jump[1]]] = n
    for first, last in spans.items():
        if not any(first < other <= last for other in spans):
            yield "\n".join(lines[first : last + 1])


@pytest.mark.parametrize(("arch", "cpu"), PROCESSORS, ids=[cpu for _, cpu in PROCESSORS])
def test_register_tiles_fit_every_processor(arch: str, cpu: str) -> None:
    target = CpuTarget.parse(f"cpu -march={arch} -mcpu={cpu} -os=linux")
    kernels: dict[Callable[[], Kernel], float] = {product: 1 / 2, convolution: 1 / 2, depthwise: 1 / 5}  # share of accumulators, at least
    for make, share in kernels.items():
        knobs = Knobs()
        s = schedule(make(), target, knobs)
        (rows, vectors), outer = knobs.asked["C.acc.tile"].value, knobs.asked["C.acc.lines"].value if "C.acc.lines" in knobs.asked else 1
        asm = assembly(emit_kernel(hoist_temporaries(s.kernel)[0], target), target)
        loops = list(innermost_loops(asm))
        spills = max(len(VECTOR_TO_STACK.findall(loop)) for loop in loops)
        accumulators, registers = outer * rows * vectors, target.vector_registers
        found = (
            f"{make.__name__}: {outer} x {rows} rows x {vectors} vectors in {registers} registers, {spills} spilled in an innermost loop"
        )
        assert accumulators + vectors + 1 <= target.tile_registers <= registers, found
        assert accumulators >= share * registers, found
        assert any(re.search(r"fmadd|fmla|mulps", loop) for loop in loops), found
        assert spills <= (2 if cpu in LOADED_AHEAD else 0), found
