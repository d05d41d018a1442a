"""How a package runs here: for each platform what builds a program with it, and what runs that program."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.runtime import Artifact
from tcomp.runtime.manifest import numpy_dtype
from tcomp.shipping.c_interface import CInterface
from tcomp.shipping.c_package import write_c_package
from tcomp.shipping.wasm_package import write_wasm_package

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Artifact, Arrays, Path], dict[str, np.ndarray]]  # a model, its inputs, an empty folder -> flat outputs
TIMEOUT = 120  # seconds of one command
NODE = """
import { readFileSync, writeFileSync } from "node:fs";
import { load } from "./model/model.mjs";
const model = await load(), feeds = JSON.parse(readFileSync("feeds.json")), tensors = {};
const kinds = { bool: Uint8Array, int8: Int8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array, float32: Float32Array, float64: Float64Array, float16: Uint16Array, bfloat16: Uint16Array,
  complex64: Float32Array, complex128: Float64Array };
model.inputs.forEach(({ name, dtype }, n) => {
  const bytes = readFileSync(`in${n}.bin`), copy = new Uint8Array(bytes).buffer;
  tensors[name] = { data: new (kinds[dtype] ?? Uint8Array)(copy), dims: feeds[n] };
});
const outputs = model.run(tensors);
model.outputs.forEach(({ name }, n) => writeFileSync(`out${n}.bin`, outputs[name].data));
"""


@dataclass(frozen=True)
class Emulated:
    """A platform whose programs run here: `target` as for the compiler, the commands needed, and how a package is run."""

    target: str
    commands: tuple[str, ...]
    run: Run
    linked: bool = True  # whether the package needs the extra `targets`

    @property
    def missing(self) -> str:
        """What is not installed, "" if nothing."""
        absent = [name for name in self.commands if shutil.which(name) is None]
        absent += ["ziglang (pip install '.[targets]')"] * (self.linked and importlib.util.find_spec("ziglang") is None)
        return ", ".join(absent)


def _command(*words: object, folder: Path) -> None:
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, f"{words[0]}: status {done.returncode}: {(done.stderr or done.stdout)[-1000:]}"


def _c(compiler: Sequence[str], emulator: Sequence[str], library: str = "lib/libmodel.a") -> Run:
    """By the package for C: its example, built by a cross compiler, run by an emulator."""

    def run(artifact: Artifact, inputs: Arrays, folder: Path) -> dict[str, np.ndarray]:
        write_c_package(artifact, folder / "model", "model")
        strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Iinclude"]
        _command(*compiler, *strict, "example/main.c", library, "-o", "main.exe", folder=folder / "model")
        if (dll := folder / "model/bin/model.dll").exists():
            shutil.copy(dll, folder / "model")
        c = CInterface("model", artifact.manifest, 0, False, False)
        dims = {name: size for t in artifact.manifest.inputs for name, size in zip(t.shape, inputs[t.name].shape, strict=True)}
        for n, t in enumerate(artifact.manifest.inputs):
            inputs[t.name].tofile(folder / f"model/in{n}.bin")
        sizes, files = [dims[d.name] for _, _, d in c.sizes], [f"in{n}.bin" for n in range(len(c.inputs))]
        _command(*emulator, "./main.exe", *sizes, *files, folder=folder / "model")
        return {t.spec.name: np.fromfile(folder / f"model/{t.name}.bin", numpy_dtype(t.spec.dtype)) for t in c.outputs}

    return run


def in_node(artifact: Artifact, inputs: Arrays, folder: Path) -> dict[str, np.ndarray]:
    """By the WebAssembly package."""
    write_wasm_package(artifact, folder / "model", "model")
    m = artifact.manifest
    feeds: list[Any] = [inputs[t.name].shape for t in m.inputs]
    for n, t in enumerate(m.inputs):
        inputs[t.name].tofile(folder / f"in{n}.bin")
    (folder / "feeds.json").write_text(json.dumps(feeds))
    (folder / "driver.mjs").write_text(NODE)
    _command("node", "driver.mjs", folder=folder)
    return {t.name: np.fromfile(folder / f"out{n}.bin", numpy_dtype(t.dtype)) for n, t in enumerate(m.outputs)}


_RISCV = "rv64,v=true,vlen={},elen=64,zba=true,zbb=true,zbs=true"
PLATFORMS = {
    "wasm32": Emulated("wasm32", ("node",), in_node),
    "aarch64": Emulated(
        "aarch64", ("aarch64-linux-gnu-gcc", "qemu-aarch64"), _c(["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]), linked=False
    ),
    "riscv64": Emulated(
        "riscv64",
        ("riscv64-linux-gnu-gcc", "qemu-riscv64"),
        _c(["riscv64-linux-gnu-gcc", "-static"], ["qemu-riscv64", "-cpu", _RISCV.format(128)]),
    ),
    "riscv64-256": Emulated(  # vectors of 256 bits
        "riscv64 -mattr=+zvl256b",
        ("riscv64-linux-gnu-gcc", "qemu-riscv64"),
        _c(["riscv64-linux-gnu-gcc", "-static"], ["qemu-riscv64", "-cpu", _RISCV.format(256)]),
    ),
    "armv7": Emulated(
        "armv7", ("arm-linux-gnueabihf-gcc", "qemu-arm"), _c(["arm-linux-gnueabihf-gcc", "-static"], ["qemu-arm", "-cpu", "max"])
    ),
    "windows": Emulated(
        "x86_64-windows",
        ("x86_64-w64-mingw32-gcc", "wine"),
        _c(["x86_64-w64-mingw32-gcc"], ["env", "WINEDEBUG=-all", "wine"], "lib/libmodel.dll.a"),
    ),
}
