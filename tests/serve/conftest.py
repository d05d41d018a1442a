"""Small models, and a server that answers on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

PACKAGES = ("starlette", "uvicorn", "orjson", "hpack", "prometheus_client", "grpc")
MISSING = [package for package in PACKAGES if find_spec(package) is None]
collect_ignore_glob = ["test_[!p]*.py"] if MISSING else []  # test_packages.py says so

if TYPE_CHECKING:
    from tests.serve.servers import Running


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "mlp": y[n, 5] = x[n, 8] @ W. "plus1", "plus2": y = x + k. "mixed": a softmax along the batch. "picture": means of the channels."""
    from tests.serve.servers import W, artifact

    folder = tmp_path_factory.mktemp("artifacts")
    row, five = {"x": ["n", 8]}, {"y": ["n", 5]}
    picture = [("ReduceMean", ["x"], "y", {"axes": [2, 3], "keepdims": 0})]
    return {
        "mlp": artifact(folder / "mlp.tcomp", [("MatMul", ["x", "w"], "y")], row, five, w=W),
        "plus1": artifact(folder / "plus1.tcomp", [("Add", ["x", "k"], "y")], row, {"y": ["n", 8]}, k=1.0),
        "plus2": artifact(folder / "plus2.tcomp", [("Add", ["x", "k"], "y")], row, {"y": ["n", 8]}, k=2.0),
        "mixed": artifact(folder / "mixed.tcomp", [("Softmax", ["x"], "y", {"axis": 0})], row, {"y": ["n", 8]}),
        "picture": artifact(folder / "picture.tcomp", picture, {"x": ["n", 3, 16, 16]}, {"y": ["n", 3]}),
    }


def _folder(artifacts: dict[str, Path], folder: Path) -> Path:
    places = {
        "mlp": "mlp.tcomp",
        "plus1": "plus/1/m.tcomp",
        "plus2": "plus/2/m.tcomp",
        "mixed": "mixed.tcomp",
        "picture": "picture/1/m.tcomp",
    }
    for name, place in places.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifacts[name], folder / place)
    image = {"mean": [0, 0, 0], "std": [1, 1, 1], "labels": ["red", "green", "blue"], "top": 2}
    (folder / "picture/serving.json").write_text(json.dumps({"image": image}))
    return folder


@pytest.fixture
def models(artifacts: dict[str, Path], tmp_path: Path) -> Path:
    """A folder of models: "mlp", "plus" in versions 1 and 2, "mixed", "picture"."""
    return _folder(artifacts, tmp_path / "models")


@pytest.fixture(scope="session")
def server(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that tests share, which change nothing about it."""
    from tests.serve.servers import running

    with running(_folder(artifacts, tmp_path_factory.mktemp("shared"))) as found:
        yield found
