"""The public way to compile: `tcomp.compile`, which joins the pipeline with the records of a tuning database."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tcomp.backends import Backend
from tcomp.errors import InputError
from tcomp.operators import OwnOperator
from tcomp.options import CompileOptions, Progress, Report
from tcomp.pipeline import compile_model, from_jax, from_torch
from tcomp.runtime import Artifact, LoadedModel, Module
from tcomp.target import Target

if TYPE_CHECKING:
    import onnx
    import torch
    from torch.export import ExportedProgram

    from tcomp.frontends.onnx.importer import Source


def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | torch.nn.Module | ExportedProgram | Callable[..., Any],
    target: Target | Backend | str | None = None,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    dims: Mapping[str, int | tuple[int, int] | list[int]] | None = None,
    threads: int | None = None,
    values: Mapping[str, npt.ArrayLike] | None = None,
    progress: Progress | None = None,
    database: str | os.PathLike[str] | None = None,
    direct: bool = False,
    max_seconds: float | None = None,
    max_memory: int | None = None,
    unchecked: bool = False,
    weights: str | None = None,
    state: Mapping[str, str] | str | None = None,
    args: Sequence[Any] | None = None,
    dynamic_shapes: Any = None,
    operators: Sequence[OwnOperator] = (),
) -> LoadedModel:
    """Compile an ONNX model, a module of PyTorch, or a function of JAX, for this machine and load it.

    `model` is a path (also of a GGUF file, or of the folder of a language model: docs/language-models.md), the bytes of a file, or a
    `ModelProto`; or an `nn.Module` with example inputs (`args`, a tuple of tensors), which `torch.export.export` traces with these
    `dynamic_shapes`; or an `ExportedProgram`, or the path of one (.pt2; reading it has PyTorch evaluate parts of it, so it has to be
    trusted); or a function with example arguments (`args`), which JAX traces. `target` defaults to this machine. `shapes` fixes input
    shapes by input name, `dims` fixes (int) or bounds ((lowest, highest)) symbolic dims by name, or lists sizes ([1, 8, 32]) for which
    kernels that sum get code of their own, chosen when they run; the others stay symbolic. `threads` is the number of threads of
    `Module.run` (default: all cores the process may use). `values` fixes inputs for good (by name), so that shapes and branches may depend
    on them; they are no longer inputs then. `progress` gets (stage, done, total). `database` is a file that `tcomp.tune` wrote: kernels
    that it has records for are scheduled as these say. `direct` does without Winograd's and Strassen's algorithms: slower, more exact, with
    less memory for weights (see `passes.algorithms`). `max_seconds` and `max_memory` (bytes) limit what compiling may take, for models that
    nobody trusts: it happens in a process of its own then (see `confined`). `unchecked` code does not report indices that are out of range
    and integers that are divided by zero (the target's option -unchecked): it takes the nearest element, or 1. `weights` stores large
    constant matrices of products in fewer bits: "int8" or "int4" in blocks of 32 that share a scale (activations are then rounded to 16
    bits where the target multiplies bytes, and with "w8a8" or "w4a8" to bytes), "bf16" or "fp16" (see `passes.quantized_weights`).
    `state` are pairs {input: output} in which the output is the input with new rows behind it (a cache), or "auto": those that are named
    so (past, present). They have the axis that grows first then, and share memory if they are run by `tcomp.State`; else the old rows are
    copied. `operators` are those of your own that
    nodes of an ONNX model have (`tcomp.operator`), by their names in the domain `tcomp`.

    Raises `ImportModelError` for a file that is not a valid model, `UnsupportedError` listing everything tcomp cannot compile,
    `TargetError` for an unknown target, `DatabaseError` for a database that cannot be read, `LimitError` where a limit is exceeded.
    """
    source: Any = model
    if callable(model) and not from_torch(model):
        source = _traced(model, args, dynamic_shapes)
    elif args is not None or dynamic_shapes is not None:
        if not from_torch(model) or isinstance(model, str | os.PathLike):
            raise InputError(
                "args and dynamic_shapes are for modules of PyTorch and functions of JAX", hint="shapes={...} gives shapes of an ONNX model"
            )
        from tcomp.frontends.torch.exported import exported  # PyTorch is loaded, since the module is there

        source = exported(model, args, dynamic_shapes)
    if unchecked:
        target = f"{'cpu' if target is None else target} -unchecked"
    options = CompileOptions(target, shapes, dims, threads, values, direct, weights, state)
    options = replace(options, progress=progress) if progress is not None else options
    options = replace(options, operators={o.name: o.definition for o in operators})
    artifact, _ = compile_limited(source, options, database, max_seconds, max_memory)
    return Module.load(artifact, threads=threads)


def _traced(function: Callable[..., Any], args: Sequence[Any] | None, dynamic_shapes: Any) -> Any:
    if args is None or dynamic_shapes is not None:
        raise InputError("a function is compiled for example arguments, whose sizes it has", hint="tcomp.compile(function, args=(x,))")
    try:
        from tcomp.frontends.jax import trace  # loads JAX
    except ImportError as error:
        raise InputError("functions are compiled by way of JAX", why=str(error), hint="pip install 'tcomp[jax]'") from error
    return trace(function, args)


def compile_limited(
    model: Source, options: CompileOptions, database: str | os.PathLike[str] | None, max_seconds: float | None, max_memory: int | None
) -> tuple[Artifact, Report]:
    """The artifact and what happened, made within limits if there are any. Raises as `compile`."""
    if max_seconds is None and max_memory is None:
        return compile_model(model, with_records(options, database))
    if (from_torch(model) or from_jax(model)) and not isinstance(model, str | os.PathLike):
        raise InputError("compiling within limits takes a file", hint="torch.export.save(program, 'model.pt2')")
    if options.operators:
        raise InputError("compiling within limits knows no operators of your own", why="it happens in another process")
    from tcomp.confined import Limits, compile_within  # only where it is needed

    return compile_within(Limits(max_seconds, max_memory), model, options, database)


def with_records(options: CompileOptions, database: str | os.PathLike[str] | None) -> CompileOptions:
    """The options, with kernels scheduled as the records of a tuning database say, if there is one. Raises `DatabaseError`."""
    if database is None:
        return options
    from tcomp.autotune.database.lookup import recorded  # half of what this module takes to load

    return replace(options, decide=recorded(database, options.backend, options.threads))
