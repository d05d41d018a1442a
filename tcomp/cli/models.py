"""Opening what a command is given: an artifact is loaded, an ONNX model is compiled first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcomp.cli.files import check_model_file, is_artifact
from tcomp.cli.options import parse_dims, parse_shapes
from tcomp.driver import Progress, compile_model
from tcomp.errors import InputError
from tcomp.runtime import Artifact, read_artifact


@dataclass(frozen=True)
class Opened:
    """An artifact, and the sizes that the user gives the dims it leaves open."""

    artifact: Artifact
    sizes: dict[str, int]


def open_model(
    path: Path, dims: Sequence[str] | None, shapes: Sequence[str] | None, target: str | None, threads: int | None, progress: Progress
) -> Opened:
    """Load an artifact, or compile a model for the dims and shapes given. Raises `TcompError`."""
    ranges, fixed = parse_dims(dims), parse_shapes(shapes)
    if not is_artifact(path):
        check_model_file(path)
        artifact, _ = compile_model(path, target, fixed, ranges, threads, progress=progress)
        return Opened(artifact, {})
    for given, option in ((shapes, "--shape"), (target, "--target")):
        if given:
            raise InputError(f"{option} has no effect on a compiled model", where=str(path), hint="give it to `tcomp compile`")
    artifact = read_artifact(path)
    sizes: dict[str, int] = {}
    for name, size in ranges.items():
        if not isinstance(size, int):
            why = "a compiled model is run at one size"
            raise InputError(f"the dim `{name}` is given as a range", where=f"--dim {name}", why=why, hint=f"--dim {name}={size[0]}")
        sizes[name] = size
    return Opened(artifact, sizes)
