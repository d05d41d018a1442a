"""Opening what a command is given: an artifact is loaded, an ONNX model is compiled first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tcomp.cli.files import check_model_file, is_artifact
from tcomp.cli.options import parse_dims, parse_shapes, parse_target
from tcomp.errors import InputError
from tcomp.options import CompileOptions, Progress
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact, read_artifact
from tcomp.target import Target


@dataclass(frozen=True)
class Opened:
    """An artifact, and the sizes that the user gives the dims it leaves open."""

    artifact: Artifact
    sizes: dict[str, int]

    @property
    def precision(self) -> str | None:
        """In which products of float32 matrices are computed; None on CPUs, which have no choice."""
        manifest = self.artifact.manifest
        return Target.parse(str(manifest.notes.get("target", "cuda"))).precision if manifest.triple == "cuda" else None


def open_model(
    path: Path,
    dims: Sequence[str] | None,
    shapes: Sequence[str] | None,
    target: str | None,
    arch: str | None,
    precision: str | None,
    threads: int | None,
    progress: Progress,
) -> Opened:
    """Load an artifact, or compile a model for the dims and shapes given. Raises `TcompError`."""
    ranges, fixed = parse_dims(dims), parse_shapes(shapes)
    if not is_artifact(path):
        check_model_file(path)
        options = CompileOptions(parse_target(target, arch, precision), fixed, ranges, threads, progress=progress)
        artifact, _ = compile_model(path, options)
        return Opened(artifact, {})
    for given, option in ((shapes, "--shape"), (target, "--target"), (arch, "--arch"), (precision, "--precision")):
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
