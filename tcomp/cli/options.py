"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli.syntax import parse_dims, parse_shapes
from tcomp.errors import InputError

if TYPE_CHECKING:
    from tcomp.options import CompileOptions
    from tcomp.target import Target


def option(name: str, metavar: str, help: str, **more: Any) -> Any:
    """An option that has no default to be shown."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False, **more)


OnnxModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX model.", show_default=False)]
_MODEL = "An ONNX model, or an artifact that `tcomp compile` wrote."
AnyModel = Annotated[Path, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)]
Dims = Annotated[list[str] | None, option("--dim", "NAME=N", "Fix a symbolic dim (batch=1), or bound it (seq=1..512). May be repeated.")]
Shapes = Annotated[list[str] | None, option("--shape", "INPUT=AxBxC", "The shape of an input (x=1x3x224x224). May be repeated.")]
_VALUE = "Fix an input for good (sr=16000, table=table.npy), so that shapes may depend on it. May be repeated."
Values = Annotated[list[str] | None, option("--value", "INPUT=NUMBER", _VALUE)]
Tuned = Annotated[Path | None, option("--database", "FILE", "Use the schedules that `tcomp tune` found, where there are any.")]
Threads = Annotated[int | None, option("--threads", "N", "Number of threads. Default: all physical cores.", min=1, max=4096)]
_INPUT = "The value of an input: a .npy file, or a number that fills it (sr=16000). FILE.npz gives several. May be repeated."
Inputs = Annotated[list[str] | None, option("--input", "NAME=FILE.npy", _INPUT)]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random inputs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for machines.")]
Profile = "Show the time of every kernel, and its share of what this machine can do."
_TARGET = "What to compile for, as in 'cpu -mcpu=skylake-avx512'. Default: this machine."
_PRECISION = "Of products of float32 matrices, for --target cuda: fp32, tf32, fp16, bf16."
_DIRECT = "Direct sums only, without Winograd's and Strassen's algorithms: slower, more exact, less memory for weights."

STAGES = ("graph", "te", "schedule", "loops", "llvm", "asm", "cuda", "ptx", "sass-stats")


@dataclass(frozen=True)
class ModelOptions:
    """The options of commands that run a model: its sizes, and what it is compiled for. They are parsed when they are asked for."""

    dim: Dims = None
    shape: Shapes = None
    target: Annotated[str | None, option("--target", "TARGET", _TARGET)] = None
    arch: Annotated[str | None, option("--arch", "NAMES", "GPU architectures for --target cuda, as in sm_90a,sm_80.")] = None
    precision: Annotated[str | None, option("--precision", "NAME", _PRECISION)] = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as in "--dim"."""
        return [f"--{f.name}" for f in fields(self) if getattr(self, f.name)]

    @property
    def machine(self) -> Target:
        """The target; this machine, if none is given. Raises `TargetError`, `InputError`."""
        from tcomp.target import Target

        words = (self.target or "cpu").split()
        for name, value, why in (
            ("arch", self.arch, "names GPUs"),
            ("precision", self.precision, "is for GPUs: products on a CPU have the precision of the model"),
        ):
            if value is None:
                continue
            if words[:1] != ["cuda"]:
                raise InputError(f"--{name} {why}", hint="add --target cuda")
            words.append(f"-{name}={''.join(value.split())}")
        return Target.parse(" ".join(words))

    def compile_options(self, **others: Any) -> CompileOptions:
        """How the compiler is told, with `others` of its options. Raises `TargetError`, `InputError`."""
        from tcomp.options import CompileOptions

        return CompileOptions(self.machine, parse_shapes(self.shape), parse_dims(self.dim), **others)


@dataclass(frozen=True)
class CompilationOptions(ModelOptions):
    """The options of commands that compile a model."""

    value: Values = None
    direct: Annotated[bool, typer.Option("--direct", help=_DIRECT)] = False

    def compile_options(self, **others: Any) -> CompileOptions:
        """As those of `ModelOptions`, with values and algorithms."""
        from tcomp.cli.inputs import read_values

        return super().compile_options(values=read_values(self.value), direct=self.direct, **others)
