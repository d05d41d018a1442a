"""WebAssembly packages: run in Node, with the results of native code."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tcomp.cli.app import app
from tcomp.errors import TargetError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.shipping import linker
from tcomp.shipping.wasm_package import write_wasm_package
from tests.shipping import conftest as models

needs_linker = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (pip install '.[targets]')")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")
DRIVER = """
import { load } from "./%s.mjs";
const feeds = JSON.parse(process.argv[2]), tensors = {};
for (const [name, { data, dims, dtype }] of Object.entries(feeds))
  tensors[name] = { data: dtype === "int64" ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dims };
const model = await load(), first = model.run(tensors), outputs = model.run(tensors);
if (JSON.stringify(first, plain) !== JSON.stringify(outputs, plain)) throw new Error("two runs differ");
function plain(key, value) {
  return typeof value === "bigint" ? Number(value) : ArrayBuffer.isView(value) ? Array.from(value) : value;
}
console.log(JSON.stringify(outputs, plain));
"""


def in_node(folder: Path, name: str, feeds: dict[str, np.ndarray], status: int = 0) -> str:
    (folder / "driver.mjs").write_text(DRIVER % name)
    given = {n: {"data": x.ravel().tolist(), "dims": x.shape, "dtype": x.dtype.name} for n, x in feeds.items()}
    command = ["node", "driver.mjs", json.dumps(given)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


@needs_linker
@needs_node
@pytest.mark.parametrize("name", ["residual", "recurrent", "detector", "convolutional"])
def test_results_are_those_of_native_code(modules, tmp_path, name):
    module, feeds = modules[name]
    kinds = {"recurrent": {"time": (1, 64)}, "convolutional": {"n": (1, 4)}}
    onnx = {"residual": models.residual, "recurrent": models.recurrent, "detector": models.detector, "convolutional": models.convolutional}
    artifact = compile_model(onnx[name](), CompileOptions(target="wasm32", dims=kinds.get(name)))[0]
    write_wasm_package(artifact, tmp_path / name, name)
    feeds = {n: x[..., :6] if name == "convolutional" else x for n, x in feeds.items()}
    found, expected = json.loads(in_node(tmp_path / name, name, feeds)), module.run(feeds)
    assert found.keys() == expected.keys()
    for output, values in expected.items():
        assert found[output]["dims"] == list(values.shape)
        np.testing.assert_allclose(np.reshape(found[output]["data"], values.shape), values, rtol=1e-5, atol=1e-5)
    if name == "convolutional":
        odd = {"x": np.zeros((2, 3, 10, 6), np.float32)}
        assert "must be at least 1 and at most 4" in in_node(tmp_path / name, name, {"x": np.zeros((5, 3, 10, 6), np.float32)}, 1)
        assert "there is no input z" in in_node(tmp_path / name, name, {"z": odd["x"]}, 1)


@needs_linker
def test_the_command_packages_for_webassembly_unasked(onnx_file, tmp_path):
    command = ["package", str(onnx_file), "--format", "wasm", "-o", str(tmp_path / "net"), "--name", "net"]
    result = CliRunner().invoke(app, command, prog_name="tcomp")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "net").iterdir()}
    assert names == {"net.wasm", "net.weights", "net.mjs", "net.d.ts", "index.html", "package.json", "README.md"}
    assert '"in put/0": Float32Array | Tensor<Float32Array>;' in (tmp_path / "net/net.d.ts").read_text()
    assert "$" + "NAME" not in (tmp_path / "net/net.mjs").read_text() + (tmp_path / "net/index.html").read_text()


def test_formats_and_platforms_have_to_fit(monkeypatch, modules, tmp_path):
    with pytest.raises(TargetError, match="compile the model with --target wasm32"):
        write_wasm_package(modules["residual"][0].artifact, tmp_path / "net", "net")
    with pytest.raises(TargetError, match="--format wasm"):
        linker.check_packaged("wasm32-unknown-unknown", "c")
    with pytest.raises(TargetError, match="--target wasm32"):
        linker.check_packaged("x86_64-unknown-linux-gnu", "wasm")
    with pytest.raises(TargetError, match="--format c"):
        linker.check_packaged("riscv64-unknown-linux-gnu", "wheel")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match="pip install"):
        linker.check_packaged("riscv64-unknown-linux-gnu", "c")
