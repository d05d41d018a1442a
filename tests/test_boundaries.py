"""Which part may import which: a part knows what lies below it, never what uses it. Imports inside functions count as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tcomp"
BASE = {"errors", "machines", "target"}
KNOWS = {
    "errors": set(),
    "machines": set(),
    "target": {"cache", "errors", "machines"},
    "ir": {"errors"},
    "ops": {"errors", "ir"},
    "passes": {"errors", "ir", "ops"},
    "schedules": {*BASE, "ir"},
    "codegen": {*BASE, "ir"},
    "frontends": {"errors", "ir", "ops"},
    "runtime": {"errors"},
    "cache": set(),
}
TOP = {  # these put the parts together: they may use all
    "__init__", "__main__", "assemble", "autotune", "cli", "facts", "functions", "kernels", "listings", "machine", "pipeline", "verification",
}  # fmt: skip
THIRD_PARTY = {
    "numpy": {*KNOWS, *TOP} - BASE,
    "ml_dtypes": {"ir", "runtime"},
    "llvmlite": {"cache", "codegen", "target", *TOP},
    "onnx": {"frontends", *TOP},
    "islpy": {"ir", "schedules"},
    "cuda": {"codegen"},
    "cupy": {"runtime"},
    "google": {"frontends"},  # protobuf's errors, which onnx lets through
    "rich": {"cli"},
    "typer": {"cli"},
    "xgboost": {"autotune"},
    "distributed": {"autotune"},
}
OPTIONAL = {"cli"}  # talks to other runtimes, where they are installed


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted module, whether it is for the type checker only) of every import in a file; `from a import b` counts as a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    annotations = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, node in annotations) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}", node in annotations) for alias in node.names)


FILES = sorted(ROOT.rglob("*.py"))


def test_every_part_has_a_rule() -> None:
    assert {part_of(path) for path in FILES} == {*KNOWS, *TOP}


@pytest.mark.parametrize("part", KNOWS)
def test_imports_point_downwards(part: str) -> None:
    wrong = []
    for path in FILES:
        if part_of(path) != part:
            continue
        for line, module, _ in imports(path):
            words = module.split(".")
            if words[0] == "tcomp":
                other = words[1] if len(words) > 1 else "__init__"
                if other != part and other not in KNOWS[part]:
                    wrong.append(f"{path.relative_to(ROOT.parent)}:{line} imports {module}")
    assert not wrong, f"`{part}` may know {sorted(KNOWS[part])}:\n" + "\n".join(wrong)


def test_third_party_packages_stay_in_their_parts() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        for line, module, types_only in imports(path):
            package = module.split(".")[0]
            allowed = package == "tcomp" or package in sys.stdlib_module_names or part in THIRD_PARTY.get(package, ())
            if not (allowed or types_only or part in OPTIONAL):
                wrong.append(f"{path.relative_to(ROOT.parent)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_runtime_loads_with_numpy_alone() -> None:
    """Neither the compiler nor its dependencies are imported in order to run an artifact."""
    program = "import sys, tcomp.runtime; print(*sorted({m.split('.')[0] if m[:6] != 'tcomp.' else m for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    loaded = set(done.stdout.split())
    assert "tcomp.runtime" in loaded
    assert not loaded & {"llvmlite", "onnx", "rich", "typer"}
    assert not [m for m in loaded if m.startswith("tcomp.") and not m.startswith(("tcomp.runtime", "tcomp.errors"))]


@pytest.mark.parametrize("worker", ["worker", "worker_gpu"])
def test_measuring_loads_no_compiler(worker: str) -> None:
    """The process that runs candidates knows how arrays lie in memory, and nothing of compilers and models of cost."""
    program = f"import sys, tcomp.autotune.measurement.{worker}; " "print(*sorted({m.split('.')[0] if m[:6] != 'tcomp.' else m for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    loaded = set(done.stdout.split())
    assert not loaded & {"llvmlite", "onnx", "xgboost", "islpy", "rich", "torch", "typer"}
    parts = {m.split(".")[1] for m in loaded if m.startswith("tcomp.")}
    assert parts <= {"autotune", "errors", "ir", "runtime"}


def test_any_module_of_the_ir_can_be_imported_first() -> None:
    """The nouns mention each other: printing and parsing are imported where they are used, so that there is no cycle at load time."""
    names = [".".join(p.relative_to(ROOT.parent).with_suffix("").parts) for p in FILES if part_of(p) == "ir" and p.stem != "__init__"]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for loaded in [m for m in sys.modules if m.split('.')[0] == 'tcomp']: del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], check=False, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
