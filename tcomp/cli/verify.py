"""`tcomp verify`: native code against the reference interpreter."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import check_model_file
from tcomp.cli.options import Dims, Inputs, Json, OnnxModel, Seed, Shapes, TargetName, Threads, parse_dims, parse_shapes

_USUAL_SIZE = 3  # of symbolic dims: 1 would hide mistakes


def verify(
    model: OnnxModel,
    full: Annotated[bool, typer.Option("--full", help="Judge every pass and every kernel, even if the outputs agree.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="X", min=0, help="Largest relative error. Default: by dtype, 1e-4 for float32.", show_default=False
        ),
    ] = None,
    input: Inputs = None,
    dim: Dims = None,
    shape: Shapes = None,
    target: TargetName = None,
    threads: Threads = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare native code with the reference interpreter on the same inputs.

    On a difference: the first pass that changes the result, or the first kernel that is compiled wrongly. Exit status: 0 if all
    agrees, 1 if not. The interpreter is slow; small sizes (`--dim`) make it bearable.
    """
    from tcomp import verification
    from tcomp.cli.inputs import make_feeds, read_inputs
    from tcomp.frontends.onnx import import_model
    from tcomp.target import Target

    check_model_file(model)
    with output.progress() as tell:
        tell("import", 0, 1)
        graph = import_model(model, parse_shapes(shape), parse_dims(dim))
        feeds = make_feeds(graph.inputs, read_inputs(input, graph.inputs), {}, seed, _USUAL_SIZE)
        machine = Target.parse(target or "cpu")
        found = verification.verify(graph, machine, feeds.arrays, tolerance=tolerance, full=full, threads=threads, progress=tell)

    if as_json:
        record: dict[str, Any] = {"ok": found.ok, "verdict": found.verdict(), "threads": found.threads, "repeatable": found.repeatable}
        record["outputs"] = [{**asdict(c), "ok": c.ok} for c in found.outputs]
        record["passes"] = [{"name": p.name, "error": p.worst.error, "ok": p.worst.ok, "node": p.node} for p in found.passes]
        record["kernels"] = [
            {"name": k.name, "operators": k.operators, "error": k.worst.error, "ok": k.worst.ok} for k in found.kernels
        ]
        record |= {"random_inputs": feeds.random, "dims": feeds.chosen}
        output.print_json(record)
    else:
        feeds.explain()
        sections = (
            ("output", [(c.name, c) for c in found.outputs]),
            ("pass", [(p.name, p.worst) for p in found.passes]),
            ("kernel", [(k.name, k.worst) for k in found.kernels]),
        )
        for title, rows in sections:
            if rows:
                cells = [(name, f"{c.error:.2e}", f"{c.tolerance:.0e}", "ok" if c.ok else "DIFFERS") for name, c in rows]
                output.table("", (title, "error>", "allowed>", ""), cells, ["" if c.ok else "red" for _, c in rows])
                output.line()
        output.line(found.verdict(), "green" if found.ok else "red")
    if not found.ok:
        raise typer.Exit(1)
