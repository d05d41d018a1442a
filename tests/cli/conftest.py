"""Small models, and a way to call `tcomp`."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from tcomp.cli.app import app


def save(path, nodes, inputs, outputs, weights=None, opset=17):
    types = {np.dtype(t): n for t, n in (("float32", TensorProto.FLOAT), ("int64", TensorProto.INT64), ("bool", TensorProto.BOOL))}
    ends = [
        [helper.make_tensor_value_info(name, types[np.dtype(dtype)], shape) for name, (dtype, shape) in group.items()]
        for group in (inputs, outputs)
    ]
    constants = [numpy_helper.from_array(a, name) for name, a in (weights or {}).items()]
    graph = helper.make_graph(
        [helper.make_node(n[0], n[1], n[2], n[2][0], **(n[3] if len(n) > 3 else {})) for n in nodes], "net", ends[0], ends[1], constants
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Kernels compiled by these tests are shared among them, and with nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TCOMP_CACHE", str(folder))
        patch.setattr("tcomp.calibration.measure", lambda target: target.core)  # seconds, for figures that no test looks at
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths by name. "mlp": softmax(relu(x w + b)), batch open; "plain": two elementwise outputs; "missing" cannot be compiled."""
    folder, generator = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    w, b = generator.standard_normal((8, 5), np.float32), generator.standard_normal(5, np.float32)
    mlp = [("MatMul", ["x", "w"], ["h"]), ("Add", ["h", "b"], ["hb"]), ("Relu", ["hb"], ["r"]), ("Softmax", ["r"], ["y"], {"axis": -1})]
    plain = [("Add", ["p", "q"], ["total"]), ("Exp", ["total"], ["power"])]
    scan = helper.make_graph(
        [helper.make_node("Add", ["state", "slice"], ["next"], "next"), helper.make_node("Tanh", ["next"], ["row"], "row")],
        "step",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("state", "slice")],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("next", "row")],
    )
    floats = {"x": ("float32", ["batch", 8])}
    return {
        "folder": folder,
        "mlp": save(folder / "mlp.onnx", mlp, floats, {"y": ("float32", ["batch", 5])}, {"w": w, "b": b}),
        "plain": save(
            folder / "plain.onnx",
            plain,
            {"p": ("float32", [2, 3]), "q": ("float32", [3])},
            {"total": ("float32", [2, 3]), "power": ("float32", [2, 3])},
        ),
        "missing": save(
            folder / "missing.onnx",
            [("Relu", ["x"], ["r"]), ("Frobnicate", ["r"], ["nz"]), ("Cast", ["nz"], ["y"], {"to": 1})],
            {"x": ("float32", [4])},
            {"y": ("float32", [1, None])},
        ),
        "gather": save(
            folder / "gather.onnx",
            [("Gather", ["table", "ids"], ["g"]), ("HardSwish", ["g"], ["y"])],
            {"ids": ("int64", ["seq"])},
            {"y": ("float32", ["seq", 5])},
            {"table": w},
        ),
        "scan": save(
            folder / "scan.onnx",
            [("Exp", ["xs"], ["e"]), ("Scan", ["s", "e"], ["last", "rows"], {"body": scan, "num_scan_inputs": 1})],
            {"s": ("float32", [4]), "xs": ("float32", ["time", 4])},
            {"last": ("float32", [4]), "rows": ("float32", ["time", 4])},
        ),
        "reshape": save(
            folder / "reshape.onnx",
            [("Reshape", ["x", "shape"], ["y"])],
            {"x": ("float32", [6]), "shape": ("int64", [2])},
            {"y": ("float32", [None, None])},
        ),
        "w": w,
        "b": b,
    }


class Tcomp:
    """Calls commands in this process."""

    def __call__(self, *arguments, status=0):
        result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="tcomp")
        assert result.exit_code == status, (result.exit_code, result.output)
        return result

    def json(self, *arguments, status=0):
        """The document printed with --json: stdout holds nothing else."""
        return json.loads(self(*arguments, "--json", status=status).stdout)


@pytest.fixture(scope="session")
def command():
    """For what is made once for all tests."""
    return Tcomp()


@pytest.fixture
def tcomp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Tcomp()


@pytest.fixture(scope="session")
def artifact(models, cache, tmp_path_factory):
    """ "mlp" compiled for batch sizes 1 to 64."""
    path = tmp_path_factory.mktemp("artifacts") / "mlp.tcomp"
    Tcomp()("compile", models["mlp"], "-o", path, "--dim", "batch=1..64")
    return path
