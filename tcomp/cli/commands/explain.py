"""`tcomp explain`: which kernels a model becomes, and why not fewer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from tcomp.cli import output
from tcomp.cli.files import check_model_file
from tcomp.cli.options import CompilationOptions, Json, OnnxModel

if TYPE_CHECKING:
    from tcomp.ir.graph import Value


def explain(
    model: OnnxModel,
    *,
    options: CompilationOptions,
    schedules: Annotated[bool, typer.Option("--schedules", help="Also show the steps of every kernel's schedule.")] = False,
    as_json: Json = False,
) -> None:
    """Show the kernels a model becomes, which edges were not fused and why, and what the passes did and did not do."""
    from tcomp.backends.kernel import build_loops
    from tcomp.frontends.onnx import import_model
    from tcomp.options import Report
    from tcomp.passes.runner import run_passes
    from tcomp.pipeline import graph_passes, kernel_nodes

    check_model_file(model)
    report = Report()
    with output.progress() as tell:
        tell("import", 0, 1)
        graph = import_model(model, options.shapes, options.dims, options.values)
        compiling = options.compile_options()
        passes = graph_passes(compiling, report)
        number = itertools.count(1)
        graph, reports = run_passes(graph, passes, on_pass=lambda done: tell(done.name, next(number), len(passes)))
    nodes = list(kernel_nodes(graph))
    kernels = [(n.name, [inner.op.name for inner in n.bodies[0].nodes], [_type(v) for v in n.outputs]) for n in nodes]
    made = [(n.name, build_loops(n.bodies[0], "kernel", compiling.backend)) for n in nodes]
    notes = [f"{node}: {text}" for node, texts in report.notes.lines.items() for text in texts]
    notes += [f"{name}: {text}" for name, s in made for text in s.kernel.notes]
    if as_json:
        passes_done = [
            {"name": r.name, "seconds": r.seconds, "nodes_before": r.nodes_before, "nodes_after": r.nodes_after} for r in reports
        ]
        kernel_records = [
            {"name": name, "operators": operators, "outputs": outputs, "schedule": [str(step) for step in s.trace]}
            for (name, operators, outputs), (_, s) in zip(kernels, made, strict=True)
        ]
        output.print_json({"kernels": kernel_records, "not_fused": report.edges_not_fused, "passes": passes_done, "notes": notes})
        return
    rows = [(name, " + ".join(operators), "; ".join(outputs)) for name, operators, outputs in kernels]
    output.table(output.count(len(rows), "kernel"), ("kernel", "operators", "result"), rows)
    output.line()
    times = [(r.name, output.seconds(r.seconds), r.nodes_before, r.nodes_after) for r in reports]
    output.table("passes (nodes, those of kernels included)", ("pass", "time>", "before>", "after>"), times)
    for name, s in made if schedules else ():
        output.line()
        output.line(f"schedule of {name}", "bold")
        for step in s.trace:
            output.line(f"  {step}")
    for title, lines in (("edges not fused", report.edges_not_fused), ("notes", notes)):
        if lines:
            output.line()
            output.line(f"{title} ({len(lines)})", "bold")
            for text in lines:
                output.line(f"  {text}")


def _type(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]" + (f" {value.layout}" if value.layout else "")
