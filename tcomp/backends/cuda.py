"""CUDA: kernels as CUDA C++ compiled by NVRTC for each architecture, and a launch plan. No GPU is needed to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tcomp.backends.protocol import Backend, CostModel, GraphOptions, InPlacePairs, Versions
from tcomp.errors import DeviceError
from tcomp.ir.graph import IF, LOOP, Graph
from tcomp.target import CudaTarget, capability

if TYPE_CHECKING:
    from tcomp.ir.expr import Expr
    from tcomp.ir.layout import Layout
    from tcomp.ir.loops import Kernel
    from tcomp.ir.program import Program
    from tcomp.machines import Core
    from tcomp.schedules.knobs import Knobs
    from tcomp.schedules.schedule import Schedule


@dataclass(frozen=True)
class CudaBackend(Backend):
    """See `Backend`."""

    target: CudaTarget
    stages: ClassVar = ("cuda", "ptx", "sass-stats")
    dumped: ClassVar = 1
    on_device: ClassVar = True

    @property
    def toolchain(self) -> str:
        """The version of NVRTC. Raises `TargetError` where there is none."""
        from tcomp.codegen.cuda import nvrtc

        return nvrtc.version()

    @property
    def graph_options(self) -> GraphOptions:
        """Neither halos (one thread would store all the zeros) nor other algorithms; attention in blocks of one launch."""
        from tcomp.passes.algorithms import AttentionTiles
        from tcomp.schedules.gpu import flash_attention

        blocks = AttentionTiles(flash_attention.MIN_SM_ROWS * self.target.gpu.sms, flash_attention.WIDTHS)
        return GraphOptions(attention_bytes=self.target.shared_per_block, attention_blocks=blocks)

    def suited_to(self, graph: Graph) -> Backend:
        """Without vector accesses if kernels work on slices of a loop's values that are not aligned for them."""
        from tcomp.passes.memory_plan import byte_size

        for node in graph.nodes:
            carried = int(node.attrs["carried"]) if node.op is LOOP else 0
            parts = (*node.bodies[0].inputs[1 + carried :], *node.bodies[0].outputs[carried:]) if node.op is LOOP else ()
            unaligned = any(not isinstance(size := byte_size(v), int) or size % 16 for v in parts)
            if unaligned or any(self.suited_to(body) is not self for body in node.bodies if node.op in (IF, LOOP)):
                return CudaBackend(replace(self.target, vector_access=False))
        return self

    def lower(self, body: Graph, symbol: str) -> Kernel:
        """Plain loops, with the products of matrices in the precision of the target."""
        from tcomp.schedules.gpu.precision import with_precision

        return with_precision(super().lower(body, symbol), self.target.precision)

    def operand_layouts(self, kernel: Kernel, constants: frozenset[int], knobs: Knobs | None = None) -> Mapping[int, Layout]:
        """Weights transposed for what reads them."""
        from tcomp.schedules.gpu import default

        return default.operand_layouts(kernel, constants, self.target)

    def schedule(self, kernel: Kernel, knobs: Knobs | None = None) -> Schedule:
        """See `tcomp.schedules.gpu.default`."""
        from tcomp.schedules.gpu import default

        return default.schedule(kernel, self.target, knobs)

    def emit(self, kernel: Kernel, trace: Sequence[object] = (), in_place: InPlacePairs = (), versions: Versions = ()) -> bytes:
        """Machine code of every architecture with its launches, as JSON."""
        from tcomp.codegen.cuda.launch_plan import kernel_code

        return kernel_code(kernel, self.target, trace)

    def link(self, program: Program, kernels: Mapping[str, bytes]) -> bytes:
        """A launch plan."""
        from tcomp.codegen.cuda.launch_plan import program_code

        return program_code(program, kernels, self.target)

    def link_kernel(self, kernel: Kernel, sizes: Mapping[Expr, int]) -> bytes:
        """A launch plan of one call."""
        from tcomp.codegen.cuda.launch_plan import call_code

        return call_code(kernel, sizes, self.target)

    def listing(self, stage: str, schedule: Schedule) -> str:
        """CUDA C++, portable assembly, or what each launch takes of an architecture's registers and memories."""
        from tcomp.codegen.cuda.kernel import emit_kernel
        from tcomp.codegen.cuda.nvrtc import compile_text
        from tcomp.ir.loops import hoist_temporaries

        if stage not in self.stages:
            return super().listing(stage, schedule)
        kernel = hoist_temporaries(schedule.kernel)[0]
        text, launches = emit_kernel(kernel, self.target, schedule.trace)
        if stage == "cuda":
            return text
        compiled = {arch: compile_text(text, arch, kernel.name) for arch in self.target.archs}
        if stage == "ptx":
            return next(iter(compiled.values())).ptx.decode(errors="replace").rstrip("\0")
        usage = [(arch, launch, binary.usage[launch.function]) for arch, binary in compiled.items() for launch in launches]
        return "\n".join(
            f"{arch} {launch.function}: {u.registers} registers, {u.shared + launch.shared} bytes shared, {u.spilled} spilled, "
            f"{u.stack} of stack, {launch.barriers} barriers, all proved"
            for arch, launch, u in usage
        )

    def cost_model(self, threads: int = 1, core: Core | None = None) -> CostModel:
        """See `tcomp.schedules.cost.gpu`; rates are those of the data sheet."""
        from tcomp.schedules.cost import gpu
        from tcomp.schedules.cost.roofline import gpu_roof

        return CostModel(
            lambda kernel, dims: gpu.estimate(kernel, self.target, dims),
            lambda kernel, dims: gpu.bound(kernel, self.target, dims),
            gpu_roof(self.target),
            gpu.COUNTS,
            gpu.SECONDS,
        )

    def threads(self, given: int | None) -> int:
        """One: kernels of a GPU depend on none of a CPU's."""
        return 1

    def flush_bytes(self, threads: int) -> int:
        """Twice the second-level cache."""
        return 2 * self.target.gpu.l2

    def check_device(self) -> None:
        """Raises `TargetError` where nothing can be compiled here, `DeviceError` where there is no GPU of the target's architectures."""
        from tcomp.runtime.cuda import usable_cupy

        assert self.toolchain
        found = int(usable_cupy().cuda.Device().compute_capability)
        if found not in [capability(arch)[0] for arch in self.target.archs]:
            why = f"the GPU of this machine is sm_{found}, and what is measured there says little about others"
            hint = f"--target 'cuda -arch=sm_{found}', or --cluster"
            raise DeviceError(f"programs for `{self.target}` cannot be tuned here", why=why, hint=hint)

    def environment(self) -> dict[str, str]:
        """The GPU and the compiler."""
        from tcomp.runtime.cuda import gpu_name

        return {"gpu": gpu_name(), "nvrtc": self.toolchain}
