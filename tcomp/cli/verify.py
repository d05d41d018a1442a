"""`tcomp verify`: native code against the reference interpreter; with --proofs, schedules against isl."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tcomp.cli import options as opt, output
from tcomp.errors import InputError

_MODEL = "An ONNX model. With --proofs also an artifact, or a schedule that Schedule.to_json wrote."
_PROOFS = "Run nothing: prove every step of the kernels' schedules by exact dependence analysis."
_TOLERANCE = "Largest relative error. Default: by dtype, 1e-4 for float32."
_USUAL_SIZE = 3  # of symbolic dims: 1 would hide mistakes


def verify(
    model: Annotated[Path, opt.argument("MODEL", _MODEL)],
    *,
    full: Annotated[bool, opt.flag("--full", "Judge every pass and every kernel, even if the outputs agree.")] = False,
    tolerance: Annotated[float | None, opt.option("--tolerance", "X", _TOLERANCE, min=0)] = None,
    proofs: Annotated[bool, opt.flag("--proofs", _PROOFS)] = False,
    input: opt.Inputs = None,
    options: opt.CompilationOptions,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Compare native code with the reference interpreter on the same inputs.

    On a difference: the first pass that changes the result, or the first kernel that is compiled wrongly. Exit status: 0 if all
    agrees, 1 if not. The interpreter is slow; small sizes (`--dim`) make it bearable.

    With `--proofs`, each kernel's schedule is applied again to its plain loops, every step judged by isl. Exit status 2 if one is refused.
    """
    if proofs:
        if full or tolerance is not None or input or threads is not None:
            raise InputError("--proofs runs nothing", hint="leave out --full, --tolerance, --input and --threads")
        return _prove(model, options, as_json)
    from tcomp import verification
    from tcomp.cli.inputs import make_feeds
    from tcomp.pipeline import import_graph

    opt.check_model_file(model)
    with output.progress() as tell:
        tell("import", 0, 1)
        compiling = options.compile_options(threads=threads, progress=tell)
        graph = import_graph(model, compiling)
        feeds = make_feeds(graph.inputs, input, {}, seed, _USUAL_SIZE)
        found = verification.verify(graph, feeds.arrays, compiling, tolerance=tolerance, full=full)

    judged = {
        "outputs": [(asdict(c), c) for c in found.outputs],
        "passes": [({"name": p.name, "node": p.node}, p.worst) for p in found.passes],
        "kernels": [({"name": k.name, "operators": k.operators}, k.worst) for k in found.kernels],
    }
    if as_json:
        record: dict[str, Any] = {"ok": found.ok, "verdict": found.verdict(), "threads": found.threads, "repeatable": found.repeatable}
        record |= {title: [{**what, "error": c.error, "ok": c.ok} for what, c in rows] for title, rows in judged.items()}
        output.print_json(record | {"random_inputs": feeds.random, "dims": feeds.chosen})
    else:
        feeds.explain()
        for title, rows in zip(("output", "pass", "kernel"), judged.values(), strict=True):
            if rows:
                cells = [(what["name"], f"{c.error:.2e}", f"{c.tolerance:.0e}", "ok" if c.ok else "DIFFERS") for what, c in rows]
                output.table("", (title, "error>", "allowed>", ""), cells, ["" if c.ok else "red" for _, c in rows])
                output.line()
        output.line(found.verdict(), "green" if found.ok else "red")
    if not found.ok:
        raise typer.Exit(output.FINDING)


def _prove(path: Path, options: opt.CompilationOptions, as_json: bool) -> None:
    from tcomp.pipeline import compile_model
    from tcomp.runtime import read_artifact
    from tcomp.schedules.schedule import parse_source
    from tcomp.schedules.trace import JSON_LIMIT, read_json
    from tcomp.verification import SavedSchedule, prove_schedules, saved_schedules

    opt.check_file(path)
    is_trace = path.suffix == ".json"
    if options.given and (is_trace or opt.is_artifact(path)):
        raise InputError(f"{path} has been compiled: {options.given[0]} comes too late", hint="give the ONNX model")
    with output.progress() as tell:
        if is_trace:
            with open(path, "rb") as file:
                trace, kernel = read_json(file.read(JSON_LIMIT + 1))
            source = parse_source(kernel)
            saved = [SavedSchedule((source.name,), source, trace)]
        elif opt.is_artifact(path):
            saved = saved_schedules(read_artifact(path))
        else:
            opt.check_model_file(path)
            saved = saved_schedules(compile_model(path, options.compile_options(progress=tell))[0])
        proofs = list(prove_schedules(saved, tell))

    rows = list(zip(saved, proofs, strict=True))
    seconds, refused = sum(p.seconds for p in proofs), [p for p in proofs if not p.ok]
    proved = f"{sum(p.steps for p in proofs)} steps of {output.count(len(rows), 'kernel')} proved"
    verdict = f"{output.count(len(refused), 'kernel')} refused" if refused else proved
    if as_json:
        kernels = [
            {"nodes": s.nodes, "ok": p.ok, "refused": None if p.refused is None else str(p.refused)}
            | {name: getattr(p, name) for name in ("steps", "proved", "questions", "seconds")}
            for s, p in rows
        ]
        output.print_json({"ok": not refused, "verdict": verdict, "seconds": seconds, "kernels": kernels})
    else:
        cells = [
            (", ".join(s.nodes), f"{p.proved}/{p.steps}", p.questions, output.seconds(p.seconds), "proved" if p.ok else "REFUSED")
            for s, p in rows
        ]
        output.table("", ("kernel", "steps>", "asked of isl>", "time>", ""), cells, ["" if p.ok else "red" for p in proofs])
        for p in refused:
            output.line(f"\n{p.refused}", "red")
        output.line(f"\n{verdict} in {output.seconds(seconds)}", "red" if refused else "green")
    if refused:
        raise typer.Exit(output.USER_ERROR)
