"""Folders that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tcomp.errors import InputError


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that exists and is not empty, or cannot be made. Raises InputError."""
    hint = "give another name with -o, or remove it first"
    if "\0" in str(folder):
        raise InputError(f"cannot write the folder {folder}", why="its name has a NUL", hint=hint)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write the folder {folder}", why="there is a file of this name", hint=hint)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"cannot write the folder {folder}", why="it exists, and is not empty", hint=hint)
        if not folder.absolute().parent.is_dir():
            why = f"the folder {folder.absolute().parent} does not exist"
            raise InputError(f"cannot write the folder {folder}", why=why, hint=f"mkdir -p {folder.absolute().parent}")
    except (OSError, ValueError) as problem:
        raise InputError(f"cannot write the folder {folder}", why=str(problem), hint=hint) from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets the name `folder` once it is complete. Raises InputError if it cannot be written."""
    check_new_folder(folder)
    temporary = folder.absolute().parent / f".{folder.absolute().name}.{secrets.token_hex(6)}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        os.rename(temporary, folder.absolute())  # takes the place of an empty one
    except OSError as problem:
        raise InputError(f"cannot write the folder {folder}", why=problem.strerror or str(problem)) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
