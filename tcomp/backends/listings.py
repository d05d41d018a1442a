"""The stages of a compilation as text, for `--emit`, `tcomp explain` and `TCOMP_DUMP`: graph, tensor expressions, schedule, loops, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tcomp.backends.kernel import CompiledKernel, build_loops
from tcomp.backends.protocol import Backend
from tcomp.ir.graph import Graph, Node
from tcomp.ir.te import print_te
from tcomp.schedules.knobs import Decisions, Knobs
from tcomp.schedules.lowering import tensors_of


def listings(
    emit: Sequence[str],
    graph: Graph,
    texts: Mapping[Node, str],
    compiled: Mapping[str, CompiledKernel],
    backend: Backend,
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
                schedule = build_loops(body, symbol, backend, Knobs(decisions.get(text, {})))
                match stage:
                    case "schedule":
                        listing = str(schedule.trace)
                    case "loops":
                        listing = str(schedule.kernel)
                    case _:
                        listing = backend.listing(stage, schedule)
            comment = {"c": "//", "cuda": "//", "ptx": "//", "schedule": "#"}.get(stage, ";")
            result[stage].append(f"{comment} {node.name}\n{listing}")
    return {stage: "\n".join(listings) for stage, listings in result.items()}
