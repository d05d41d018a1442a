"""Programs that `torch.export` made → Graph: parameters are constants, inputs and results those of the module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tcomp.frontends.torch.decompositions import decompositions
from tcomp.frontends.torch.importer import SEED, import_fx
from tcomp.ir.graph import Graph

Program: TypeAlias = "ExportedProgram | torch.nn.Module"


def exported(module: Program, args: Sequence[Any] | None, dynamic_shapes: Any = None) -> ExportedProgram:
    """The program of a module for example inputs, or the one that is given. `dynamic_shapes` is that of `torch.export.export`. Raises
    `InputError` for a module without example inputs, `UnsupportedError` for one that `torch.export` cannot trace."""
    if isinstance(module, ExportedProgram):
        if args is not None or dynamic_shapes is not None:
            raise InputError("an ExportedProgram has inputs and sizes of its own", hint="leave out args and dynamic_shapes")
        return module
    if args is None:
        raise InputError("a module is compiled for example inputs", hint="tcomp.compile(module, args=(x,))")
    try:
        return torch.export.export(module, tuple(args), dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch.export raises whatever the traced code does
        first = str(error).strip().splitlines()
        what = f"torch.export cannot trace the {type(module).__name__}"
        raise UnsupportedError(what, why=f"{type(error).__name__}: {first[0] if first else ''}"[:500]) from error


def read_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """A program that `torch.export.save` wrote. Its file has to be trusted: PyTorch evaluates what it says of sizes. Raises
    `ImportModelError` for a file that is none."""
    try:
        return torch.export.load(os.fspath(path))
    except Exception as error:  # whatever the file makes PyTorch stumble over
        raise ImportModelError("the program cannot be read", where=str(path), why=f"{type(error).__name__}: {error}"[:300]) from error


def import_program(program: ExportedProgram) -> Graph:
    """The graph of an exported program. Raises `UnsupportedError` for one that changes its parameters, buffers or inputs, which takes or
    gives what is not a tensor, or which has operators that cannot be compiled."""
    program = program.run_decompositions(decompositions())
    signature, module = program.graph_signature, program.graph_module
    if changed := [s.target or s.arg.name for s in signature.output_specs if s.kind != OutputKind.USER_OUTPUT]:
        hint = "export the module after module.eval(), with torch.no_grad()"
        raise UnsupportedError(f"the program changes `{changed[0]}` when it runs", why="an artifact has no state", hint=hint)
    held: Mapping[str, Any] = {**program.state_dict, **program.constants}
    constants = {
        n: held[str(s.target)] for n, s in enumerate(signature.input_specs) if s.kind != InputKind.USER_INPUT and s.kind != InputKind.TOKEN
    }
    imported = import_fx(module, constants, program.range_constraints)
    if SEED in imported.inputs:
        raise UnsupportedError(
            "the program draws random numbers", why="an artifact gives the same results in every run", hint="module.eval()"
        )
    others = [str(value) for kind, value in imported.results if kind != "output"]
    if others or any(axis is None for _, axis in imported.sizes.values()):
        what = f"a result is {others[0]}" if others else "an input is a number"
        raise UnsupportedError(f"{what}, and artifacts have only tensors", hint="export a module of tensors alone")
    return imported.graph
