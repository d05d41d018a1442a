"""The manifest of an artifact: its signature, target and symbolic dims, and what profiles and proofs want to know of its kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import tcomp
from tcomp.backends.kernel import CompiledKernel
from tcomp.codegen.sizes import size_data
from tcomp.errors import CodegenError, ParseError, UnsupportedError
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr, bounds, variables
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, Node, Value
from tcomp.ir.text.parser import parse_expr
from tcomp.schedules.cost.roofline import Work
from tcomp.target import Target


def symbolic_dims(graph: Graph) -> list[Expr]:
    """The symbolic dims that input shapes bind. Raises `UnsupportedError` where others cannot be computed from these."""
    extents = [(v, d) for v in graph.inputs for d in v.shape if isinstance(d, Expr)]
    dims = list(dict.fromkeys(d for _, d in extents if d.op == "var"))
    free = {v.name for value in graph.values() for d in value.shape if isinstance(d, Expr) for v in variables(d) if v not in dims}
    if free:
        hint = "fix it with dims={'name': size} or --dim name=size"
        raise UnsupportedError(f"the size {', '.join(sorted(free))} is not given by any input's shape", hint=hint)
    for v, d in extents:
        if d.op != "var":
            hint = "give it a size of its own, or build a tcomp.Schedule, which takes arrays of such shapes"
            raise UnsupportedError(f"the extent {d} of input `{v.name}` is neither a number nor a single size", hint=hint)
    return dims


def manifest(
    graph: Graph,
    dims: Sequence[Expr],
    target: Target,
    threads: int | None,
    kernels: Mapping[Node, CompiledKernel],
    not_fused: Sequence[tuple[str, Fallback]],
) -> dict[str, Any]:
    """JSON: the fields of `runtime.manifest.Manifest` except those that `write_artifact` adds."""
    schedules: dict[str, list[str]] = {}  # of each distinct kernel, with the names of the nodes that it computes
    for node, compiled in kernels.items():
        schedules.setdefault(compiled.schedule, []).append(node.name)

    def extent(d: Dim) -> int | str:
        return d if isinstance(d, int) else d.name if d.op == "var" else str(d)

    def specs(values: Sequence[Value]) -> list[dict[str, Any]]:
        return [{"name": v.name, "dtype": v.dtype, "shape": [extent(d) for d in v.shape]} for v in values]

    return {
        "producer": f"tcomp {tcomp.__version__}",
        **target.manifest,
        "inputs": specs(graph.inputs),
        "outputs": specs(graph.outputs),
        "dims": [{"name": d.name, "min": bounds(d)[0] or 0, "max": bounds(d)[1], "data_dependent": False} for d in dims],
        "threads": threads,
        "errors": [],
        "notes": {
            "kernels": [node.name for node in kernels],
            "facts": _facts(graph, dims, kernels, not_fused),
            "schedules": [{"kernels": names, "schedule": json.loads(schedule)} for schedule, names in schedules.items()],
            "target": str(target),
        },
    }


def _facts(
    graph: Graph, dims: Sequence[Expr], kernels: Mapping[Node, CompiledKernel], not_fused: Sequence[tuple[str, Fallback]]
) -> list[dict[str, Any]]:
    """For each kernel, in order: the fields of `Work` for all its calls of a run, as sizes over the dims (see `runtime.plan`); `layout` of
    its results; `not_fused`, why these are stored (see `passes.partition`). Work is left out where it depends on data: in branches and
    `while` loops."""
    names = {d.name: d for d in dims}
    numbers = {d: ["dim", n] for n, d in enumerate(dims)}
    found = []
    for node, times in _calls(graph, 1):
        fact: dict[str, Any] = {"layout": "; ".join(str(v.layout) for v in node.outputs if v.layout is not None)}
        fact["not_fused"] = [str(fallback) for v in node.outputs for value, fallback in not_fused if value == v.name]
        if times is not None:
            with suppress(CodegenError, ParseError):  # a size that only the model itself computes, or one that a loop reads from an array
                sizes = [as_dim(as_expr(parse_expr(text, names)) * as_expr(times)) for text in kernels[node].work]
                fact["work"] = {f.name: size_data(n, numbers, node.name) for f, n in zip(fields(Work), sizes, strict=True)}
        found.append(fact)
    return found


def _calls(graph: Graph, times: Dim | None) -> Iterator[tuple[Node, Dim | None]]:
    """The kernel nodes in program order, with the number of their calls; None where that depends on data."""
    for node in graph.nodes:
        if node.op is KERNEL:
            yield node, times
        elif node.op in (IF, LOOP):
            counted = node.op is LOOP and not node.attrs["condition"]
            inner = as_dim(as_expr(times) * as_expr(node.attrs["trips"])) if counted and times is not None else None
            for body in node.bodies:
                yield from _calls(body, inner)
