"""Files that commands read and write: refused early where they cannot be, written completely or not at all."""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

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
        raise InputError(
            f"{path} is a compiled artifact", why="this command takes the ONNX model", hint="`tcomp run` and `tcomp bench` take both"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")


def check_writable(path: Path) -> None:
    """Refuse an output path early, before work that would be lost. Raises `InputError`."""
    folder = path.parent
    if path.is_dir():
        raise InputError(f"cannot write {path}", why="it is a directory", hint=f"name a file, such as {path / 'model.tcomp'}")
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}", why="it is no regular file, and would be replaced by one")
    if not folder.is_dir():
        raise InputError(f"cannot write {path}", why=f"the folder {folder} does not exist", hint=f"mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}", why=f"no permission to write in the folder {folder}")


@contextmanager
def replacing(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Files open for writing and reading that take the places of `paths` once all are complete; none does if anything fails. Raises
    `InputError` if one cannot be written."""
    beside = {path: path.with_name(f".{secrets.token_hex(6)}.{path.name}") for path in paths}
    try:
        with ExitStack() as files:
            yield [files.enter_context(open(temporary, "x+b")) for temporary in beside.values()]
        for path in paths:
            os.replace(beside[path], path)
    except OSError as error:
        raise InputError(f"cannot write {' and '.join(map(str, paths))}", why=error.strerror or str(error)) from error
    finally:
        for temporary in beside.values():
            temporary.unlink(missing_ok=True)
