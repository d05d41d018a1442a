"""A compiled model as a C package: a folder with a typed header, a shared and a static library, an example, files for CMake and pkg-config.

Nothing is compiled by a C compiler: the code of the artifact becomes one object again (`codegen.elf.relocatable`), is linked with the
functions of the package (`c_entry`) and, unless they stay in a file, the weights; that shared object, as an object, is the static library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from tcomp.codegen.archive import archive
from tcomp.codegen.elf.linker import link
from tcomp.codegen.elf.relocatable import data_object, relocatable
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.codegen.llvm.thread_pool import IMPORTS
from tcomp.errors import InputError, TargetError
from tcomp.runtime import Artifact
from tcomp.runtime.workspace import HUGE_PAGE
from tcomp.shipping import c_text
from tcomp.shipping.c_cross import build_commands, check_cross, cross_libraries
from tcomp.shipping.c_entry import LIBRARY, WEIGHTS, entry_ir
from tcomp.shipping.c_interface import CInterface, check_alone
from tcomp.shipping.folders import new_folder
from tcomp.target import CpuTarget

INSIDE_LIMIT = 1 << 30  # bytes of weights: what code and data of one library can address is 2 GiB


def write_c_package(
    artifact: Artifact, folder: Path, name: str, version: str = "1.0", weights: Literal["inside", "beside"] = "inside"
) -> list[Path]:
    """Write a package of the model under the name `name` (see `c_interface.package_name`) into a new folder; returns its files. Raises
    InputError for a folder that exists, a bad version, weights too large to be inside, or a model with host steps or state; TargetError for
    what is not a CPU's; CodegenError for an artifact of an older release."""
    if artifact.manifest.triple == "cuda":
        why, hint = "a C package is for CPUs; the artifact is for GPUs", "compile the model for a CPU (--target cpu)"
        raise TargetError(f"the model cannot be packaged for {artifact.manifest.triple}", why=why, hint=hint)
    check_alone(artifact.manifest, "C")
    check_version(version)
    size = artifact.weights.nbytes
    if weights == "inside" and size > INSIDE_LIMIT:
        raise InputError(f"{size >> 20} MiB of weights are too much for the inside of a library", hint="--weights-at beside")
    platform = CpuTarget.baseline(artifact.manifest.triple).platform
    threaded = platform.threaded and (bool(platform.linker) or b"\0tcomp_pool_create\0" in artifact.code)
    c = CInterface(name, artifact.manifest, size, weights == "beside" and size > 0, threaded)
    if platform.linker:
        check_cross(platform, c.beside)
    libraries = "-lpthread" * c.threaded
    files: dict[str, str | bytes | memoryview] = {
        f"include/{name}.h": c_text.header(c, _arena(artifact)),
        **(cross_libraries(artifact, c) if platform.linker else _libraries(artifact, c)),
        **({f"lib/{name}.weights": artifact.weights.data} if c.beside else {}),
        "example/main.c": c_text.example(c),
        "README.md": c_text.readme(c, libraries, "" if platform.os == "linux" else build_commands(c, platform)),
    }
    if platform.os == "linux":
        files |= {
            f"lib/pkgconfig/{name}.pc": c_text.pkg_config(c, version, libraries),
            f"lib/cmake/{name}/{name}Config.cmake": c_text.cmake_config(c),
            f"lib/cmake/{name}/{name}ConfigVersion.cmake": c_text.cmake_version(version),
            "example/CMakeLists.txt": c_text.cmake_example(c),
        }
    with new_folder(folder) as root:
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return [folder / path for path in files]


def _libraries(artifact: Artifact, c: CInterface) -> dict[str, bytes]:
    """The libraries, by their place in the package, where this package is the linker."""
    target = CpuTarget.baseline(artifact.manifest.triple)
    objects = [relocatable(artifact.code), compile_ir(entry_ir(c), target)]
    if c.weights and not c.beside:
        align = HUGE_PAGE if c.weights >= 8 * HUGE_PAGE else 64  # huge pages may be mapped as such, where the file's cache has them
        objects.append(data_object(target.arch, WEIGHTS, artifact.weights.data, align))
    shared = link(objects, c.exports, imports=[*IMPORTS, *LIBRARY], soname=f"lib{c.name}.so")
    return {f"lib/lib{c.name}.so": shared, f"lib/lib{c.name}.a": archive([("model.o", relocatable(shared), c.exports)])}


def check_version(version: str) -> None:
    """Refuse what is not a version for CMake, pkg-config and pip alike. Raises InputError."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", version):
        raise InputError(f"`{version}` is not a version", where="--version", hint="numbers with dots, as in --version 1.0")


def _arena(artifact: Artifact) -> int | None:
    """Bytes of workspace; None where free sizes decide. Raises InputError for an artifact that does not say."""
    if artifact.manifest.dims:
        return None
    if not isinstance(found := artifact.notes.get("workspace"), int):
        raise InputError("the artifact does not say how much memory a run takes", where=artifact.where, hint="compile the model again")
    return found
