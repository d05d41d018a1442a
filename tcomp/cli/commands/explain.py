"""`tcomp explain`: which kernels a model becomes, and why not fewer."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import check_model_file
from tcomp.cli.options import CompilationOptions, Json, OnnxModel


def explain(
    model: OnnxModel,
    *,
    options: CompilationOptions,
    schedules: Annotated[bool, typer.Option("--schedules", help="Also show the steps of every kernel's schedule.")] = False,
    as_json: Json = False,
) -> None:
    """Show the kernels a model becomes, which edges were not fused and why, and what the passes did and did not do."""
    from tcomp.backends.kernel import build_loops
    from tcomp.options import Report
    from tcomp.passes.runner import run_passes
    from tcomp.pipeline import graph_passes, import_graph, kernel_nodes

    check_model_file(model)
    report = Report()
    with output.progress() as tell:
        tell("import", 0, 1)
        compiling = options.compile_options()
        graph = import_graph(model, compiling)
        passes = graph_passes(compiling, report)
        number = itertools.count(1)
        graph, reports = run_passes(graph, passes, on_pass=lambda done: tell(done.name, next(number), len(passes)))
    notes = [f"{node}: {text}" for node, texts in report.notes.lines.items() for text in texts]
    kernels: list[dict[str, Any]] = []
    for node in kernel_nodes(graph):
        schedule = build_loops(node.bodies[0], "kernel", compiling.backend)
        notes += [f"{node.name}: {text}" for text in schedule.kernel.notes]
        outputs = [f"{v.dtype}[{', '.join(map(str, v.shape))}]" + (f" {v.layout}" if v.layout else "") for v in node.outputs]
        kernel = {"name": node.name, "operators": [inner.op.name for inner in node.bodies[0].nodes], "outputs": outputs}
        kernels.append(kernel | {"schedule": [str(step) for step in schedule.trace]})
    done = [{name: getattr(r, name) for name in ("name", "seconds", "nodes_before", "nodes_after")} for r in reports]
    if as_json:
        output.print_json({"kernels": kernels, "not_fused": report.edges_not_fused, "passes": done, "notes": notes})
        return
    rows = [(k["name"], " + ".join(k["operators"]), "; ".join(k["outputs"])) for k in kernels]
    output.table(output.count(len(rows), "kernel"), ("kernel", "operators", "result"), rows)
    output.line()
    times = [(r["name"], output.seconds(r["seconds"]), r["nodes_before"], r["nodes_after"]) for r in done]
    output.table("passes (nodes, those of kernels included)", ("pass", "time>", "before>", "after>"), times)
    lists = [(f"schedule of {k['name']}", k["schedule"]) for k in kernels] if schedules else []
    lists += [(f"{title} ({len(x)})", x) for title, x in (("edges not fused", report.edges_not_fused), ("notes", notes)) if x]
    for title, lines in lists:
        output.line()
        output.line(title, "bold")
        for text in lines:
            output.line(f"  {text}")
