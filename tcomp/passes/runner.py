"""The pass runner: applies passes in order; times, verifies and dumps each."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcomp.errors import IRError, TcompError, UnsupportedError
from tcomp.ir.graph import Graph
from tcomp.ir.verify.graph import verify_graph

GraphPass = Callable[[Graph], Graph]


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


def count_nodes(graph: Graph) -> int:
    """Nodes of the graph and of all bodies."""
    return sum(1 + sum(map(count_nodes, node.bodies)) for node in graph.nodes)
