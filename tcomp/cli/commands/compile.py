"""`tcomp compile`: ONNX model -> artifact, and the text of its stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tcomp.cli import output
from tcomp.cli.files import check_file, check_model_file, check_writable
from tcomp.cli.options import STAGES, CompilationOptions, Json, OnnxModel, Threads, Tuned, option
from tcomp.cli.syntax import parse_choices
from tcomp.errors import InputError

_OUT = "The artifact. Default: MODEL.tcomp here."


def compile(
    model: OnnxModel,
    *,
    out: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_OUT, show_default=False)] = None,
    options: CompilationOptions,
    threads: Threads = None,
    database: Tuned = None,
    emit: Annotated[str | None, option("--emit", "STAGES", f"Also write the text of stages: some of {','.join(STAGES)}.")] = None,
    emit_to: Annotated[str | None, option("--emit-to", "DIR", "Where: a folder, or - for stdout. Default: next to the artifact.")] = None,
    as_json: Json = False,
) -> None:
    """Compile an ONNX model to native code.

    Writes one file, MODEL.tcomp: code, weights and signature. `--emit` writes the listings MODEL.STAGE.txt next to it.
    """
    from tcomp.api import with_records
    from tcomp.pipeline import compile_model
    from tcomp.runtime.files import replacing

    check_model_file(model)
    if database is not None:
        check_file(database, "--database")
    out = out or Path(model.stem + ".tcomp")
    stages = parse_choices(emit, STAGES, "--emit")
    if emit_to is not None and not stages:
        raise InputError("--emit-to says where, but nothing is emitted", hint=f"--emit {','.join(STAGES)}")
    compiling = with_records(options.compile_options(threads=threads, emit=stages), database)
    machine = compiling.backend.target
    to_stdout = emit_to == "-"
    folder = out.parent if emit_to is None or to_stdout else Path(emit_to)
    listings = {stage: folder / f"{out.stem}.{stage}.txt" for stage in stages if not to_stdout}
    for path in (out, *listings.values()):
        check_writable(path)
        if path.exists() and path.samefile(model):
            raise InputError(f"{path} is the model itself", hint="give another name with -o")

    with replacing(out, *listings.values(), error=InputError) as (file, *texts):
        with output.progress() as tell:
            artifact, report = compile_model(model, replace(compiling, progress=tell, file=file))
        for stage, listing in zip(listings, texts, strict=True):
            listing.write(report.stages[stage].encode())

    reasons = Counter(text for _, text in report.not_followed)
    if as_json:
        record = {"artifact": out, "bytes": len(artifact.image), "target": machine, "kernels": report.kernels, "seconds": report.seconds}
        record |= {"precision": machine.precision} if machine.precision is not None else {}
        record |= {"distinct_kernels": report.distinct_kernels, "arena_bytes": report.arena, "listings": listings}
        if database is not None:
            record |= {"tuned": report.tuned, "not_followed": report.not_followed}
        output.print_json(record | ({"stages": {s: report.stages[s] for s in stages}} if to_stdout else {}))
        return
    for stage in stages if to_stdout else ():
        print(report.stages[stage])
    say = output.message if to_stdout else output.line  # listings on stdout are left alone
    say(f"compiled {model} for {machine}")
    if machine.precision is not None:
        say(f"  float32 products of matrices in {machine.precision}")
    kernels = f"{output.count(report.kernels, 'kernel')}, {report.distinct_kernels} distinct; {output.size(report.arena)} of workspace"
    say(f"  {kernels}; {output.seconds(sum(report.seconds.values()))} ({output.stages(report.seconds)})")
    if database is not None:
        say(f"  {output.count(report.tuned, 'kernel')} scheduled as {database} says")
    for text, number in reasons.items():
        say(f"  {output.count(number, 'kernel')}: {text}", "yellow")
    say(f"  wrote {out} ({output.size(len(artifact.image))})")
    for path in listings.values():
        say(f"  wrote {path}")
