"""A compiled model as a wheel for Python: `pip install` it, and `import` it; NumPy is all that it needs.

The package has the artifact and a copy of the runtime of its own. Wheels are described at
https://packaging.python.org/en/latest/specifications/binary-distribution-format.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import tcomp
from tcomp.errors import InputError, TargetError
from tcomp.runtime import Artifact, Manifest
from tcomp.shipping.c_package import check_version
from tcomp.shipping.folders import new_folder
from tcomp.shipping.runtime_copy import runtime_files

REQUIRES_PYTHON, REQUIRES = ">=3.11", ("numpy>=1.26",)
_PLATFORMS = {"x86_64": "manylinux_2_17_x86_64", "aarch64": "manylinux_2_17_aarch64"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the least date of a zip file, so that equal contents are equal wheels
_TAKEN = {"numpy", "tcomp", "tcomp_runtime"}


def write_wheel(
    artifact: Artifact, folder: Path, name: str, version: str = "1.0", weights: Literal["inside", "beside"] = "inside"
) -> list[Path]:
    """Write a wheel of the model, whose package is `name` (see `c_interface.package_name`), into a new folder; returns its files. With the
    weights `beside`, the wheel has code alone, and the artifact is a second file. Raises InputError for a folder that exists, a bad
    version, or the name of a package that it needs; TargetError for a machine that wheels have no name for."""
    check_version(version)
    if name in _TAKEN:
        raise InputError(f"a wheel cannot have the name {name}", where="--name", why="it is that of a package", hint=f"--name {name}_model")
    platform = platform_name(artifact.manifest, "a wheel")
    tag = f"py3-none-{platform}"
    files: dict[str, str | memoryview] = {f"{name}/_runtime/{path}": text for path, text in runtime_files(f"{name}._runtime").items()}
    files[f"{name}/__init__.py"] = _module(artifact, name, weights)
    files[f"{name}/__main__.py"] = _main(name)
    files[f"{name}/py.typed"] = ""
    if weights == "inside":
        files[f"{name}/model.tcomp"] = artifact.image
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(artifact.manifest, name, version, weights)
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tcomp {tcomp.__version__}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name} = {name}.__main__:main\n"
    wheel = f"{name}-{version}-{tag}.whl"
    with new_folder(folder) as root:
        with open(root / wheel, "xb") as file:
            _write_zip(file, files, f"{info}/RECORD")
        if weights == "beside":
            artifact.save(root / f"{name}.tcomp")
    return [folder / wheel, *[folder / f"{name}.tcomp"] * (weights == "beside")]


def platform_name(manifest: Manifest, what: str) -> str:
    """The machine of a model as wheels call it. Raises TargetError where the runtime is not for it, and so the model cannot be `what`."""
    arch, *rest = manifest.triple.split("-")
    if arch not in _PLATFORMS or "linux" not in rest:
        why = f"there is no name for this machine among {', '.join(_PLATFORMS.values())}"
        raise TargetError(f"the model cannot be {what}: it is for {manifest.triple}", why=why, hint="compile it for a CPU, under Linux")
    return _PLATFORMS[arch]


def _write_zip(file: io.BufferedWriter, files: Mapping[str, str | memoryview], record: str) -> None:
    """A zip file with these members, and the list of their digests under the name `record`."""
    listed = io.StringIO()
    rows = csv.writer(listed, lineterminator="\n")
    with zipfile.ZipFile(file, "w") as archive:

        def add(path: str, content: bytes | memoryview) -> None:
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o100644 << 16
            # Weights hardly get smaller, and pip has them on disk sooner.
            entry.compress_type = zipfile.ZIP_STORED if isinstance(content, memoryview) else zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=len(content) >= zipfile.ZIP64_LIMIT) as member:
                member.write(content)

        for path, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            add(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow((path, f"sha256={digest}", len(content)))
        rows.writerow((record, "", ""))
        add(record, listed.getvalue().encode())


def _described(manifest: Manifest) -> tuple[str, ...]:
    """Inputs, outputs, the compiler and the processor, for people: texts of the artifact, which are anyone's, as plain words."""
    inputs, outputs = (", ".join(map(str, specs)) for specs in (manifest.model_inputs, manifest.model_outputs))
    return tuple(_plain(text) for text in (inputs or "nothing", outputs, manifest.producer, f"{manifest.triple} ({manifest.cpu})"))


