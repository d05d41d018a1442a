"""CPUs: objects made by LLVM, linked into one shared object with the entry function and the thread pool."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tcomp import cache
from tcomp.backends.protocol import Backend, CostModel, GraphOptions, InPlacePairs, Versions
from tcomp.codegen.archive import archive
from tcomp.codegen.elf.linker import link
from tcomp.codegen.llvm import compiler_rt, thread_pool
from tcomp.errors import TargetError
from tcomp.target import CpuTarget

if TYPE_CHECKING:
    from tcomp.ir.expr import Expr
    from tcomp.ir.layout import Layout
    from tcomp.ir.loops import Kernel
    from tcomp.ir.program import Program
    from tcomp.machines import Core
    from tcomp.schedules.knobs import Knobs
    from tcomp.schedules.schedule import Schedule


@dataclass(frozen=True)
class CpuBackend(Backend):
    """See `Backend`. LLVM is loaded when code is made, not by a compilation out of the cache."""

    target: CpuTarget
    stages: ClassVar = ("llvm", "asm")
    data_sizes: ClassVar = True

    @property
    def graph_options(self) -> GraphOptions:
        """All that graph passes can do."""
        from tcomp.schedules.cpu.block_dot_products import PANEL_VECTORS, block_lanes
        from tcomp.schedules.cpu.dot_products import byte_lanes

        lanes = block_lanes(self.target)
        words = lanes > 0 and not byte_lanes(self.target)
        return GraphOptions(True, self.target, self.target.l2, block_lanes=lanes, words=words, block_panel=PANEL_VECTORS * lanes)

    def operand_layouts(self, kernel: Kernel, constants: frozenset[int], knobs: Knobs | None = None) -> Mapping[int, Layout]:
        """Panels of weights for register tiles."""
        from tcomp.schedules.cpu import default

        return default.operand_layouts(kernel, constants, self.target, knobs)

    def schedule(self, kernel: Kernel, knobs: Knobs | None = None) -> Schedule:
        """See `tcomp.schedules.cpu.default`."""
        from tcomp.schedules.cpu import default

        return default.schedule(kernel, self.target, knobs)

    def versions(self, kernel: Kernel) -> Sequence[Mapping[Expr, int]]:
        """See `tcomp.schedules.cpu.versions`."""
        from tcomp.schedules.cpu import versions

        return versions.versions(kernel)

    def reusable_in_place(self, schedule: Schedule) -> InPlacePairs:
        """(input, output) pairs that may share memory: each element of the input is last read before the output's element there is
        written."""
        from tcomp.schedules.analysis.in_place import reusable_in_place

        return reusable_in_place(schedule.kernel)

    def emit(self, kernel: Kernel, trace: Sequence[object] = (), in_place: InPlacePairs = (), versions: Versions = ()) -> bytes:
        """A relocatable object."""
        from tcomp.codegen.llvm.kernel import emit_kernel
        from tcomp.codegen.llvm.machine_code import compile_ir

        return compile_ir(emit_kernel(kernel, self.target, in_place, versions), self.target)

    def link(self, program: Program, kernels: Mapping[str, bytes]) -> bytes:
        """A shared object: the kernels, the entry function that calls them, and the thread pool. For platforms whose linker is no part of
        this package, the objects, which `tcomp package` links."""
        from tcomp.codegen.llvm.entry import copies, emit_copy, emit_program, has_bind

        entry = self._object(emit_program(program, self.target), 0)  # calls and little else, which optimisation would not make faster
        platform = self.target.platform
        shared = [thread_pool.pool_ir(platform.triple)] if platform.threaded else []
        shared += [emit_copy(self.target)] if copies(program) else []
        objects = [entry, *kernels.values(), *map(self._object, shared)]
        if platform.format == "wasm" and program.dims:
            objects.append(self._object(compiler_rt.multi3_ir(platform.triple), 0))
        if platform.linker:
            return archive([(f"{n}.o", content, ()) for n, content in enumerate(objects)])
        exports = ["tcomp_run", "tcomp_run_profiled", "tcomp_plan", *["tcomp_bind"] * has_bind(program), *thread_pool.EXPORTS]
        return link(objects, exports, imports=thread_pool.IMPORTS)

    def link_kernel(self, kernel: Kernel, sizes: Mapping[Expr, int]) -> bytes:
        """A shared object with this one function."""
        self._check_linkable()
        return link([self.emit(kernel)], [kernel.name], imports=thread_pool.IMPORTS)

    def link_functions(self, kernels: Sequence[Kernel]) -> bytes:
        """A shared object with functions of these names, and the thread pool that they run on."""
        self._check_linkable()
        objects = [*map(self.emit, kernels), self._object(thread_pool.pool_ir(self.target.triple))]
        return link(objects, [*(k.name for k in kernels), *thread_pool.EXPORTS], imports=thread_pool.IMPORTS)

    def _check_linkable(self) -> None:
        """Refuse what would have to be loaded here to be of use."""
        if self.target.platform.linker:
            why = "kernels alone are made for Linux on x86-64 and AArch64"
            raise TargetError(f"no kernel can be made for `{self.target}`", why=why, hint="compile and package a whole model")

    def _object(self, ir_text: str, opt_level: int = 2) -> bytes:
        """LLVM IR that is not a kernel, compiled to a relocatable object, or found in the cache."""

        def compiled() -> str:
            from tcomp.codegen.llvm.machine_code import compile_ir

            return base64.b64encode(compile_ir(ir_text, self.target, opt_level)).decode()

        name = cache.name(ir_text, str(self.target), str(opt_level), cache.source_version())
        return base64.b64decode(cache.recall("objects", name, compiled))

    def listing(self, stage: str, schedule: Schedule) -> str:
        """LLVM IR, or assembly."""
        from tcomp.codegen.llvm.kernel import emit_kernel
        from tcomp.codegen.llvm.machine_code import assembly
        from tcomp.ir.loops import hoist_temporaries

        if stage not in self.stages:
            return super().listing(stage, schedule)
        ir = emit_kernel(hoist_temporaries(schedule.kernel)[0], self.target, self.reusable_in_place(schedule))
        return ir if stage == "llvm" else assembly(ir, self.target)

    def cost_model(self, threads: int = 1, core: Core | None = None) -> CostModel:
        """See `tcomp.schedules.cost.cpu`."""
        from tcomp.schedules.cost import cpu
        from tcomp.schedules.cost.roofline import cpu_roof

        return CostModel(
            lambda kernel, dims: cpu.estimate(kernel, self.target, dims, threads, core),
            lambda kernel, dims: cpu.bound(kernel, self.target, dims, threads, core),
            cpu_roof(self.target, threads, core),
            cpu.COUNTS,
            cpu.SECONDS,
        )

    def flush_bytes(self, threads: int) -> int:
        """Twice the second-level caches of all threads."""
        return 2 * self.target.l2 * threads
