"""`tcomp package`: what it writes, and what it refuses before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcomp.cli.app import app


def call(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["package", *map(str, arguments)], prog_name="tcomp")
    assert result.exit_code == status, (result.exit_code, result.output)
    return result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_c_package_of_a_model_and_of_its_artifact(here, modules, onnx_file) -> None:
    printed = call(onnx_file, "--format", "c")
    assert "wrote my_net-c, the package my_net 1.0" in printed and "lib/libmy_net.a" in printed
    modules["residual"][0].save(here / "net.tcomp")
    record = json.loads(call("net.tcomp", "--format", "c", "-o", "p", "--name", "my_net", "--version", "2.1", "--json"))
    assert record["name"] == "my_net" and (here / "p/lib/pkgconfig/my_net.pc").read_text().count("Version: 2.1") == 1
    for name in ("include/my_net.h", "lib/libmy_net.so"):
        assert (here / "p" / name).read_bytes() == (here / "my_net-c" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "exe"], "one of c"), ([], "--format c, or one of wheel"), (["--format", "c", "--name", "a-b"], "--name a_b"), (["--format", "c", "--weights-at", "near"], "inside"),
        (["--format", "c", "-o", "full"], "give another name with -o"), (["--format", "c", "--version", "x"], "numbers with dots"),
        (["--format", "c", "--dim", "n=2"], "`tcomp compile`"), (["--format", "c", "--target", "cpu"], "`tcomp compile`"),
        (["--format", "oci", "--weights", "int8"], "--weights has no effect"), (["--format", "c", "--tokenizer", "full"], "only a server writes text"),
        (["--format", "oci", "--tokenizer", "full"], "not a language model"),
    ],
)  # fmt: skip
def test_mistakes(here, modules, arguments: list[str], message: str) -> None:
    modules["lookup"][0].save(here / "net.tcomp")
    (here / "full").mkdir()
    (here / "full/file").touch()
    assert message in call("net.tcomp", *arguments, status=2)
    assert sorted(p.name for p in here.iterdir()) == ["full", "net.tcomp"]


def test_the_image_of_a_language_model(here, text_folder: Path) -> None:
    printed = call(text_folder / "small.tcomp", "--format", "oci")
    assert "models/small/1/tokenizer.json" in printed and "without a tokenizer" not in printed
    printed = call(text_folder, "--format", "oci", "--weights-at", "beside")
    assert "models/small_0_1b/1/small_0_1b.tcomp" in printed and "models/small_0_1b/1/tokenizer_config.json" in printed
    (here / "alone.tcomp").write_bytes((text_folder / "small.tcomp").read_bytes())
    assert "give its folder by --tokenizer" in call("alone.tcomp", "--format", "oci", "-o", "a")
    assert "models/alone/1/tokenizer.json" in call("alone.tcomp", "--format", "oci", "-o", "b", "--tokenizer", text_folder)
    assert "--dim batch=1..16" in call(text_folder, "--format", "oci", "-o", "c", "--dim", "batch=4")
    (here / "empty").mkdir()
    assert "has a config.json" in call("empty", "--format", "oci", status=2)


def test_what_needs_more_than_its_code_is_refused(here, modules) -> None:
    from dataclasses import replace

    from tcomp.errors import InputError
    from tcomp.runtime import read_artifact
    from tcomp.runtime.manifest import StatePair
    from tcomp.shipping.c_package import write_c_package
    from tcomp.shipping.wasm_package import write_wasm_package

    modules["recurrent"][0].save(here / "net.tcomp")
    artifact = read_artifact(here / "net.tcomp")
    artifact.manifest = replace(artifact.manifest, state=(StatePair("h", "h1"),))
    with pytest.raises(InputError, match="with state cannot be packaged for C\n.*continues h in place"):
        write_c_package(artifact, here / "x", "x")
    artifact.manifest = replace(artifact.manifest, triple="wasm32-unknown-unknown")
    with pytest.raises(InputError, match="with state cannot be packaged for WebAssembly"):
        write_wasm_package(artifact, here / "x", "x")


def test_what_is_for_a_gpu_is_refused(here, onnx_file, modules) -> None:
    manifest = modules["lookup"][0].artifact.manifest
    from dataclasses import replace

    from tcomp.errors import TargetError
    from tcomp.runtime import read_artifact
    from tcomp.shipping.c_package import write_c_package

    modules["lookup"][0].save(here / "net.tcomp")
    artifact = read_artifact(here / "net.tcomp")
    artifact.manifest = replace(manifest, triple="cuda")
    with pytest.raises(TargetError, match="cannot be packaged for cuda") as caught:
        write_c_package(artifact, here / "x", "x")
    assert "--target cpu" in caught.value.hint
