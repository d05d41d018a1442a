"""Arrays in files of NumPy's formats, by the names that a model gives them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime.arrays import Array
from tcomp.runtime.artifact import replacing
from tcomp.runtime.manifest import to_saved

MAX_MEMBER = 200  # characters of a name in a .npz file: file systems allow 255 bytes, often


def load_arrays(path: str | os.PathLike[str], where: str = "") -> dict[str, Array]:
    """The arrays of a .npz file by name, or that of a .npy file under the name "". Objects that need pickle are never loaded. Raises
    InputError, which says `where` the file was named."""
    path = Path(path)
    if not path.is_file():
        why = "it is a folder" if path.is_dir() else "it is not a file" if path.exists() else "it does not exist"
        raise InputError(f"cannot read {path}", where=where, why=why)
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return {"": content}
        with content:
            return {name: content[name] for name in content.files}
    except Exception as error:  # a damaged file: zlib.error, TokenError, NotImplementedError, BadZipFile, ValueError, MemoryError, ...
        why, hint = f"{error}; pickled objects are never loaded", "write it with numpy.save, float8_e5m2 as array.view('V1')"
        raise InputError(f"{path} is not a .npy or .npz file", where=where, why=why, hint=hint) from error


def npz_path(path: Path) -> Path:
    """The path with the ending .npz."""
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> Path:
    """Write a .npz file, atomically: what `numpy.savez` writes, which cannot be given every name; arrays of strings become NumPy's own.
    Returns its path, which gets the ending .npz if it has none. Raises InputError."""
    path = npz_path(Path(path))
    members = {_member(name): array for name, array in arrays.items()}
    if len(members) < len(arrays):
        raise InputError(f"cannot write {path}", why="the names of the arrays clash in a .npz file")
    with replacing(path, error=InputError) as (file,), zipfile.ZipFile(file, "w") as archive:
        for name, array in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, to_saved(array.astype(str) if array.dtype == object else array), allow_pickle=False)
    return path


def _member(name: str) -> str:
    """The name of an output as that of a file in an archive, which stays in the folder where it is unpacked."""
    plain = "".join("_" if c in "/\\:" or not c.isprintable() else c for c in name)[:MAX_MEMBER]
    return f"_{plain[1:]}" if plain[:1] in (".", "") else plain
