"""The manifest of an artifact: its signature, target, symbolic dims, and notes on kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tcomp
from tcomp.backends.kernel import CompiledKernel
from tcomp.errors import UnsupportedError
from tcomp.ir.expr import Dim, Expr, bounds, variables
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import Graph, Node
from tcomp.packaging.facts import kernel_facts
from tcomp.target import Target


def symbolic_dims(graph: Graph) -> list[Expr]:
    """The symbolic dims that input shapes bind. Raises `UnsupportedError` where others cannot be computed from these."""
    bound = [d for v in graph.inputs for d in v.shape if isinstance(d, Expr) and d.op == "var"]
    dims = list(dict.fromkeys(bound))
    free = [v for value in graph.values() for d in value.shape if isinstance(d, Expr) for v in variables(d) if v not in dims]
    if free:
        names = ", ".join(sorted({v.name for v in free}))
        raise UnsupportedError(
            f"the size {names} is not given by any input's shape", hint="fix it with dims={'name': size} or --dim name=size"
        )
    for v in graph.inputs:
        if composite := [d for d in v.shape if isinstance(d, Expr) and d.op != "var"]:
            hint = "give it a size of its own, or build a tcomp.Schedule, which takes arrays of such shapes"
            raise UnsupportedError(f"the extent {composite[0]} of input `{v.name}` is neither a number nor a single size", hint=hint)
    return dims


def manifest(
    graph: Graph,
    dims: Sequence[Expr],
    target: Target,
    threads: int | None,
    kernels: Mapping[Node, CompiledKernel],
    not_fused: Sequence[tuple[str, Fallback]],
) -> dict[str, Any]:
    """See `runtime.manifest`."""
    number = {d: n for n, d in enumerate(dims)}
    schedules: dict[str, list[str]] = {}  # of each distinct kernel, with the names of the nodes that it computes
    for node, compiled in kernels.items():
        schedules.setdefault(compiled.schedule, []).append(node.name)

    def extent(d: Dim) -> Any:
        return d if isinstance(d, int) else {"dim": number[d]}

    return {
        "producer": f"tcomp {tcomp.__version__}",
        "target": target.manifest,
        "inputs": [{"name": v.name, "dtype": v.dtype, "shape": [extent(d) for d in v.shape]} for v in graph.inputs],
        "outputs": [
            {"name": v.name, "dtype": v.dtype, "shape": [d if isinstance(d, int) else str(d) for d in v.shape]} for v in graph.outputs
        ],
        "dims": [{"name": d.name, "min": bounds(d)[0] or 0, "max": bounds(d)[1], "data_dependent": False} for d in dims],
        "threads": threads,
        "errors": [],
        "notes": {
            "kernels": [node.name for node in kernels],
            "facts": kernel_facts(graph, dims, kernels, not_fused),
            "schedules": [{"kernels": names, "schedule": json.loads(schedule)} for schedule, names in schedules.items()],
            "target": str(target),
        },
    }
