"""Options that several commands share, their syntax (NAME=VALUE, sizes, shapes, lists, times), and the files that they name."""

from __future__ import annotations

import difflib
import os
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

_ARTIFACT_MAGIC = b"\x89TCOMP"
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_IMAGES = {".bmp", ".jpg", ".jpeg", ".jp2", ".tif", ".tiff", ".png", ".webp", ".ppm", ".pgm", ".pbm", ".pnm"}  # encoded, for ImageDecoder
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}  # of each unit of time
MAX_THREADS = 4096  # as `CompileOptions` has it


def option(name: str, metavar: str, help: str, **more: Any) -> Any:
    """An option with a value; its default is not shown unless `show_default` says so."""
    return typer.Option(name, metavar=metavar, help=help, **{"show_default": False, **more})


def flag(name: str, help: str, **more: Any) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help, **more)


def argument(metavar: str, help: str) -> Any:
    """A positional argument whose default, if it has one, is not shown."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def out_file(help: str, **more: Any) -> Any:
    """The option -o, --output."""
    return typer.Option("-o", "--output", metavar="FILE", help=help, **{"show_default": False, **more})


SIZES, MACHINE, METHODS = ({"rich_help_panel": title} for title in ("Sizes and fixed inputs", "Machine", "Algorithms and storage"))
"""Groups of options in the help."""
_INPUT = "The value of an input: a .npy file, or a number that fills it (sr=16000). FILE.npz gives several inputs. May be repeated."
_VALUE = "Make an input a constant (sr=16000, table=table.npy), so that shapes may depend on it. May be repeated."
_TARGET = "The machine to compile for, such as 'cpu -mcpu=skylake-avx512'. Default: this machine."
_ARCH = "With --target cuda: the GPU architectures, such as sm_90a,sm_80."
_PRECISION = "With --target cuda: the precision of products of float32 matrices (fp32, tf32, fp16, bf16)."
_DIRECT = "Do not use Winograd's and Strassen's algorithms: slower, but more exact, and weights take less memory."
_STATE = "Update a cache in place: OUTPUT is INPUT with new rows appended. `auto` finds pairs named past* and present*. May be repeated."
_WEIGHTS = "Store large weight matrices as int8 or int4 (blocks of 32 with one scale each; w8a8, w4a8: activations as bytes), bf16 or fp16."
OnnxModel = Annotated[
    Path, argument("MODEL.onnx", "An ONNX model, a file of torch.export.save (.pt2), a language model's folder, or a GGUF file.")
]
AnyModel = Annotated[Path, argument("MODEL", "An ONNX model, or an artifact that `tcomp compile` wrote.")]
Packaged = Annotated[Path, argument("MODEL", "An ONNX model, a language model's folder, or an artifact that `tcomp compile` wrote.")]
_DIM = "Fix a symbolic dim (batch=1), bound it (seq=1..512), or list sizes to optimise for (batch=1,8,32). May be repeated."
Dims = Annotated[list[str] | None, option("--dim", "NAME=N", _DIM, **SIZES)]
Shapes = Annotated[list[str] | None, option("--shape", "INPUT=AxBxC", "The shape of an input (x=1x3x224x224). May be repeated.", **SIZES)]
Values = Annotated[list[str] | None, option("--value", "INPUT=NUMBER", _VALUE, **SIZES)]
Tuned = Annotated[Path | None, option("--database", "FILE", "Use the schedules that `tcomp tune` found.", **METHODS)]
_THREADS = "Number of threads. Default: all physical cores."
Threads = Annotated[int | None, option("--threads", "N", _THREADS, min=1, max=MAX_THREADS, **MACHINE)]
Inputs = Annotated[list[str] | None, option("--input", "NAME=FILE.npy", _INPUT)]
Seed = Annotated[int, option("--seed", "N", "Seed of the random inputs.", min=0, show_default=True)]
Json = Annotated[bool, flag("--json", "Print JSON on stdout, for machines.")]
PROFILE = "Show the time of every kernel, and its share of what this machine can do."


@dataclass(frozen=True)
class ModelOptions:
    """The options of commands that run a model: its sizes, and what it is compiled for. They are parsed when they are read."""

    dim: Dims = None
    shape: Shapes = None
    target: Annotated[str | None, option("--target", "TARGET", _TARGET, **MACHINE)] = None
    arch: Annotated[str | None, option("--arch", "NAMES", _ARCH, **MACHINE)] = None
    precision: Annotated[str | None, option("--precision", "NAME", _PRECISION, **MACHINE)] = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as in "--dim"."""
        return [f"--{f.name}" for f in fields(self) if getattr(self, f.name)]

    @property
    def machine(self) -> Target:
        """The target; this machine, if none is given. Raises `TargetError`, `InputError`."""
        from tcomp.target import Target

        words = (self.target or "cpu").split()
        reasons = {"arch": "names GPUs", "precision": "is for GPUs: products on a CPU have the precision of the model"}
        for name, why in reasons.items():
            if (value := getattr(self, name)) is not None:
                if words[:1] != ["cuda"]:
                    raise InputError(f"--{name} {why}", hint="add --target cuda")
                words.append(f"-{name}={''.join(value.split())}")
        return Target.parse(" ".join(words))

    def compile_options(self, **others: Any) -> CompileOptions:
        """The compiler's options, with `others` of them. Raises `TargetError`, `InputError`."""
        from tcomp.options import CompileOptions

        return CompileOptions(self.machine, parse_shapes(self.shape), parse_dims(self.dim), **others)


