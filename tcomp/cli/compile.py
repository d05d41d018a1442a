"""`tcomp check`: what can be compiled; `tcomp compile`: ONNX model -> artifact; `tcomp explain`: which kernels a model becomes, and why."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import options as opt, output
from tcomp.errors import CodegenError, InputError, IRError, TcompError, UnsupportedError, printable

if TYPE_CHECKING:
    from tcomp.frontends.onnx.importer import NodeRecord

STAGES = ("graph", "te", "schedule", "loops", "llvm", "asm", "cuda", "ptx", "sass-stats")
_EMIT_TO = "The folder for these texts, or - for stdout. Default: the folder of the artifact."
_MAX_SECONDS = "Stop compiling after this time (60s, 10m), for untrusted models."
_MAX_MEMORY = "Stop compiling above this memory (4G, 800M), for untrusted models."
_STYLES = {"missing": "red", "unchecked": "yellow", "decomposed": "cyan", "host step": "magenta"}


def check(model: opt.OnnxModel, *, options: opt.CompilationOptions, as_json: opt.Json = False) -> None:
    """List what tcomp supports of a model, and everything that is missing.

    Each node is supported, decomposed into simpler operators, a host step (strings, images), or missing; a node that depends on a missing
    one is "unchecked". If none is missing, all passes run for the target and memory is planned, so that whatever `tcomp compile` would
    refuse is reported here. Exit status: 0 if the model can be compiled, 1 if not.
    """
    from tcomp.pipeline import check_graph, examine_model

    opt.check_model_file(model)
    compiling = options.compile_options()
    refused: TcompError | None = None
    records: list[NodeRecord] = []
    try:
        graph, records = examine_model(model, compiling)
        if graph is not None:
            check_graph(graph, compiling)
    except (UnsupportedError, CodegenError, IRError) as error:  # something else than a node, such as a size that nothing tells
        refused = error
    nodes = [
        {"name": r.name, "op": f"{r.domain}.{r.op_type}".lstrip("."), "opset": r.opset, "dtypes": list(r.dtypes)}
        | {"status": r.status, "reason": r.reason}
        for r in records
    ]
    counts = Counter(r.status for r in records)
    bad = refused is not None or counts["missing"] + counts["unchecked"] > 0
    if as_json:
        missing = [n for n in nodes if n["status"] == "missing"]
        missing += [{"where": refused.where, "reason": refused.what}] if refused is not None else []
        output.print_json({"ok": not bad, "counts": counts, "missing": missing, "nodes": nodes})
    else:
        if records:
            rows = [(n["name"], n["op"], n["opset"], " ".join(r.dtypes), r.status, r.reason) for n, r in zip(nodes, records, strict=True)]
            columns = ("node", "operator", "opset>", "inputs", "status", "why")
            output.table("", columns, rows, [_STYLES.get(r.status, "") for r in records])
            output.line(f"\n{output.count(len(records), 'node')}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
        for status in ("missing", "decomposed", "host step"):
            if kinds := Counter(n["op"] for n in nodes if n["status"] == status):
                output.line(f"  {status}: " + ", ".join(f"{op} ({n})" for op, n in kinds.most_common()), _STYLES[status])
        if refused is not None:
            output.line(str(refused), "red")
        output.line("cannot be compiled" if bad else "can be compiled", "red" if bad else "green")
    if bad:
        raise typer.Exit(output.FINDING)


def compile(
    model: opt.OnnxModel,
    *,
    out: Annotated[Path | None, opt.out_file("The artifact. Default: MODEL.tcomp here.")] = None,
    options: opt.CompilationOptions,
    threads: opt.Threads = None,
    database: opt.Tuned = None,
    max_seconds: Annotated[str | None, opt.option("--max-seconds", "S", _MAX_SECONDS)] = None,
    max_memory: Annotated[str | None, opt.option("--max-memory", "BYTES", _MAX_MEMORY)] = None,
    emit: Annotated[str | None, opt.option("--emit", "STAGES", f"Also write the text of stages: some of {','.join(STAGES)}.")] = None,
    emit_to: Annotated[str | None, opt.option("--emit-to", "DIR", _EMIT_TO)] = None,
    as_json: opt.Json = False,
) -> None:
    """Compile an ONNX model to native code.

    Writes one file, MODEL.tcomp: code, weights and signature. `--emit` writes the listings MODEL.STAGE.txt next to it.
    """
    from tcomp.api import compile_limited
    from tcomp.passes.quantized_weights import summary
    from tcomp.runtime.artifact import replacing

    opt.check_model_file(model)
    if database is not None:
        opt.check_file(database, "--database")
    out, stages = out or Path(opt.stem(model) + ".tcomp"), opt.parse_choices(emit, STAGES, "--emit")
    if emit_to is not None and not stages:
        raise InputError("--emit-to says where, but nothing is emitted", hint=f"--emit {','.join(STAGES)}")
    seconds = None if max_seconds is None else opt.parse_time(max_seconds, "--max-seconds")
    memory = None if max_memory is None else opt.parse_bytes(max_memory, "--max-memory")
    compiling = options.compile_options(threads=threads, emit=stages)
    machine = compiling.backend.target
    to_stdout = emit_to == "-"
    folder = out.parent if emit_to is None or to_stdout else Path(emit_to)
    listings = {stage: folder / f"{out.stem}.{stage}.txt" for stage in stages if not to_stdout}
    for path in (out, *listings.values()):
        opt.check_writable(path)
        if path.exists() and path.samefile(model):
            raise InputError(f"{path} is the model itself", hint="give another name with -o")

    with replacing(out, *listings.values(), error=InputError) as (file, *texts):
        with output.progress() as tell:
            artifact, report = compile_limited(model, replace(compiling, progress=tell, file=file), database, seconds, memory)
        for stage, listing in zip(listings, texts, strict=True):
            listing.write(report.stages[stage].encode())

    if as_json:
        record = {"artifact": out, "bytes": len(artifact.image), "target": machine, "kernels": report.kernels, "seconds": report.seconds}
        record |= {"precision": machine.precision} if machine.precision is not None else {}
        if compiling.weights is not None:
            record |= {"weights": [asdict(w) for w in report.quantized]}
        record |= {"distinct_kernels": report.distinct_kernels, "arena_bytes": report.arena, "listings": listings}
        if database is not None:
            record |= {"tuned": report.tuned, "not_followed": report.not_followed}
        return output.print_json(record | ({"stages": {s: report.stages[s] for s in stages}} if to_stdout else {}))
    for stage in stages if to_stdout else ():
        print(printable(report.stages[stage]))
    say = output.message if to_stdout else output.line  # stdout holds the listings alone
    say(f"compiled {model} for {machine}")
    if machine.precision is not None:
        say(f"  {output.PRODUCTS_IN.format(machine.precision)}")
    kernels = f"{output.count(report.kernels, 'kernel')}, {report.distinct_kernels} distinct; {output.size(report.arena)} of workspace"
    say(f"  {kernels}; {output.seconds(sum(report.seconds.values()))} ({output.stages(report.seconds)})")
    if compiling.weights is not None:
        say(f"  {summary(report.quantized)}")
    if database is not None:
        say(f"  {output.count(report.tuned, 'kernel')} scheduled as {database} says")
    for text, number in Counter(text for _, text in report.not_followed).items():
        say(f"  {output.count(number, 'kernel')}: {text}", "yellow")
    say(f"  wrote {out} ({output.size(len(artifact.image))})")
    for path in listings.values():
        say(f"  wrote {path}")


def explain(
    model: opt.OnnxModel,
    *,
    options: opt.CompilationOptions,
    schedules: Annotated[bool, opt.flag("--schedules", "Also show the steps of every kernel's schedule.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show the kernels a model becomes, which edges were not fused and why, and what the passes did and did not do."""
    from tcomp.backends.kernel import build_loops
    from tcomp.options import Report
    from tcomp.passes.runner import run_passes
    from tcomp.pipeline import graph_passes, import_graph, kernel_nodes

    opt.check_model_file(model)
    report = Report()
    with output.progress() as tell:
        tell("import", 0, 1)
        compiling, number = options.compile_options(), itertools.count(1)
        graph, passes = import_graph(model, compiling), graph_passes(compiling, report)
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
    host = [] if graph.host is None else [
        {"name": step.name, "operator": step.operator, "when": when}
        for when, steps in (("before", graph.host.before), ("after", graph.host.after))
        for step in steps
        if step.operator != "Constant"
    ]  # fmt: skip
    if as_json:
        return output.print_json(
            {"host_steps": host, "kernels": kernels, "not_fused": report.edges_not_fused, "passes": done, "notes": notes}
        )
    rows = [(k["name"], " + ".join(k["operators"]), "; ".join(k["outputs"])) for k in kernels]
    output.table(output.count(len(rows), "kernel"), ("kernel", "operators", "result"), rows)
    if host:
        steps = [(step["name"], step["operator"], step["when"]) for step in host]
        output.table(f"\n{output.count(len(host), 'host step')}, by NumPy", ("step", "operator", "when"), steps)
    times = [(r["name"], output.seconds(r["seconds"]), r["nodes_before"], r["nodes_after"]) for r in done]
    output.table("\npasses (nodes, those of kernels included)", ("pass", "time>", "before>", "after>"), times)
    lists = [(f"schedule of {k['name']}", k["schedule"]) for k in kernels] if schedules else []
    lists += [(f"{title} ({len(x)})", x) for title, x in (("edges not fused", report.edges_not_fused), ("notes", notes)) if x]
    for title, lines in lists:
        output.line(f"\n{title}", "bold")
        for text in lines:
            output.line(f"  {text}")
