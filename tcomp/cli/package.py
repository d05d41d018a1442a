"""`tcomp package`: a compiled model as something that others install."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

from tcomp.cli import options as opt, output
from tcomp.errors import InputError

FORMATS = ("c", "wheel", "oci", "wasm")
_WEIGHTS = ("inside", "beside")
_WHERE = "Where weights are: `inside` the library or wheel, or in a file `beside` it (always for wasm)."
_TOKENIZER = "The folder with the tokenizer of a language model, for oci. Default: the folder of the model, if it has a tokenizer.json."
_NAME = "Name of the package and its functions: letters, digits, underscores. Default: from the name of the file."


def package(
    model: opt.Packaged,
    *,
    format: Annotated[str | None, opt.option("--format", "FORMAT", f"The kind of package: {', '.join(FORMATS)}.")] = None,
    out: Annotated[Path | None, opt.out_file("The new folder. Default: NAME-FORMAT here.")] = None,
    name: Annotated[str | None, opt.option("--name", "NAME", _NAME)] = None,
    version: Annotated[str, opt.option("--version", "VERSION", "Version of the package.", show_default=True)] = "1.0",
    weights_at: Annotated[str, opt.option("--weights-at", "WHERE", _WHERE, show_default=True)] = "inside",
    tokenizer: Annotated[Path | None, opt.option("--tokenizer", "FOLDER", _TOKENIZER)] = None,
    options: opt.CompilationOptions,
    threads: opt.Threads = None,
    database: opt.Tuned = None,
    as_json: opt.Json = False,
) -> None:
    """Package an ONNX model or an artifact for programs that run without tcomp.

    c: a folder with a typed header, a shared and a static library that need only the C library, an example, and files for CMake and
    pkg-config. wheel: a package for pip that needs only NumPy (`import NAME; NAME.run(x)`). oci: a folder from which container engines
    build an image that runs `tcomp serve`, with the tokenizer of a language model. wasm: a WebAssembly module for Node and browsers, with
    a page that tries it on a picture.
    """
    from tcomp.api import with_records
    from tcomp.cli.inputs import open_model
    from tcomp.generation.folder import TOKENIZER
    from tcomp.generation.slots import continues_text
    from tcomp.pipeline import compile_model
    from tcomp.shipping.c_interface import package_name
    from tcomp.shipping.c_package import check_version, write_c_package
    from tcomp.shipping.container import write_container
    from tcomp.shipping.folders import check_new_folder
    from tcomp.shipping.linker import check_packaged
    from tcomp.shipping.wasm_package import write_wasm_package
    from tcomp.shipping.wheel import write_wheel

    if format is None:
        raise InputError("which kind of package is not said", hint=f"--format {FORMATS[0]}, or one of {', '.join(FORMATS[1:])}")
    for chosen, known, where in ((format, FORMATS, "--format"), (weights_at, _WEIGHTS, "--weights-at")):
        if chosen not in known:
            raise InputError(f"unknown choice `{chosen}`", where=where, hint=f"one of {', '.join(known)}")
    if tokenizer is not None and format != "oci":
        raise InputError(f"--tokenizer has no effect on --format {format}", why="only a server writes text", hint="--format oci")
    opt.check_any_file(model)
    named = package_name(opt.stem(model) if name is None else name, given=name is not None)
    folder = Path(f"{named}-{format}") if out is None else out
    check_version(version)
    check_new_folder(folder)  # before work that would be lost
    with output.progress() as tell:
        if not model.is_dir() and opt.is_artifact(model):
            given = {"--threads": threads, "--database": database, **dict.fromkeys(options.given, True)}
            if unused := [option for option, value in given.items() if value]:
                raise InputError(f"{unused[0]} has no effect on a compiled model", where=str(model), hint="give it to `tcomp compile`")
            artifact = open_model(model, options, None, tell).artifact
            check_packaged(artifact.manifest.triple, format)
        else:
            opt.check_model_file(model)
            compiling = options.compile_options(threads=threads, progress=tell)
            if format == "wasm" and not options.target and not options.arch:
                compiling = replace(compiling, target="wasm32")
            if format == "oci" and model.is_dir() and compiling.state is None:
                compiling = replace(compiling, state="auto")  # without which it writes no text
            check_packaged(compiling.backend.target.triple, format)
            artifact = compile_model(model, with_records(compiling, database))[0]
    where = cast(Literal["inside", "beside"], weights_at)
    if format == "wasm":
        files = write_wasm_package(artifact, folder, named, version)
    elif format == "oci":
        texts, beside = continues_text(artifact.manifest), model if model.is_dir() else model.parent
        tokenizer = beside if tokenizer is None and texts and (beside / TOKENIZER).is_file() else tokenizer
        if texts and tokenizer is None:
            hint = "give its folder by --tokenizer for a server of texts"
            output.message(f"{model} is a language model without a tokenizer: the image serves its tensors alone; {hint}", "yellow")
        elif model.is_dir() and not texts:
            hint = "a server of texts needs --state auto, and a batch that is 1 or free, as in --dim batch=1..16"
            output.message(f"{model} cannot write text as it is compiled: the image serves its tensors alone; {hint}", "yellow")
        files = write_container(artifact, folder, named, version, where, tokenizer)
    else:
        files = (write_c_package if format == "c" else write_wheel)(artifact, folder, named, version, where)
    if as_json:
        return output.print_json({"folder": folder, "name": named, "files": files})
    output.line(f"wrote {folder}, the package {named} {version}")
    for path in files:
        output.line(f"  {path.relative_to(folder)} ({output.size(path.stat().st_size)})")
