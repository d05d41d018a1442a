"""The interface of the compiler to a kind of target. A new target is one file: a subclass of `Backend`.

A backend belongs to one target. It schedules plain loops (`schedule`), makes code of scheduled ones (`emit`), and joins the code of all
kernels with the host program to the code of an artifact (`link`). Everything else has a default that suits a simple target, as that of
tutorial 10, without a cost model and so without tuning: compare `CpuBackend` and `CudaBackend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tcomp import cache
from tcomp.errors import TargetError
from tcomp.target import Target

if TYPE_CHECKING:
    from tcomp.ir.expr import Expr
    from tcomp.ir.graph import Graph
    from tcomp.ir.layout import Layout
    from tcomp.ir.loops import Buffer, Kernel
    from tcomp.ir.program import Program
    from tcomp.machines import Core
    from tcomp.passes.algorithms import AttentionTiles
    from tcomp.schedules.cost.roofline import Estimate, Roof
    from tcomp.schedules.knobs import Knobs
    from tcomp.schedules.schedule import Schedule
    from tcomp.target import CpuTarget

InPlacePairs = Collection[tuple["Buffer", "Buffer"]]
"""Pairs of buffers of a kernel: the first, an input, may be the memory of the second, an output."""


Versions = Sequence[tuple[Mapping["Expr", int], "Kernel"]]
"""Sizes of dims, and the loops for these."""


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Options of the graph passes for a target.

    `halos`: values may get zeros around them, and indices may be quotients of others, because schedules of the target split such axes.
    `algorithms_for`: the machine that Winograd's and Strassen's algorithms are chosen for; None: direct ones only. `attention_bytes`:
    attention whose scores need more than these is one kernel; `attention_blocks`: what GPU blocks compute of it. `block_lanes`: lanes of
    32 bits of vectors that add up products of bytes in each, or of `words`, bytes by integers of 16 bits; 0: there are none.
    `block_panel`: columns whose weights lie together.
    """

    halos: bool = False
    algorithms_for: CpuTarget | None = None
    attention_bytes: int = 1 << 20
    attention_blocks: AttentionTiles | None = None
    block_lanes: int = 0
    words: bool = False
    block_panel: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model of kernels on a target.

    estimate: (kernel, values of symbolic dims) -> the modelled time, scheduled or not; raises `IRError` if a dim has no value
    bound: (kernel, values of symbolic dims) -> the least seconds that it takes, by the roofline; raises likewise
    roof: what the target can do at most
    counts, seconds: the counts and the parts of the time in an `Estimate` that the learned cost model gets, in order
    """

    estimate: Callable[[Kernel, Mapping[Expr, int]], Estimate]
    bound: Callable[[Kernel, Mapping[Expr, int]], float]
    roof: Roof
    counts: tuple[str, ...]
    seconds: tuple[str, ...]


class Backend(ABC):
    """One kind of target; see the module. Abstract methods are what every target needs."""

    target: Target
    stages: ClassVar[tuple[str, ...]] = ()
    """The texts that `listing` makes of a kernel's code, of which `TCOMP_DUMP` writes the first `dumped`."""
    dumped: ClassVar[int] = 2
    on_device: ClassVar[bool] = False
    """Whether code runs on a device with memory of its own: it is a launch plan, timed by the device's clock, not a shared object."""
    data_sizes: ClassVar[bool] = False
    """Whether sizes may depend on values of inputs, or be counted by a run: `link` makes `tcomp_bind`, and steps write dims."""

    @property
    def identity(self) -> tuple[str, ...]:
        """The part of cache keys that distinguishes schedules of this backend from those of others and of other versions of tcomp."""
        return f"{type(self).__module__}.{type(self).__qualname__}", str(self.target), cache.source_version()

    @property
    def toolchain(self) -> str:
        """The tools besides tcomp and LLVM that generate the code, with versions: part of the key of cached kernels."""
        return ""

    @property
    def graph_options(self) -> GraphOptions:
        """The options of the graph passes for this target."""
        return GraphOptions()

    def suited_to(self, graph: Graph) -> Backend:
        """This backend, or one whose target leaves out what the kernels of a partitioned graph do not allow."""
        return self

    def lower(self, body: Graph, symbol: str) -> Kernel:
        """The plain loops of a KERNEL body: the meaning of every schedule of it."""
        from tcomp.schedules.lowering import lower_graph

        return lower_graph(body, symbol)

    def operand_layouts(self, kernel: Kernel, constants: frozenset[int], knobs: Knobs | None = None) -> Mapping[int, Layout]:
        """The layouts in which the schedule wants those inputs that are constants, by number; others stay row-major."""
        return {}

    @abstractmethod
    def schedule(self, kernel: Kernel, knobs: Knobs | None = None) -> Schedule:
        """Plain loops with the default schedule, or as the knobs decide."""

    def versions(self, kernel: Kernel) -> Sequence[Mapping[Expr, int]]:
        """Sizes of symbolic dims for which plain loops are to have code of their own, besides that for all sizes; the first that holds
        is taken. `emit` is then given scheduled loops for each."""
        return ()

    def reusable_in_place(self, schedule: Schedule) -> InPlacePairs:
        """Inputs that outputs may overwrite."""
        return ()

    @abstractmethod
    def emit(self, kernel: Kernel, trace: Sequence[object] = (), in_place: InPlacePairs = (), versions: Versions = ()) -> bytes:
        """The code of scheduled loops (temporaries hoisted); `trace`, their schedule, is for comments. `versions`, none unless asked for by
        `Backend.versions`, are loops for certain sizes, with the same first buffers. Raises `CodegenError` for loops that the target has
        no code for."""

    @abstractmethod
    def link(self, program: Program, kernels: Mapping[str, bytes]) -> bytes:
        """The code of an artifact: the host program, and the kernels that it calls, by symbol."""

    @abstractmethod
    def link_kernel(self, kernel: Kernel, sizes: Mapping[Expr, int]) -> bytes:
        """The code of scheduled loops (temporaries hoisted) alone, to be measured with scalars of these sizes."""

    def listing(self, stage: str, schedule: Schedule) -> str:
        """One of `stages` of a scheduled kernel, as text."""
        raise TargetError(f"there is no stage {stage} for {self.target}", hint="cuda, ptx, sass-stats for CUDA; llvm, asm for a CPU")

    def cost_model(self, threads: int = 1, core: Core | None = None) -> CostModel:
        """The cost model of kernels on `threads` threads; `core` are measured rates. Raises `TargetError` if there is no model."""
        raise TargetError(f"{type(self).__name__} has no cost model")

    def threads(self, given: int | None) -> int:
        """The threads that kernels are tuned for; by default the cores of this machine."""
        from tcomp.runtime import default_threads

        return given or default_threads()

    def flush_bytes(self, threads: int) -> int:
        """The bytes that are written between two measured runs: they fill all private caches twice."""
        return 64 << 20

    def check_device(self) -> None:  # noqa: B027  most targets are this machine
        """Raises `DeviceError` where nothing can be measured here for this target."""

    def environment(self) -> dict[str, str]:
        """The device and its tools, by name, as records of measurements store them."""
        return {}
