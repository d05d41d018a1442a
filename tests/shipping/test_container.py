"""Images of models: the folder, and the server in it, run as the image runs it, but for the container."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.errors import InputError, TargetError
from tcomp.runtime import read_artifact
from tcomp.shipping.container import TEXT_REQUIREMENTS, write_container

COMPILERS = ("llvmlite", "islpy", "onnx", "ml_dtypes", "xgboost")  # packages that the image lacks


@pytest.fixture(scope="module")
def image(modules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image") / "net"
    write_container(modules["recurrent"][0].artifact, folder, "net", "1.5")
    return folder


def command(image: Path, instruction: str) -> list[str]:
    """What the image runs, by the Python of the tests."""
    (text,) = re.findall(rf"\b{instruction} (\[.*\])$", (image / "Containerfile").read_text(), re.MULTILINE)
    python, *arguments = json.loads(text)
    assert python == "python"
    return [sys.executable, *arguments]


@pytest.fixture(scope="module")
def server(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(image, tmp_path_factory.mktemp("server")) as url:
        yield url


@contextmanager
def serving(image: Path, folder: Path) -> Iterator[str]:
    """The address of the server of an image, run without the packages that the image lacks."""
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    for package in COMPILERS:
        (folder / f"{package}.py").write_text("raise ImportError('the image has no such package')\n")
    start = [str(image / "models") if part == "/models" else part for part in command(image, "ENTRYPOINT")]
    options = ["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{image}:{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*start, *options], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def ask(url: str, body: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_folder(image: Path) -> None:
    text = (image / "Containerfile").read_text()
    assert re.search(r"^FROM \S+:\d+\.\d+\.\d+-slim", text) and "\nUSER 10001:10001\n" in text
    assert "podman build --format docker --platform linux/" in (image / "README.md").read_text()  # else Podman drops the health check
    copied = re.findall(r"^COPY (\S+)", text, re.MULTILINE)
    assert copied == ["requirements.txt", "tcomp", "models"]
    assert (image / ".containerignore").read_text().split() == ["*", *(f"!{name}" for name in copied)]
    assert {path.name for path in (image / "tcomp").iterdir()} == {
        "__init__.py",
        "cache.py",
        "errors.py",
        "cli",
        "generation",
        "runtime",
        "serve",
    }


def test_its_packages_are_those_of_the_extra(image: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = dict(text.split(">=") for text in (*project["dependencies"], *project["optional-dependencies"]["serve"]))
    pinned = dict(line.split("==") for line in (image / "requirements.txt").read_text().splitlines())
    names = {"numpy", "rich", "typer", *(text.split(">=")[0] for text in project["optional-dependencies"]["serve"])}
    assert pinned.keys() == names
    text = dict(line.split("==") for line in TEXT_REQUIREMENTS.splitlines())
    wanted |= dict(text.split(">=") for text in project["optional-dependencies"]["generate"])
    for name, version in {**pinned, **text}.items():
        assert [*map(int, version.split("."))] >= [*map(int, wanted[name].split("."))]


def test_health_and_metadata(server: str) -> None:
    assert ask(f"{server}/v2/health/live")[0] == ask(f"{server}/v2/health/ready")[0] == 200
    found = ask(f"{server}/v2/models/net")[1]
    assert found["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 2, 3]} and len(found["outputs"]) == 3
    assert ask(f"{server}/v2/models/other")[0] == 404


def test_runs_have_the_bits_of_python(server: str, modules) -> None:
    module, inputs = modules["recurrent"]
    tensors = [{"name": n, "datatype": "FP32", "shape": [*a.shape], "data": a.reshape(-1).tolist()} for n, a in inputs.items()]
    status, found = ask(f"{server}/v2/models/net/infer", json.dumps({"id": "7", "inputs": tensors}).encode())
    assert status == 200 and found["id"] == "7"
    wanted = module.run(inputs)
    for output in found["outputs"]:
        array = np.array(output["data"], np.float32).reshape(output["shape"])
        assert array.tobytes() == wanted[output["name"]].tobytes()


def test_the_health_check_of_the_image(server: str, image: Path) -> None:
    for port, healthy in ((server.rpartition(":")[2], True), ("1", False)):
        check = [port if part == "8000" else part for part in command(image, "CMD")]
        done = subprocess.run(check, cwd=image, capture_output=True, timeout=60, check=False)
        assert (done.returncode == 0) == healthy


def test_weights_beside_the_image(modules, tmp_path: Path) -> None:
    files = write_container(modules["residual"][0].artifact, tmp_path / "net", "net", weights="beside")
    assert tmp_path / "net/models/net.tcomp" in files and all(path.is_file() for path in files)
    assert "COPY models" not in (tmp_path / "net/Containerfile").read_text()
    assert "models" not in (tmp_path / "net/.containerignore").read_text()
    assert "-v $PWD/models:/models:ro" in (tmp_path / "net/README.md").read_text()


def test_the_user_of_the_image_can_read_everything(modules, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_container(modules["residual"][0].artifact, tmp_path / "net", "net")
    finally:
        os.umask(before)
    for path in (tmp_path / "net").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_mistakes(modules, tmp_path: Path) -> None:
    artifact = modules["lookup"][0].artifact
    with pytest.raises(InputError, match="numbers with dots"):
        write_container(artifact, tmp_path / "net", "net", "x")
    artifact.manifest, before = replace(artifact.manifest, triple="cuda"), artifact.manifest
    try:
        with pytest.raises(TargetError, match="cannot be in an image: it is for cuda"):
            write_container(artifact, tmp_path / "net", "net")
    finally:
        artifact.manifest = before
    assert not [*tmp_path.iterdir()]


def test_a_language_model_has_its_tokenizer_and_writes_text(text_folder: Path, tmp_path: Path) -> None:
    write_container(read_artifact(text_folder / "small.tcomp"), tmp_path / "net", "net", text_folder=text_folder)
    found = sorted(str(p.relative_to(tmp_path / "net/models")) for p in (tmp_path / "net/models").rglob("*") if p.is_file())
    assert found == [f"net/1/{name}" for name in ("config.json", "net.tcomp", "tokenizer.json", "tokenizer_config.json")]
    assert (tmp_path / "net/requirements.txt").read_text().endswith(TEXT_REQUIREMENTS)
    assert "/v1/chat/completions" in (tmp_path / "net/README.md").read_text()
    with serving(tmp_path / "net", tmp_path) as url:
        body = {"model": "net", "messages": [{"role": "user", "content": "w7 w9"}], "max_tokens": 3}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
    assert found["usage"]["completion_tokens"] == 3 and len(found["choices"][0]["message"]["content"].split()) == 3


def test_mistakes_with_tokenizers(modules, text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="for a model that is not a language model"):
        write_container(modules["residual"][0].artifact, tmp_path / "net", "net", text_folder=text_folder)
    with pytest.raises(InputError, match=r"no tokenizer\.json in"):
        write_container(read_artifact(text_folder / "small.tcomp"), tmp_path / "net", "net", text_folder=tmp_path)
    assert not [*tmp_path.iterdir()]
