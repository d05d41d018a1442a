"""`tcomp check`: what can be compiled, before any work."""

from __future__ import annotations

from collections import Counter

import typer

from tcomp.cli import output
from tcomp.cli.files import check_model_file
from tcomp.cli.options import Dims, Json, OnnxModel, Shapes, Values
from tcomp.cli.syntax import parse_dims, parse_shapes
from tcomp.errors import UnsupportedError

_STYLES = {"missing": "red", "unchecked": "yellow", "decomposed": "cyan"}


def check(model: OnnxModel, dim: Dims = None, shape: Shapes = None, value: Values = None, as_json: Json = False) -> None:
    """List every node of a model: supported, decomposed into simpler operators, or missing.

    A node that depends on a missing one is "unchecked". Exit status: 0 if all nodes can be compiled, 1 if some cannot.
    """
    from tcomp.cli.inputs import read_values
    from tcomp.frontends.onnx.importer import check_model

    check_model_file(model)
    try:
        records = check_model(model, parse_shapes(shape), parse_dims(dim), read_values(value))
    except UnsupportedError as error:  # something else than a node, such as an input of strings
        if as_json:
            output.print_json({"ok": False, "nodes": [], "missing": [{"where": error.where, "reason": error.what}]})
        else:
            output.line(str(error), "red")
        raise typer.Exit(1) from None
    nodes = [
        {"name": r.name, "op": f"{r.domain}.{r.op_type}".lstrip("."), "opset": r.opset, "dtypes": list(r.dtypes)}
        | {"status": r.status, "reason": r.reason}
        for r in records
    ]
    counts = Counter(r.status for r in records)
    bad = counts["missing"] + counts["unchecked"]
    if as_json:
        output.print_json({"ok": not bad, "counts": counts, "missing": [n for n in nodes if n["status"] == "missing"], "nodes": nodes})
    else:
        rows = [(n["name"], n["op"], n["opset"], " ".join(r.dtypes), r.status, r.reason) for n, r in zip(nodes, records, strict=True)]
        columns = ("node", "operator", "opset>", "inputs", "status", "why")
        output.table("", columns, rows, [_STYLES.get(r.status, "") for r in records])
        output.line()
        output.line(f"{output.count(len(records), 'node')}: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "none"))
        for status in ("missing", "decomposed"):
            if kinds := Counter(n["op"] for n in nodes if n["status"] == status):
                output.line(f"  {status}: " + ", ".join(f"{op} ({n})" for op, n in kinds.most_common()), _STYLES[status])
        output.line("cannot be compiled" if bad else "can be compiled", "red" if bad else "green")
    if bad:
        raise typer.Exit(1)
