"""What a command runs: a model, loaded or compiled first, and arrays for its inputs: from files, from numbers, or random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.cli import output
from tcomp.cli.options import ModelOptions, array_or_number, assignments, check_model_file, is_artifact, parse_dims
from tcomp.errors import InputError
from tcomp.ir.dims import bind_dims
from tcomp.ir.expr import Expr, as_expr, bounds, dim, evaluate_int, variables
from tcomp.ir.graph import Value
from tcomp.options import Progress
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact, numpy_dtype, read_artifact
from tcomp.runtime.array_files import load_arrays
from tcomp.runtime.host_steps.steps import STRING
from tcomp.runtime.loaded_model import random_array
from tcomp.runtime.manifest import from_saved
from tcomp.target import Target

Array = np.ndarray
RANDOM_LETTERS = 6  # of each random string


@dataclass(frozen=True)
class Feeds:
    """The inputs of a run, those among them that are random, and the sizes that were chosen for symbolic dims nobody gave."""

    arrays: dict[str, Array]
    random: tuple[str, ...]
    chosen: dict[str, int]

    def explain(self) -> None:
        """Say on stderr what was made up."""
        if self.random:
            names = ", ".join(self.random)
            output.message(f"random inputs (normal; integers 0 or 1): {names}; give them with --input NAME=FILE.npy", "dim")
        if self.chosen:
            sizes = ", ".join(f"{name}={n}" for name, n in self.chosen.items())
            output.message(f"sizes chosen: {sizes}; give them with --dim NAME=N", "dim")


@dataclass(frozen=True)
class Opened:
    """An artifact, and the sizes that the user gives the dims it leaves open."""

    artifact: Artifact
    sizes: dict[str, int]

    @property
    def precision(self) -> str | None:
        """In which products of float32 matrices are computed; None on CPUs, which have no choice."""
        cuda = self.artifact.manifest.triple == "cuda"
        return Target.parse(str(self.artifact.notes.get("target", "cuda"))).precision if cuda else None

    def feeds(self, texts: Iterable[str] | None, seed: int) -> Feeds:
        """See `make_feeds`."""
        manifest = self.artifact.manifest
        dims = {d.name: dim(d.name, d.min, d.max) for d in manifest.dims}
        specs = manifest.model_inputs
        for extent in (e for s in specs for e in s.shape if isinstance(e, str)):  # those of host steps stand in shapes alone
            dims.setdefault(extent, dim(extent, 0))
        signature = [Value(s.name, s.dtype, [dims[e] if isinstance(e, str) else e for e in s.shape]) for s in specs]
        return make_feeds(signature, texts, self.sizes, seed)


def open_model(path: Path, options: ModelOptions, threads: int | None, progress: Progress, signed: bool = False) -> Opened:
    """Load an artifact, into memory if its signature (`signed`) is to be checked, or compile a model as the options say. Raises
    `TcompError`."""
    if not is_artifact(path):
        if signed:
            raise InputError("only a compiled model can be signed", where=str(path), hint="leave --trusted out, or `tcomp compile`, `sign`")
        check_model_file(path)
        return Opened(compile_model(path, options.compile_options(threads=threads, progress=progress))[0], {})
    if given := [name for name in options.given if name != "--dim"]:
        raise InputError(f"{given[0]} has no effect on a compiled model", where=str(path), hint="give it to `tcomp compile`")
    artifact, sizes = read_artifact(path, mmap=not signed), {}
    for name, size in parse_dims(options.dim).items():
        if not isinstance(size, int):
            why = "a compiled model is run at one size"
            raise InputError(f"the dim `{name}` is given several sizes", where=f"--dim {name}", why=why, hint=f"--dim {name}={size[0]}")
        sizes[name] = size
    return Opened(artifact, sizes)


def make_feeds(signature: Sequence[Value], texts: Iterable[str] | None, sizes: Mapping[str, int], seed: int, usual: int = 1) -> Feeds:
    """An array for every input, as the options `--input` say or random. Symbolic dims have the sizes given, else those of the arrays given,
    else the one in range that is nearest to `usual`. Raises `InputError` where arrays or sizes do not fit."""
    given = _read_inputs(texts, signature)
    symbols = {v.name: v for value in signature for d in value.shape if isinstance(d, Expr) for v in variables(d)}
    if unknown := [name for name in sizes if name not in symbols]:
        hint = f"its symbolic dims are {', '.join(symbols)}" if symbols else "all its shapes are fixed"
        raise InputError(f"the model has no symbolic dim `{unknown[0]}`", hint=hint)
    arrays = {name: a for name, a in given.items() if isinstance(a, np.ndarray)}
    shapes = [(v.name, v.shape, arrays[v.name].shape) for v in signature if v.name in arrays]
    dims = bind_dims(shapes, {symbols[name]: n for name, n in sizes.items()})
    chosen = {}
    for name, v in symbols.items():
        if v not in dims:
            lo, hi = bounds(v)
            dims[v] = chosen[name] = max(lo or 0, usual if hi is None else min(usual, hi))
    generator = np.random.default_rng(seed)
    for value in (v for v in signature if v.name not in arrays):
        shape, number = tuple(evaluate_int(as_expr(d), dims) for d in value.shape), given.get(value.name)
        try:
            if value.dtype == STRING:
                arrays[value.name] = _random_words(generator, shape)
                continue
            dtype = numpy_dtype(value.dtype)
            array = random_array(generator, shape, dtype) if number is None else _filled(value.name, float(number), shape, dtype)
            arrays[value.name] = array
        except (MemoryError, ValueError) as error:
            where = f"input `{value.name}`, shape {list(shape)}"
            raise InputError("no memory for an input", where=where, why=str(error), hint="smaller sizes, by --dim NAME=N") from error
    return Feeds({v.name: arrays[v.name] for v in signature}, tuple(v.name for v in signature if v.name not in given), chosen)


def _random_words(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    letters = generator.integers(ord("a"), ord("z") + 1, (*shape, RANDOM_LETTERS), np.uint8)
    return np.array([row.tobytes().decode() for row in letters.reshape(-1, RANDOM_LETTERS)], object).reshape(shape)


def _filled(name: str, number: float, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        value = np.asarray(number).astype(dtype)
    if (dtype.kind in "iub" or dtype.name.lstrip("u").startswith("int")) and float(value) != number:
        raise InputError(f"{number:g} is not a value of input `{name}`", why=f"its element type is {dtype}")
    return np.full(shape, value, dtype)


def _read_inputs(texts: Iterable[str] | None, signature: Sequence[Value]) -> dict[str, Array | float]:
    """`name=file.npy`, `name=number` and `file.npz` as given on the command line."""
    values, all_texts = {v.name: v for v in signature}, list(texts or ())
    several = [text for text in all_texts if "=" not in text and Path(text).suffix == ".npz"]
    found: list[tuple[str, Array | float, str]] = []
    found += [(name, a, f"--input {text}") for text in several for name, a in load_arrays(text, "--input").items()]
    single = [text for text in all_texts if text not in several]
    given_one = assignments(single, "--input", "NAME=FILE", "--input image=cat.npy, --input all.npz")
    found += [(name, array_or_number(source), where) for name, source, where in given_one]
    given: dict[str, Array | float] = {}
    for name, value, where in found:
        if name not in values:
            raise InputError(f"the model has no input `{name}`", where=where, hint=f"its inputs are {', '.join(values)}")
        if name in given:
            raise InputError(f"input `{name}` is given twice", where=where)
        if isinstance(value, float) and values[name].dtype == STRING:
            hint = f"--input {name}=FILE.txt, one string a line, or .npy"
            raise InputError(f"a number is given for input `{name}`, which takes strings", where=where, hint=hint)
        given[name] = value if isinstance(value, float) else _checked(value, values[name], where)
    return given


def _checked(array: Array, value: Value, where: str) -> Array:
    if value.dtype == STRING:
        if array.dtype.kind != "U":
            why = f"it is of {array.dtype}"
            raise InputError(f"the array for input `{value.name}` does not hold strings", where=where, why=why, hint="np.array(words)")
        return array.astype(object)
    dtype, array = numpy_dtype(value.dtype), from_saved(array, value.dtype)
    if array.dtype != dtype:
        what, hint = f"input `{value.name}` is {array.dtype.name}, the model takes {value.dtype}", f"array.astype({dtype.name!r})"
        saved = f"{hint}.view('V{dtype.itemsize}')" if dtype.isbuiltin == 2 else hint
        raise InputError(what, where=where, hint=f"save it with numpy.save(file, {saved})")
    return array
