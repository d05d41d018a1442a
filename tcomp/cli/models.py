"""Opening what a command is given: an artifact is loaded, an ONNX model is compiled first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tcomp.cli.files import check_model_file, is_artifact
from tcomp.cli.options import ModelOptions
from tcomp.errors import InputError
from tcomp.options import Progress
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


def open_model(path: Path, options: ModelOptions, threads: int | None, progress: Progress) -> Opened:
    """Load an artifact, or compile a model as the options say. Raises `TcompError`."""
    if not is_artifact(path):
        check_model_file(path)
        artifact, _ = compile_model(path, options.compile_options(threads=threads, progress=progress))
        return Opened(artifact, {})
    if given := [name for name in options.given if name != "--dim"]:
        raise InputError(f"{given[0]} has no effect on a compiled model", where=str(path), hint="give it to `tcomp compile`")
    artifact = read_artifact(path)
    sizes: dict[str, int] = {}
    for name, size in options.dims.items():
        if not isinstance(size, int):
            why = "a compiled model is run at one size"
            raise InputError(f"the dim `{name}` is given as a range", where=f"--dim {name}", why=why, hint=f"--dim {name}={size[0]}")
        sizes[name] = size
    return Opened(artifact, sizes)
