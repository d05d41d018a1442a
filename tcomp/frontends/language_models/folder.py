"""A folder of Hugging Face: config.json and weights in safetensors, read by the `safetensors` package."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from tcomp.errors import ImportModelError
from tcomp.frontends.language_models.architectures import model_graph
from tcomp.frontends.language_models.stored import StoredBlocks, packing
from tcomp.frontends.language_models.values import read_config
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def import_folder(path: str | os.PathLike[str], batch: Dim = 1, drafts: int = 0) -> Graph:
    """The model in a folder, with the inputs and outputs that the file of its graph says; a decoder for a `batch` of sequences or with
    `drafts`. Raises `ImportModelError` for what is damaged or does not fit, and as `model_graph`."""
    folder = Path(path)
    place = str(folder / "config.json")
    given = read_config(folder / "config.json")
    packed, files = packing(given, place), _tensors(folder)

    def tensor(name: str, shape: tuple[int, ...], integers: bool = False) -> np.ndarray:
        if name not in files:
            raise ImportModelError(
                f"the weights lack `{name}`", where=str(folder), hint="files *.safetensors of the whole model are needed"
            )
        try:
            with safe_open(files[name], framework="numpy") as file:
                part = file.get_slice(name)
                found, dtype = tuple(part.get_shape()), part.get_dtype()
                if found != shape or dtype not in (("I32",) if integers else _FLOATS):
                    why = f"{'int32' if integers else 'float32, float16 or bfloat16'} {list(shape)} is expected"
                    raise ImportModelError(f"`{name}` is {dtype} {list(found)}", where=str(files[name]), why=why)
                return np.asarray(file.get_tensor(name))
        except (SafetensorError, OSError, TypeError) as error:
            raise ImportModelError(f"`{name}` cannot be read", where=str(files[name]), why=str(error)) from None

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray | StoredBlocks:
        base = name.removesuffix(".weight")
        if packed is None or len(shape) != 2 or f"{base}.qweight" not in files:
            return tensor(name, shape)
        return packed.read(tensor, files, base, *shape)

    # Matrices in few bits have other names than those that are asked for.
    names = {**files, **{name.replace(".qweight", ".weight"): path for name, path in files.items()}}
    return model_graph(given, read, names, place, batch, drafts)


def _tensors(folder: Path) -> dict[str, Path]:
    """The file of each tensor, of all files of safetensors right in a folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise ImportModelError("this is not a file of safetensors", where=str(path), why=str(error)) from None
    if not found:
        raise ImportModelError("there are no weights", where=str(folder), hint="one file *.safetensors, or several")
    return found
