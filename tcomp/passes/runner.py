"""The pass runner: applies passes in order; times, verifies and dumps each.

A graph may be two versions of one, for sizes where a condition holds, and for others: an IF (with the attribute `versions`) in which all of
the graph stands twice. Passes see each version as the whole graph that it is (`each_version`). Kernels and weights that both have in common
are compiled and stored once."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tcomp.errors import IRError, TcompError, UnsupportedError
from tcomp.ir.expr import Expr
from tcomp.ir.graph import IF, KERNEL, Graph, GraphBuilder, Node, Value, with_sizes
from tcomp.ir.text.printer import unused
from tcomp.ir.verify.graph import verify_graph
from tcomp.ops.movement import DIMS

GraphPass = Callable[[Graph], Graph]
VERSIONS = "versions"  # the attribute of an IF whose bodies are versions of the whole graph


@dataclass(frozen=True, slots=True)
class PassReport:
    """Statistics of one pass: its time, and the number of nodes (those of bodies included) before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def run_passes(
    graph: Graph,
    passes: Sequence[tuple[str, GraphPass]],
    *,
    verify: bool = False,
    dump: Path | None = None,
    on_pass: Callable[[PassReport], None] = lambda done: None,
) -> tuple[Graph, list[PassReport]]:
    """The graph after all passes, and a report on each. `verify` checks the graph before the first and after every pass; an error then
    names the pass. `dump` is a directory for the printed graphs (`00-input.txt`, `01-fold.txt`, ...) and what each pass changed
    (`01-fold.diff`). `on_pass` is called after each."""
    if verify:
        verify_graph(graph)
    before = "" if dump is None else str(graph)
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "00-input.txt").write_text(before, encoding="utf-8")
    reports: list[PassReport] = []
    for number, (name, function) in enumerate(passes, 1):
        nodes, start = count_nodes(graph), time.perf_counter()
        try:
            graph = function(graph)
        except RecursionError as error:
            raise UnsupportedError("expressions or graphs are nested too deeply", where=f"pass `{name}`") from error
        reports.append(PassReport(name, time.perf_counter() - start, nodes, count_nodes(graph)))
        if dump is not None:
            after, stem = str(graph), f"{number:02}-{name}"
            changes = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"{number - 1:02}", stem)
            (dump / f"{stem}.txt").write_text(after, encoding="utf-8")
            (dump / f"{stem}.diff").write_text("".join(changes), encoding="utf-8")
            before = after
        if verify:
            try:
                verify_graph(graph)
            except TcompError as error:
                what, hint = f"pass `{name}` made a malformed graph: {error.what}", "report this as a bug of tcomp"
                raise error.restated(IRError, what=what, hint=hint) from error
        on_pass(reports[-1])
    return graph, reports


def versions(condition: Expr, then: Graph, otherwise: Graph) -> Graph:
    """One graph of two that have the same inputs and outputs: `then` runs where a condition on the dims of the inputs holds."""
    inputs, outputs = then.inputs, tuple(Value(v.name, v.dtype, v.shape) for v in then.outputs)
    holds = GraphBuilder("condition")
    (result,) = holds.add(DIMS, (), {"dims": (condition,), "shape": (), "dtype": "bool"})
    decision = Value(unused("enough", {v.name for v in (*inputs, *outputs)}), "bool", ())
    bodies = tuple(with_sizes(replace(body, checks={}, host=None), {}) for body in (then, otherwise))  # with values of their own
    nodes = (
        Node(KERNEL, (), (decision,), name="enough", bodies=(holds.build([result]),)),
        Node(IF, (decision, *inputs), outputs, {VERSIONS: True}, "versions", bodies),
    )
    return Graph(then.name, inputs, outputs, nodes, {}, then.checks, then.host)


def each_version(function: GraphPass) -> GraphPass:
    """A pass over each version of a graph that has such."""

    def apply(graph: Graph) -> Graph:
        if not (graph.nodes and VERSIONS in graph.nodes[-1].attrs):
            return function(graph)
        *others, node = graph.nodes
        return replace(graph, nodes=(*others, replace(node, bodies=tuple(map(function, node.bodies)))))

    return apply


def count_nodes(graph: Graph) -> int:
    """Nodes of the graph and of all bodies."""
    return sum(1 + sum(map(count_nodes, node.bodies)) for node in graph.nodes)
