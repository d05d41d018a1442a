"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tcomp.errors import ArtifactError, TcompError


@contextmanager
def replacing(*paths: Path, error: type[TcompError] = ArtifactError) -> Iterator[list[BinaryIO]]:
    """Files, open for writing and reading, that take the places of `paths` once all are complete; none does if anything fails. A
    reader sees the old file or the new one. Raises `error` if one cannot be written."""
    temporary = {path: path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp") for path in paths}
    try:
        with ExitStack() as files:
            yield [files.enter_context(open(name, "x+b")) for name in temporary.values()]
        for path, name in temporary.items():
            os.replace(name, path)
    except OSError as problem:
        raise error(f"cannot write {' and '.join(map(str, paths))}", why=problem.strerror or str(problem)) from problem
    finally:
        for name in temporary.values():
            with suppress(OSError):
                name.unlink()
