"""Running a compiled model on files, from a command line: `tcomp-runtime run`, and the commands of packaged models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tcomp.errors import InputError, TcompError, printable
from tcomp.runtime.array_files import load_arrays, save_arrays
from tcomp.runtime.arrays import Array
from tcomp.runtime.loaded_model import LoadedModel
from tcomp.runtime.manifest import from_saved
from tcomp.runtime.module import Module

REFUSED = 2  # the exit status
SHOWN_STRINGS = 5  # of an output, on its line


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `tcomp-runtime`; its exit status: 0, or 2 for what is refused, with a message on stderr."""
    parser = argparse.ArgumentParser("tcomp-runtime", description="Runs models that tcomp compiled. NumPy is all that it needs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser("run", help="run a compiled model on files", description="Run a compiled model on files.")
    run.add_argument("model", metavar="MODEL.tcomp")
    _add_options(run)
    run.add_argument("--trusted", metavar="PUBLIC.pem", help="run only what the owner of this public key of Ed25519 signed")
    given = _parsed(parser, arguments)
    return _guarded(lambda: _run(Module.load(given.model, threads=given.threads, trusted=given.trusted), given))


def run_packaged(load: Callable[[int | None], LoadedModel], name: str, arguments: Sequence[str] | None = None) -> int:
    """The command of one model, which `load` loads for a number of threads; its exit status as of `main`."""
    parser = argparse.ArgumentParser(name, description=f"Runs the model {name} on files.")
    _add_options(parser)
    given = _parsed(parser, arguments)
    return _guarded(lambda: _run(load(given.threads), given))


def _add_options(parser: argparse.ArgumentParser) -> None:
    what = "inputs: NAME=FILE.npy; FILE.npz, with arrays by name; or one FILE.npy for each input, in order"
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=what)
    parser.add_argument("--save", metavar="FILE.npz", help="save the outputs, by name (with _ for / and other signs of paths)")
    parser.add_argument("--threads", type=int, metavar="N", help="at most so many threads; default: as compiled")


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Inputs that follow an option are left over by argparse."""
    given, rest = parser.parse_known_args(arguments)
    if unknown := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown options: {' '.join(unknown)}")
    given.inputs += rest
    return given


def _guarded(run: Callable[[], None]) -> int:
    try:
        run()
    except TcompError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _run(model: LoadedModel, given: argparse.Namespace) -> None:
    outputs = model.run(read_inputs(model, given.inputs))
    for name, array in outputs.items():
        print(summary(name, array))
    if given.save is not None:
        print(f"wrote {printable(str(save_arrays(given.save, outputs)))}")


def read_inputs(model: LoadedModel, texts: Sequence[str]) -> dict[str, Array]:
    """Arrays for all inputs of a model, from `NAME=FILE.npy`, `FILE.npz` and, in the order of the inputs, `FILE.npy`. Raises InputError."""
    specs, takes = {spec.name: spec for spec in model.inputs}, ", ".join(map(str, model.inputs))
    found: dict[str, Array] = {}

    def add(name: str, array: Array, where: str) -> None:
        if name not in specs:
            raise InputError(f"the model has no input `{name}`", where=where, hint=f"it takes {takes}")
        if name in found:
            raise InputError(f"input `{name}` is given twice", where=where)
        found[name] = from_saved(array, specs[name].dtype)

    plain = []
    for text in texts:
        name, sign, path = text.partition("=")
        if sign and (name in specs or Path(path).is_file()) and not Path(text).is_file():
            arrays = load_arrays(path, text)
            if [*arrays] != [""]:
                raise InputError(f"{path} holds several arrays", where=text, hint=f"{path} (without a name) takes them by their names")
            add(name, arrays[""], text)
            continue
        arrays = load_arrays(text)
        plain += [(text, arrays.pop(""))] if [*arrays] == [""] else []
        for name, array in arrays.items():
            add(name, array, text)
    missing = [name for name in specs if name not in found]
    if len(plain) != len(missing):
        what = f"{len(plain)} files for the {len(missing)} inputs that have no name" if plain else f"missing inputs: {', '.join(missing)}"
        raise InputError(what, hint=f"the model takes {takes}")
    for name, (text, array) in zip(missing, plain, strict=True):
        add(name, array, text)
    return {name: found[name] for name in specs}


def summary(name: str, array: Array) -> str:
    """One line about an output: type, shape, range, and where the largest element is, which for a classifier is the class."""
    if array.dtype == object:  # strings
        shown = ", ".join(printable(str(text)) for text in array.reshape(-1)[:SHOWN_STRINGS])
        return f"{printable(name)}: strings{[*array.shape]}: {shown}{', ...' * (array.size > SHOWN_STRINGS)}"
    said = f"{printable(name)}: {array.dtype}{[*array.shape]}"
    numbers = array.astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
    if not array.size or np.isnan(numbers).all():
        return said
    most = [int(n) for n in np.unravel_index(int(np.nanargmax(numbers)), array.shape)]
    return f"{said}, from {np.nanmin(numbers):.5g} to {np.nanmax(numbers):.5g}, the largest at {most}"