@dataclass(frozen=True)
class CompilationOptions(ModelOptions):
    """The options of commands that compile a model."""

    value: Values = None
    direct: Annotated[bool, flag("--direct", _DIRECT, **METHODS)] = False
    weights: Annotated[str | None, option("--weights", "KIND", _WEIGHTS, **METHODS)] = None
    state: Annotated[list[str] | None, option("--state", "INPUT=OUTPUT", _STATE, **METHODS)] = None

    def compile_options(self, **others: Any) -> CompileOptions:
        """As those of `ModelOptions`, with values and algorithms."""
        return super().compile_options(
            values=read_values(self.value), direct=self.direct, weights=self.weights, state=parse_state(self.state), **others
        )


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


def parse_state(texts: Sequence[str] | None) -> dict[str, str] | str | None:
    """`past=present`, or `auto`. Raises `InputError`."""
    if not texts:
        return None
    if "auto" in texts:
        if len(texts) > 1:
            raise InputError("--state auto stands alone", hint="or name every pair")
        return "auto"
    return {name: value for name, value, _ in assignments(texts, "--state", "INPUT=OUTPUT", "--state past=present, or --state auto")}


def parse_dims(texts: Iterable[str] | None, option: str = "--dim") -> dict[str, int | tuple[int, int] | list[int]]:
    """`batch=1` fixes a dim, `seq=1..512` bounds it, `batch=1,8,32` lists sizes that get code of their own. Raises `InputError`."""
    dims: dict[str, int | tuple[int, int] | list[int]] = {}
    for name, value, where in assignments(texts, option, "NAME=N", f"{option} batch=1 or {option} seq=1..512"):
        if re.fullmatch(r"\d{1,15}(,\d{1,15})+", value):
            dims[name] = [int(size) for size in value.split(",")]
            continue
        if (match := re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", value)) is None:
            raise InputError(
                f"`{value}` is not a size", where=where, hint="a number (batch=1), a range (seq=1..512), or sizes (batch=1,8,32)"
            )
        lo, hi = int(match[1]), int(match[2] or match[1])
        if lo > hi:
            raise InputError(f"the range {value} is empty", where=where, hint=f"{name}={hi}..{lo}")
        dims[name] = (lo, hi) if match[2] else lo
    return dims


def parse_shapes(texts: Iterable[str] | None) -> dict[str, tuple[int | str, ...]]:
    """`x=1x3x224x224`, or `ids=batch,128` where sizes may be names. `x=[]` is a scalar. Raises `InputError`."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, value, where in assignments(texts, "--shape", "INPUT=AxBxC", "--shape input=1x3x224x224"):
        bracketed = value[0] + value[-1] in ("[]", "()")
        value = value[1:-1].strip() if bracketed else value
        parts = [p.strip() for p in (value.split(",") if "," in value or not re.fullmatch(r"[\dxX]*", value) else re.split("[xX]", value))]
        if not all(re.fullmatch(r"\d{1,15}(\s*\*[^*].*)?|[^\W\d].*", p) for p in parts) and not (bracketed and parts == [""]):
            hint = f"sizes separated by x or commas: {name}=1x3x224x224, {name}=batch,128 or {name}=1,3,h*32,w*32"
            raise InputError(f"`{value}` is not a shape", where=where, hint=hint)
        shapes[name] = tuple(int(p) if p.isdigit() else p for p in parts if p)
    return shapes


def parse_choices(text: str | None, known: Sequence[str], option: str) -> tuple[str, ...]:
    """A comma-separated selection from `known`, without repetitions. Raises `InputError`."""
    chosen, hint = [part.strip() for part in (text or "").split(",") if part.strip()], f"some of {', '.join(known)}"
    if text is not None and not chosen:
        raise InputError("nothing is chosen", where=option, hint=hint)
    if unknown := [part for part in chosen if part not in known]:
        raise InputError(f"unknown choice `{unknown[0]}`", where=f"{option} {text}", hint=hint)
    return tuple(dict.fromkeys(chosen))


def parse_threads(text: str | None) -> tuple[int | None, ...]:
    """`1,2`: several numbers of threads; (None,), the default number, if there are none. Raises `InputError`."""
    if text is None:
        return (None,)
    if not all(re.fullmatch(r"\s*\d{1,4}\s*", n) and 1 <= int(n) <= MAX_THREADS for n in text.split(",")):
        hint = f"numbers from 1 to {MAX_THREADS}, as in --threads 1,2"
        raise InputError(f"`{text}` is not a list of thread counts", where="--threads", hint=hint)
    return tuple(dict.fromkeys(map(int, text.split(","))))


def parse_time(text: str, option: str = "--budget") -> float:
    """Seconds of `90`, `90s`, `1.5m`, `2h`. Raises `InputError`."""
    if (found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh]?)", text.strip())) is None or float(found[1]) == 0:
        raise InputError(f"`{text}` is not a time", where=option, hint="a number of seconds, or as in 60s, 10m, 1h")
    return float(found[1]) * _SECONDS[found[2]]


def parse_bytes(text: str, option: str) -> int:
    """Bytes of `1000000`, `800M`, `4G` (powers of 1024). Raises `InputError`."""
    if (found := re.fullmatch(r"(\d{1,15})([KMGT]?)(i?B)?", text.strip())) is None or int(found[1]) == 0:
        raise InputError(f"`{text}` is not an amount of memory", where=option, hint="a number of bytes, or as in 800M, 4G")
    return int(found[1]) << 10 * "KMGT".find(found[2]) + 10 if found[2] else int(found[1])


def check_file(path: Path, where: str = "") -> None:
    """Refuse what is not a readable file. Raises `InputError`."""
    if path.is_dir():
        raise InputError(f"{path} is a directory", where=where, hint="name a file in it")
    if not path.exists():
        folder = path.parent
        names = [p.name for p in folder.iterdir()] if folder.is_dir() and os.access(folder, os.R_OK) else []
        close = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {folder / close[0]}?" if close else "" if folder.is_dir() else f"the folder {folder} does not exist"
        raise InputError(f"there is no file {path}", where=where, hint=hint)
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} cannot be read", where=where, why="no permission")


def check_any_file(path: Path) -> None:
    """Refuse what is neither a readable file nor the folder of a language model. Raises `InputError`."""
    check_model_file(path) if path.is_dir() else check_file(path)


def stem(model: Path) -> str:
    """The name of a model by its path: of a folder all of it, as in Qwen2-0.5B."""
    return Path(os.path.abspath(model)).name if model.is_dir() else model.stem


def is_artifact(path: Path) -> bool:
    """Whether a file is an artifact of tcomp rather than a model. Raises `InputError` if it cannot be read."""
    check_file(path)
    with open(path, "rb") as file:
        return file.read(len(_ARTIFACT_MAGIC)) == _ARTIFACT_MAGIC


def check_model_file(path: Path) -> None:
    """Refuse what cannot be an ONNX model, nor a folder with one. Raises `InputError`."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            why = "only a language model of Hugging Face is read from a directory, which then has a config.json"
            raise InputError(f"{path} is a directory", why=why, hint="name a model file in it")
        return
    if is_artifact(path):
        hint = "`tcomp run` and `tcomp bench` take both"
        raise InputError(f"{path} is a compiled artifact", why="this command takes the ONNX model", hint=hint)
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")


def check_writable(path: Path) -> None:
    """Refuse an output path early, before work that would be lost. Raises `InputError`."""
    folder, hint = path.parent, ""
    if path.is_dir():
        why, hint = "it is a directory", f"name a file, such as {path / 'model.tcomp'}"
    elif path.exists() and not path.is_file():
        why = "it is not a regular file, and would be replaced by one"
    elif not folder.is_dir():
        why, hint = f"the folder {folder} does not exist", f"mkdir -p {folder}"
    elif not os.access(folder, os.W_OK):
        why = f"no permission to write in the folder {folder}"
    else:
        return
    raise InputError(f"cannot write {path}", why=why, hint=hint)


def read_values(texts: Iterable[str] | None) -> dict[str, np.ndarray]:
    """`name=number` and `name=file.npy`: inputs that are fixed when a model is compiled. Raises `InputError`."""
    import numpy as np

    values: dict[str, np.ndarray] = {}
    for name, source, _ in assignments(texts, "--value", "NAME=NUMBER", "--value sr=16000, --value table=table.npy"):
        value = array_or_number(source)
        values[name] = np.asarray(int(value) if isinstance(value, float) and value.is_integer() else value)
    return values


def array_or_number(source: str) -> np.ndarray | float:
    """The array of a .npy file, the lines of a .txt file, the bytes of an encoded image, or a number. Raises `InputError`."""
    from tcomp.runtime.array_files import load_arrays

    if not Path(source).exists():
        if source in ("true", "false"):
            return float(source == "true")
        if _NUMBER.fullmatch(source):
            return float(source)
    check_file(Path(source), "--input")
    if (suffix := Path(source).suffix.lower()) == ".txt" or suffix in _IMAGES:
        return _file_as_array(Path(source), suffix)
    arrays = load_arrays(source, "--input")
    if set(arrays) != {""}:
        hint = f"--input {source} (without a name) takes them by their names"
        raise InputError(f"{source} holds several arrays", where="--input", hint=hint)
    return arrays[""]


def _file_as_array(path: Path, suffix: str) -> np.ndarray:
    import numpy as np

    try:
        content = path.read_bytes()
        return np.array(content.decode().splitlines()) if suffix == ".txt" else np.frombuffer(content, np.uint8)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read", where="--input", why=str(error)) from error
