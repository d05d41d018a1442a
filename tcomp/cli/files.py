"""Files that commands read and write: refused early where they cannot be."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from tcomp.errors import InputError

_ARTIFACT_MAGIC = b"\x89TCOMP"


def check_file(path: Path, where: str = "") -> None:
    """Refuse what is no readable file. Raises `InputError`."""
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


def is_artifact(path: Path) -> bool:
    """Whether a file is an artifact of tcomp rather than a model. Raises `InputError` if it cannot be read."""
    check_file(path)
    with open(path, "rb") as file:
        return file.read(len(_ARTIFACT_MAGIC)) == _ARTIFACT_MAGIC


def check_model_file(path: Path) -> None:
    """Refuse what cannot be an ONNX model. Raises `InputError`."""
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
        why = "it is no regular file, and would be replaced by one"
    elif not folder.is_dir():
        why, hint = f"the folder {folder} does not exist", f"mkdir -p {folder}"
    elif not os.access(folder, os.W_OK):
        why = f"no permission to write in the folder {folder}"
    else:
        return
    raise InputError(f"cannot write {path}", why=why, hint=hint)
