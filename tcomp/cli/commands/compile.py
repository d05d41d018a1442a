"""`tcomp compile`: ONNX model -> artifact, and the text of its stages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tcomp.cli import output
from tcomp.cli.files import check_file, check_model_file, check_writable, replacing
from tcomp.cli.options import (
    STAGES,
    Arch,
    Dims,
    Direct,
    Json,
    OnnxModel,
    Precision,
    Shapes,
    TargetName,
    Threads,
    Tuned,
    Values,
    parse_choices,
    parse_dims,
    parse_shapes,
    parse_target,
)
from tcomp.errors import InputError


def compile(
    model: OnnxModel,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The artifact. Default: MODEL.tcomp here.", show_default=False)
    ] = None,
    target: TargetName = None,
    arch: Arch = None,
    precision: Precision = None,
    dim: Dims = None,
    shape: Shapes = None,
    value: Values = None,
    threads: Threads = None,
    database: Tuned = None,
    direct: Direct = False,
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="STAGES", help=f"Also write the text of stages: some of {','.join(STAGES)}.", show_default=False),
    ] = None,
    emit_to: Annotated[
        str | None,
        typer.Option(
            "--emit-to", metavar="DIR", help="Where: a folder, or - for stdout. Default: beside the artifact.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile an ONNX model to native code.

    Writes one file, MODEL.tcomp: code, weights and signature. `--emit` writes the listings MODEL.STAGE.txt beside it.
    """
    from tcomp.api import with_records
    from tcomp.cli.inputs import read_values
    from tcomp.options import CompileOptions
    from tcomp.pipeline import compile_model

    check_model_file(model)
    if database is not None:
        check_file(database, "--database")
    out = out or Path(model.stem + ".tcomp")
    stages = parse_choices(emit, STAGES, "--emit")
    if emit_to is not None and not stages:
        raise InputError("--emit-to says where, but nothing is emitted", hint=f"--emit {','.join(STAGES)}")
    ranges, shapes, values, machine = parse_dims(dim), parse_shapes(shape), read_values(value), parse_target(target, arch, precision)
    to_stdout = emit_to == "-"
    folder = out.parent if emit_to is None or to_stdout else Path(emit_to)
    listings = {stage: folder / f"{out.stem}.{stage}.txt" for stage in stages if not to_stdout}
    for path in (out, *listings.values()):
        check_writable(path)
        if path.exists() and path.samefile(model):
            raise InputError(f"{path} is the model itself", hint="give another name with -o")

    with replacing(out, *listings.values()) as (file, *texts):
        with output.progress() as tell:
            options = CompileOptions(machine, shapes, ranges, threads, values, direct, emit=stages, progress=tell, file=file)
            artifact, report = compile_model(model, with_records(options, database))
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
    times = ", ".join(f"{stage} {output.seconds(s)}" for stage, s in report.seconds.items())
    say = output.message if to_stdout else output.line  # listings on stdout are left alone
    kernels = f"{output.count(report.kernels, 'kernel')}, {report.distinct_kernels} distinct"
    arena = f"{output.size(report.arena)} of workspace" if isinstance(report.arena, int) else f"workspace of {report.arena} bytes"
    say(f"compiled {model} for {machine}")
    if machine.precision is not None:
        say(f"  float32 products of matrices in {machine.precision}")
    say(f"  {kernels}; {arena}; {output.seconds(sum(report.seconds.values()))} ({times})")
    if database is not None:
        say(f"  {output.count(report.tuned, 'kernel')} scheduled as {database} says")
    for text, number in reasons.items():
        say(f"  {output.count(number, 'kernel')}: {text}", "yellow")
    say(f"  wrote {out} ({output.size(len(artifact.image))})")
    for path in listings.values():
        say(f"  wrote {path}")