def _metadata(manifest: Manifest, name: str, version: str, weights: str) -> str:
    inputs, outputs, producer, machine = _described(manifest)
    beside = f"\nIts weights are the file `{name}.tcomp`: give its path to `{name}.load`, or set `{name.upper()}_MODEL` to it.\n"
    return f"""\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: A neural network, compiled by {producer}
Requires-Python: {REQUIRES_PYTHON}
{chr(10).join(f"Requires-Dist: {requirement}" for requirement in REQUIRES)}
Description-Content-Type: text/markdown

# {name}

A neural network, compiled by {producer} for {machine}. It takes {inputs},
and computes {outputs}.

```python
import {name}
y = {name}.run({", ".join(f"x{n}" for n in range(len(manifest.model_inputs)))})
```

`{name} FILE.npy --save outputs.npz` runs it on files.
{beside if weights == "beside" else ""}
A model is native code: install it only if you trust who made it.
"""


def _plain(text: str) -> str:
    """Text without what would end a line, or begin code, in Markdown and Python."""
    return "".join(c if c.isprintable() and c not in '`"\\' else "_" for c in text)


def _module(artifact: Artifact, name: str, weights: str) -> str:
    """`__init__.py`. What it needs is imported by the first run: until then, importing it costs next to nothing."""
    inputs, outputs, producer, _ = _described(artifact.manifest)
    if weights == "inside":
        found = '    path = os.path.join(os.path.dirname(__file__), "model.tcomp") if path is None else path'
        where = "`path` is that of another file with the same model."
    else:
        found = f"""\
    if path is None and not (path := os.environ.get("{name.upper()}_MODEL")):
        from {name}._runtime.errors import InputError

        hint = "{name}.load(path), or set {name.upper()}_MODEL to the path of {name}.tcomp"
        raise InputError("the weights of {name} are not in its wheel", hint=hint)"""
        where = f"`path` is that of {name}.tcomp, by default what {name.upper()}_MODEL says."
    digest = hashlib.sha256(artifact.signed).hexdigest()
    return f'''\
"""{name}: a neural network, compiled by {producer}.

It takes {inputs}, and computes {outputs}. `run` takes and returns arrays; `model()` is what it
runs: a `LoadedModel`, with runs by the names of inputs, into arrays of yours (`bind`), with time limits, profiles. NumPy is all it needs.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from {name}._runtime import LoadedModel

__all__ = ["load", "model", "run"]

_lock = threading.RLock()
_loaded: LoadedModel | None = None


def load(path: str | os.PathLike[str] | None = None, threads: int | None = None) -> LoadedModel:
    """The model, for at most so many threads; from now on, `model` and `run` use it. {where}
    Raises TcompError (in {name}._runtime.errors) if it is not this model, is damaged, or needs another processor."""
    global _loaded
{found}
    from {name}._runtime import Module, read_artifact
    from {name}._runtime.errors import ArtifactError

    artifact = read_artifact(path)
    from hashlib import sha256

    if sha256(artifact.signed).hexdigest() != "{digest}":
        raise ArtifactError("this is not the model of the wheel", where=os.fspath(path), hint="use the file that was made with it")
    with _lock:
        _loaded = Module.load(artifact, threads=threads)
        return _loaded


def model() -> LoadedModel:
    """The model, loaded when it is first asked for. Raises as `load`."""
    with _lock:
        return load() if _loaded is None else _loaded


def run(*inputs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
    """Run the model on inputs in order, arrays of the declared types and shapes: its output, or a tuple if it has several. Any number of
    threads may call it. Raises InputError (in {name}._runtime.errors) for inputs that do not fit."""
    return (_loaded or model())(*inputs)
'''


def _main(name: str) -> str:
    return f'''\
"""`{name} FILE.npy`, or `python -m {name} FILE.npy`: the model on files."""

import sys

import {name}


def main() -> int:
    from {name}._runtime.command import run_packaged

    return run_packaged(lambda threads: {name}.load(threads=threads), "{name}")


if __name__ == "__main__":
    sys.exit(main())
'''
