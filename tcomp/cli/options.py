"""Options that several commands share: their declarations, and the parsing of those that have a syntax of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcomp.errors import InputError

if TYPE_CHECKING:
    from tcomp.target import Target

OnnxModel = Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="An ONNX model.", show_default=False)]
AnyModel = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX model, or an artifact that `tcomp compile` wrote.", show_default=False)
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="What to compile for, as in 'cpu -mcpu=skylake-avx512'. Default: this machine.",
        show_default=False,
    ),
]
Arch = Annotated[
    str | None, typer.Option("--arch", metavar="NAMES", help="GPU architectures for --target cuda, as in sm_90a,sm_80.", show_default=False)
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", metavar="NAME", help="Of products of float32 matrices, for --target cuda: fp32, tf32, fp16, bf16.", show_default=False
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="NAME=N", help="Fix a symbolic dim (batch=1), or bound it (seq=1..512). May be repeated.", show_default=False
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="INPUT=AxBxC", help="The shape of an input (x=1x3x224x224). May be repeated.", show_default=False),
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        metavar="INPUT=NUMBER",
        help="Fix an input for good (sr=16000, table=table.npy), so that shapes may depend on it. May be repeated.",
        show_default=False,
    ),
]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct",
        help="Convolutions and products as direct sums only, without Winograd's and Strassen's algorithms: slower, more exact, less memory for weights.",
        show_default=False,
    ),
]
Tuned = Annotated[
    Path | None, typer.Option("--database", metavar="FILE", help="Follow what `tcomp tune` found, as far as it goes.", show_default=False)
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, max=4096, help="Number of threads. Default: all physical cores.", show_default=False),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=FILE.npy",
        help="The value of an input: a .npy file, or a number that fills it (sr=16000). FILE.npz gives several. May be repeated.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the random inputs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for machines.")]

STAGES = ("graph", "te", "schedule", "loops", "llvm", "asm", "cuda", "ptx", "sass-stats")


def parse_target(target: str | None, arch: str | None = None, precision: str | None = None) -> Target:
    """This machine, if nothing is said. Raises `TargetError`, `InputError`."""
    from tcomp.target import Target

    words = (target or "cpu").split()
    for option, said, why in (("arch", arch, "names GPUs"), ("precision", precision, "is of GPUs: products on a CPU are those of the model")):
        if said is None:
            continue
        if words[:1] != ["cuda"]:
            raise InputError(f"--{option} {why}", hint="add --target cuda")
        if any(word.startswith(f"-{option}=") for word in words):
            raise InputError(f"--target {target!r} gives -{option} already", where=f"--{option} {said}", hint="leave one of them away")
        words.append(f"-{option}={''.join(said.split())}")
    return Target.parse(" ".join(words))


def parse_dims(texts: Iterable[str] | None) -> dict[str, int | tuple[int, int]]:
    """`batch=1` fixes a dim, `seq=1..512` bounds it. Raises `InputError`."""
    dims: dict[str, int | tuple[int, int]] = {}
    for text in texts or ():
        name, value = _assignment(text, "--dim")
        match = re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", value)
        if match is None:
            raise InputError(f"`{value}` is no size", where=f"--dim {text}", hint="a number (batch=1) or a range (seq=1..512)")
        lo, hi = int(match[1]), int(match[2] or match[1])
        if lo > hi:
            raise InputError(f"the range {value} is empty", where=f"--dim {text}", hint=f"{name}={hi}..{lo}")
        if name in dims:
            raise InputError(f"the dim `{name}` is given twice", where=f"--dim {text}")
        dims[name] = (lo, hi) if match[2] else lo
    return dims


def parse_shapes(texts: Iterable[str] | None) -> dict[str, tuple[int | str, ...]]:
    """`x=1x3x224x224`, or `ids=batch,128` where sizes may be names. `x=[]` is a scalar. Raises `InputError`."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for text in texts or ():
        name, value = _assignment(text, "--shape")
        inner = re.fullmatch(r"\[(.*)\]|\((.*)\)", value)
        value = next(group for group in inner.groups() if group is not None).strip() if inner else value
        parts = [p.strip() for p in (value.split(",") if "," in value or not re.fullmatch(r"[\dxX]*", value) else re.split("[xX]", value))]
        if not all(re.fullmatch(r"\d{1,15}|[^\W\d].*", p) for p in parts) and not (inner and parts == [""]):
            hint = f"sizes separated by x or commas: {name}=1x3x224x224 or {name}=batch,128"
            raise InputError(f"`{value}` is no shape", where=f"--shape {text}", hint=hint)
        if name in shapes:
            raise InputError(f"the shape of `{name}` is given twice", where=f"--shape {text}")
        shapes[name] = tuple(int(p) if p.isdigit() else p for p in parts if p)
    return shapes


def _assignment(text: str, option: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.rpartition("="))
    if not (name and equals and value):
        hint = "--dim batch=1 or --dim seq=1..512" if option == "--dim" else "--shape input=1x3x224x224"
        raise InputError(f"`{text}` is not of the form NAME=VALUE", where=option, hint=hint)
    return name, value


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
