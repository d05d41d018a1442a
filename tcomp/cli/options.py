"""Options that several commands share: their declarations, and the parsing of those that have a syntax of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from tcomp.options import CompileOptions
    from tcomp.target import Target


def option(name: str, metavar: str, help: str, **more: Any) -> Any:
    """An option that has no default to be shown."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False, **more)


OnnxModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX model.", show_default=False)]
AnyModel = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model, or an artifact that `tcomp compile` wrote.", show_default=False)]
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
_DIRECT = "Convolutions and products as direct sums only, without Winograd's and Strassen's algorithms: slower, more exact, less memory for weights."

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
    def dims(self) -> dict[str, int | tuple[int, int]]:
        """See `parse_dims`."""
        return parse_dims(self.dim)

    @property
    def shapes(self) -> dict[str, tuple[int | str, ...]]:
        """See `parse_shapes`."""
        return parse_shapes(self.shape)

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
            if any(word.startswith(f"-{name}=") for word in words):
                raise InputError(f"--target {self.target!r} gives -{name} already", where=f"--{name} {value}", hint="leave one of them out")
            words.append(f"-{name}={''.join(value.split())}")
        return Target.parse(" ".join(words))

    def compile_options(self, **others: Any) -> CompileOptions:
        """How the compiler is told, with `others` of its options. Raises `TargetError`, `InputError`."""
        from tcomp.options import CompileOptions

        return CompileOptions(self.machine, self.shapes, self.dims, **others)


@dataclass(frozen=True)
class CompilationOptions(ModelOptions):
    """The options of commands that compile a model."""

    value: Values = None
    direct: Annotated[bool, typer.Option("--direct", help=_DIRECT)] = False

    @property
    def values(self) -> dict[str, np.ndarray]:
        """See `read_values`."""
        from tcomp.cli.inputs import read_values

        return read_values(self.value)

    def compile_options(self, **others: Any) -> CompileOptions:
        """How the compiler is told, with `others` of its options. Raises `TargetError`, `InputError`."""
        return super().compile_options(values=self.values, direct=self.direct, **others)


def assignments(texts: Iterable[str] | None, option: str, form: str, hint: str) -> Iterator[tuple[str, str, str]]:
    """(NAME, VALUE, where it was said) of each NAME=VALUE. Raises `InputError` for another form, and for a name that is given twice."""
    names = set()
    for text in texts or ():
        name, _, value = (part.strip() for part in text.rpartition("="))
        if not name or not value:
            raise InputError(f"`{text}` is not of the form {form}", where=option, hint=hint)
        if name in names:
            raise InputError(f"`{name}` is given twice", where=f"{option} {text}")
        names.add(name)
        yield name, value, f"{option} {text}"


def parse_dims(texts: Iterable[str] | None, option: str = "--dim") -> dict[str, int | tuple[int, int]]:
    """`batch=1` fixes a dim, `seq=1..512` bounds it. Raises `InputError`."""
    dims: dict[str, int | tuple[int, int]] = {}
    for name, value, where in assignments(texts, option, "NAME=N", f"{option} batch=1 or {option} seq=1..512"):
        match = re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", value)
        if match is None:
            raise InputError(f"`{value}` is no size", where=where, hint="a number (batch=1) or a range (seq=1..512)")
        lo, hi = int(match[1]), int(match[2] or match[1])
        if lo > hi:
            raise InputError(f"the range {value} is empty", where=where, hint=f"{name}={hi}..{lo}")
        dims[name] = (lo, hi) if match[2] else lo
    return dims


def parse_shapes(texts: Iterable[str] | None) -> dict[str, tuple[int | str, ...]]:
    """`x=1x3x224x224`, or `ids=batch,128` where sizes may be names. `x=[]` is a scalar. Raises `InputError`."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, value, where in assignments(texts, "--shape", "INPUT=AxBxC", "--shape input=1x3x224x224"):
        inner = re.fullmatch(r"\[(.*)\]|\((.*)\)", value)
        value = next(group for group in inner.groups() if group is not None).strip() if inner else value
        parts = [p.strip() for p in (value.split(",") if "," in value or not re.fullmatch(r"[\dxX]*", value) else re.split("[xX]", value))]
        if not all(re.fullmatch(r"\d{1,15}|[^\W\d].*", p) for p in parts) and not (inner and parts == [""]):
            hint = f"sizes separated by x or commas: {name}=1x3x224x224 or {name}=batch,128"
            raise InputError(f"`{value}` is no shape", where=where, hint=hint)
        shapes[name] = tuple(int(p) if p.isdigit() else p for p in parts if p)
    return shapes


def parse_choices(text: str | None, known: Sequence[str], option: str) -> tuple[str, ...]:
    """A comma-separated selection from `known`, without repetitions. Raises `InputError`."""
    chosen = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not chosen:
        raise InputError("nothing is chosen", where=option, hint=f"some of {', '.join(known)}")
    for part in chosen:
        if part not in known:
            raise InputError(f"unknown choice `{part}`", where=f"{option} {text}", hint=f"some of {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


def parse_threads(text: str | None) -> tuple[int | None, ...]:
    """`1,2`: several numbers of threads; (None,), the default number, if there are none. Raises `InputError`."""
    if text is None:
        return (None,)
    numbers = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,4}\s*", n) and 1 <= int(n) <= 4096 for n in numbers):
        raise InputError(f"`{text}` is no list of thread counts", where="--threads", hint="numbers from 1 to 4096, as in --threads 1,2")
    return tuple(dict.fromkeys(map(int, numbers)))
