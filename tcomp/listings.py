"""The stages of a compilation as text, for `--emit`, `tcomp explain` and `TCOMP_DUMP`: graph, tensor expressions, schedule, loops, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tcomp.codegen.cuda.kernel import emit_kernel as emit_kernel_cuda
from tcomp.codegen.cuda.nvrtc import compile_text
from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import assembly
from tcomp.errors import TargetError
from tcomp.ir.graph import Graph, Node
from tcomp.ir.loops import hoist_temporaries
from tcomp.ir.te import print_te
from tcomp.kernels import CompiledKernel, build_loops
from tcomp.schedules.analysis.in_place import reusable_in_place
from tcomp.schedules.knobs import Decisions, Knobs
from tcomp.schedules.lowering import tensors_of
from tcomp.schedules.schedule import Schedule
from tcomp.target import Target


def listings(
    emit: Sequence[str],
    graph: Graph,
    texts: Mapping[Node, str],
    compiled: Mapping[str, CompiledKernel],
    target: Target,
    decisions: Mapping[str, Decisions],
) -> dict[str, str]:
    """The stages asked for, as text; each distinct kernel once."""
    first: dict[str, Node] = {}
    for node, text in texts.items():
        first.setdefault(text, node)
    result: dict[str, list[str]] = {stage: [] for stage in emit}
    for stage in emit:
        if stage == "graph":
            result[stage].append(str(graph))
            continue
        for text, node in first.items():
            body, symbol = node.bodies[0], compiled[text].symbol
            if stage == "te":
                listing = print_te(tensors_of(body)[1])
            else:
                listing = _listing(stage, build_loops(body, symbol, target, Knobs(decisions.get(text, {}))), target)
            comment = {"cuda": "//", "ptx": "//", "schedule": "#"}.get(stage, ";")
            result[stage].append(f"{comment} {node.name}\n{listing}")
    return {stage: "\n".join(listings) for stage, listings in result.items()}


def _listing(stage: str, schedule: Schedule, target: Target) -> str:
    """The loops of a scheduled kernel, or the text made of them for the target."""
    if stage in ("schedule", "loops"):
        return str(schedule.trace if stage == "schedule" else schedule.kernel)
    kernel = hoist_temporaries(schedule.kernel)[0]
    if (stage in ("cuda", "ptx", "sass-stats")) != (target.kind == "cuda"):
        raise TargetError(f"there is no stage {stage} for {target}", hint="cuda, ptx, sass-stats for CUDA; llvm, asm for a CPU")
    if target.kind == "cuda":
        text, launches = emit_kernel_cuda(kernel, target, schedule.trace)
        if stage == "cuda":
            return text
        compiled = {arch: compile_text(text, arch, kernel.name) for arch in target.cpu.split(",")}
        if stage == "ptx":
            return next(iter(compiled.values())).ptx.decode(errors="replace").rstrip("\0")
        usage = [(arch, launch, binary.usage[launch.function]) for arch, binary in compiled.items() for launch in launches]
        return "\n".join(
            f"{arch} {launch.function}: {u.registers} registers, {u.shared + launch.shared} bytes shared, {u.spilled} spilled, "
            f"{u.stack} of stack, {launch.barriers} barriers, all proved"
            for arch, launch, u in usage
        )
    ir = emit_kernel(kernel, target, reusable_in_place(schedule.kernel))
    return ir if stage == "llvm" else assembly(ir, target)
