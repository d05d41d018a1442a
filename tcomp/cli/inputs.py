"""Arrays for a model's inputs: from files, from numbers, or random."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.cli import output
from tcomp.cli.files import check_file
from tcomp.errors import InputError
from tcomp.ir.dims import bind_dims
from tcomp.ir.expr import Expr, as_expr, bounds, dim, evaluate_int, variables
from tcomp.ir.graph import Value
from tcomp.runtime import LoadedModel, numpy_dtype
from tcomp.runtime.inputs import random_array

Array = np.ndarray
Given = Mapping[str, Array | float]

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Feeds:
    """The inputs of a run, those among them that are random, and the sizes that were chosen for symbolic dims nobody gave."""

    arrays: dict[str, Array]
    random: tuple[str, ...]
    chosen: dict[str, int]

    def explain(self) -> None:
        """Say on stderr what was made up."""
        if self.random:
            output.message(
                f"random inputs (normal; integers 0 or 1): {', '.join(self.random)}; give them with --input NAME=FILE.npy", "dim"
            )
        if self.chosen:
            sizes = ", ".join(f"{name}={n}" for name, n in self.chosen.items())
            output.message(f"sizes chosen: {sizes}; give them with --dim NAME=N", "dim")


def signature_of(module: LoadedModel) -> list[Value]:
    """A module's inputs as typed values, with symbolic dims where their sizes are open."""
    dims = {d.name: dim(d.name, d.min, d.max) for d in module.manifest.dims}
    return [Value(s.name, s.dtype, [dims[e] if isinstance(e, str) else e for e in s.shape]) for s in module.inputs]


def make_feeds(signature: Sequence[Value], given: Given, sizes: Mapping[str, int], seed: int, usual: int = 1) -> Feeds:
    """An array for every input. Symbolic dims have the sizes given, else those of the arrays given, else the one in range that is
    nearest to `usual`. Raises `InputError` where arrays or sizes do not fit."""
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
    generator, made = np.random.default_rng(seed), []
    for value in signature:
        if value.name in arrays:
            continue
        shape, dtype = tuple(evaluate_int(as_expr(d), dims) for d in value.shape), numpy_dtype(value.dtype)
        try:
            if value.name in given:
                arrays[value.name] = _filled(value.name, float(given[value.name]), shape, dtype)
            else:
                made.append(value.name)
                arrays[value.name] = random_array(generator, shape, dtype)
        except (MemoryError, ValueError) as error:
            where = f"input `{value.name}`, shape {list(shape)}"
            raise InputError("no memory for an input", where=where, why=str(error), hint="smaller sizes, by --dim NAME=N") from error
    return Feeds({v.name: arrays[v.name] for v in signature}, tuple(made), chosen)


def _filled(name: str, number: float, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        value = np.asarray(number).astype(dtype)
    if dtype.kind in "iub" and float(value) != number:
        raise InputError(f"{number:g} is no value of input `{name}`", why=f"its element type is {dtype}")
    return np.full(shape, value, dtype)


# ---------------------------------------------------------------- files


def read_inputs(texts: Iterable[str] | None, signature: Sequence[Value]) -> dict[str, Array | float]:
    """`name=file.npy`, `name=number` and `file.npz` as given on the command line. Raises `InputError`."""
    values = {v.name: v for v in signature}
    given: dict[str, Array | float] = {}
    for text in texts or ():
        if "=" not in text and text.endswith(".npz"):
            found: dict[str, Array | float] = dict(_load(Path(text)))
        else:
            name, _, source = (part.strip() for part in text.rpartition("="))
            if not name or not source:
                raise InputError(f"`{text}` is not of the form NAME=FILE", where="--input", hint="--input image=cat.npy, --input all.npz")
            number = None if Path(source).exists() else _number(source)
            found = {name: _single(Path(source)) if number is None else number}
        for name, value in found.items():
            if name not in values:
                raise InputError(f"the model has no input `{name}`", where=f"--input {text}", hint=f"its inputs are {', '.join(values)}")
            if name in given:
                raise InputError(f"input `{name}` is given twice", where=f"--input {text}")
            given[name] = value if isinstance(value, float) else _checked(value, values[name], text)
    return given


def read_values(texts: Iterable[str] | None) -> dict[str, Array]:
    """`name=number` and `name=file.npy`: inputs that are fixed when a model is compiled. Raises `InputError`."""
    values: dict[str, Array] = {}
    for text in texts or ():
        name, _, source = (part.strip() for part in text.rpartition("="))
        if not name or not source:
            raise InputError(f"`{text}` is not of the form NAME=NUMBER", where="--value", hint="--value sr=16000, --value table=table.npy")
        number = None if Path(source).exists() else _number(source)
        if name in values:
            raise InputError(f"the value of `{name}` is given twice", where=f"--value {text}")
        exact = number is not None and number.is_integer()
        values[name] = _single(Path(source)) if number is None else np.asarray(int(number) if exact else number)
    return values


def _number(text: str) -> float | None:
    if text in ("true", "false"):
        return float(text == "true")
    return float(text) if _NUMBER.fullmatch(text) else None


def _checked(array: Array, value: Value, text: str) -> Array:
    dtype = numpy_dtype(value.dtype)
    if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize and dtype.name == value.dtype == "bfloat16":
        return array.view(dtype)  # .npy files have no name for such types
    if array.dtype != dtype:
        raise InputError(
            f"input `{value.name}` is {array.dtype.name}, the model takes {value.dtype}",
            where=f"--input {text}",
            hint=f"save it with numpy.save(file, array.astype({dtype.name!r}))",
        )
    return array


def _single(path: Path) -> Array:
    arrays = _load(path)
    if set(arrays) != {""}:
        raise InputError(f"{path} holds several arrays", where="--input", hint=f"--input {path} (without a name) takes them by their names")
    return arrays[""]


def _load(path: Path) -> dict[str, Array]:
    """The arrays of a .npz file by name, or that of a .npy file under the name ""."""
    check_file(path, "--input")
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {"": content}
        with content:
            return {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
        pickled = "allow_pickle" in str(error) or "ickle" in str(error)
        why = "it is no array file, or holds pickled objects, which are never loaded" if pickled else str(error)
        raise InputError(f"{path} is no .npy or .npz file", where="--input", why=why, hint="write it with numpy.save") from error
