"""What an artifact says of its kernels beside their code: work, layout, why the result was not fused with its reader. For profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tcomp.backends.kernel import CompiledKernel
from tcomp.codegen.sizes import size_data
from tcomp.errors import CodegenError, ParseError
from tcomp.ir.expr import Dim, Expr, as_dim, as_expr
from tcomp.ir.fallback import Fallback
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, Node
from tcomp.ir.text.parser import parse_expr
from tcomp.schedules.cost.roofline import Work


def kernel_facts(
    graph: Graph, dims: Sequence[Expr], kernels: Mapping[Node, CompiledKernel], not_fused: Sequence[tuple[str, Fallback]]
) -> list[dict[str, Any]]:
    """JSON for each kernel, in order: the fields of `Work` for all its calls of a run, as sizes over the dims (see `runtime.plan`);
    `layout` of its results; `not_fused`, why these are stored (see `passes.partition`). Work is left out where it depends on data: in branches and `while` loops.
    """
    names = {d.name: d for d in dims}
    numbers = {d: ["dim", n] for n, d in enumerate(dims)}
    found = []
    for node, times in _calls(graph, 1):
        fact: dict[str, Any] = {"layout": "; ".join(str(v.layout) for v in node.outputs if v.layout is not None)}
        fact["not_fused"] = [str(fallback) for v in node.outputs for value, fallback in not_fused if value == v.name]
        if times is not None:
            try:
                sizes = [as_dim(as_expr(parse_expr(text, names)) * as_expr(times)) for text in kernels[node].work]
                fact["work"] = {f.name: size_data(n, numbers, node.name) for f, n in zip(fields(Work), sizes, strict=True)}
            except (CodegenError, ParseError):
                pass  # a size that only the model itself computes, or one that a loop reads from an array
        found.append(fact)
    return found


def _calls(graph: Graph, times: Dim | None) -> Iterator[tuple[Node, Dim | None]]:
    """The kernel nodes in program order, with the number of their calls; None where that depends on data."""
    for node in graph.nodes:
        if node.op is KERNEL:
            yield node, times
        elif node.op in (IF, LOOP):
            inner: Dim | None = None
            if node.op is LOOP and times is not None and not node.attrs["condition"]:
                inner = as_dim(as_expr(times) * as_expr(node.attrs["trips"]))
            for body in node.bodies:
                yield from _calls(body, inner)
