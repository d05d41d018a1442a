"""What was computed before, in a folder (`$TCOMP_CACHE`, else `~/.cache/tcomp`): compiled kernels, layouts, figures of the machine.

One small file each: the SHA-256 of its name and content, a line's end, JSON. It is written to the side and renamed, so that any number of
processes may share the folder; a damaged file is as good as none, and a folder that cannot be written costs only time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tcomp.errors import ArtifactError
from tcomp.runtime.artifact import replacing

T = TypeVar("T")


def folder() -> Path:
    """`$TCOMP_CACHE`, else `$XDG_CACHE_HOME/tcomp`, else `~/.cache/tcomp`."""
    if chosen := os.environ.get("TCOMP_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tcomp"


@functools.cache
def source_version() -> str:
    """A digest of the compiler's sources and its LLVM: another compiler must not be handed what this one made."""
    import llvmlite  # not to describe a target, nor to find what was measured

    root = Path(__file__).parent
    digest = hashlib.sha256(str(llvmlite.__version__).encode())
    folders = ("ir", "ops", "schedules", "codegen", "backends")
    for path in (root / "machines.py", root / "target.py", *(path for part in folders for path in sorted((root / part).rglob("*.py")))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def name(*parts: str) -> str:
    """The name of what is computed from these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(kind: str, name: str) -> Any:
    """The record stored under a name, None if there is none."""
    try:
        digest, content = _path(kind, name).read_bytes().split(b"\n", 1)
        return json.loads(content) if digest == _digest(kind, name, content) else None
    except (OSError, ValueError, RecursionError):
        return None


def store(kind: str, name: str, record: Any) -> None:
    """Keep a record, of what JSON can say."""
    content, path = json.dumps(record).encode(), _path(kind, name)
    with suppress(OSError, ArtifactError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as (file,):
            file.write(_digest(kind, name, content) + b"\n" + content)


def recall(kind: str, name: str, compute: Callable[[], T]) -> T:
    """The record stored under a name; if there is none it is computed, and stored."""
    found: T | None = load(kind, name)
    if found is None:
        found = compute()
        store(kind, name, found)
    return found


def _path(kind: str, name: str) -> Path:
    return folder() / kind / name[:2] / f"{name}.json"


def _digest(kind: str, name: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{kind} {name}\n".encode() + content).hexdigest().encode()
