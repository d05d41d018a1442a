"""The import graph: which file may import which. Imports inside functions count as well, those for the type checker alone do not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tcomp"
FILES = sorted(ROOT.rglob("*.py"))

LAYERS: list[set[str]] = [
    {"errors", "garbage"},
    {"runtime"},
    {"generation"},
    {"cache", "machines", "platforms", "serve"},
    {"target"},
    {"ir"},
    {"ops"},
    {"te"},
    {"frontends", "passes", "codegen", "schedules"},
    {"backends"},
    {"options", "packaging", "shipping"},
    {"pipeline"},
    {"functions", "operators"},
    {"calibration"},
    {"autotune"},
    {"confined"},
    {"api", "jax", "torch_backend", "verification"},
    {"cli"},
    {"__main__"},
]
"""Lowest first: a file imports from its own part and from layers below. Parts of one layer do not know each other."""

SCHEDULE_LAYERS: list[set[str]] = [
    {"trace", "knobs", "instructions", "handles"},
    {"analysis"},
    {"primitives"},
    {"cost", "lowering"},
    {"schedule", "index_checks"},
    {"groups", "polyhedral", "tiles"},
    {"cpu", "gpu"},
]

KNOT = 4
"""Files of tcomp.ir that may import each other: expressions print themselves and the reducers in them, and conversions of narrow types are
written in expressions."""

MOST_FILES = 20  # in one folder, without __init__.py

THIRD_PARTY = {
    "numpy": {"ir", "ops", "passes", "schedules", "codegen", "frontends", "runtime", "options", "packaging", "shipping", "pipeline", "functions", "operators", "calibration",
              "autotune", "confined", "generation", "api", "jax", "verification", "cli", "serve"},
    "ml_dtypes": {"ir", "runtime"},
    "llvmlite": {"cache", "codegen", "target", "autotune", "cli"},
    "onnx": {"frontends", "cli"},
    "islpy": {"ir", "schedules"},
    "cuda": {"codegen"},
    "cupy": {"runtime"},
    "cryptography": {"runtime"},
    "torch": {"frontends", "torch_backend"},
    "jax": {"frontends", "jax"},
    "google": {"frontends", "serve"},  # protobuf: its errors, which onnx lets through; messages of gRPC
    "gguf": {"frontends"},
    "safetensors": {"frontends"},
    "tokenizers": {"generation"},
    "jinja2": {"generation"},
    "llguidance": {"generation"},
    "rich": {"cli"},
    "typer": {"cli"},
    "xgboost": {"autotune"},
    "distributed": {"autotune"},
    **{name: {"serve"} for name in ("starlette", "uvicorn", "uvloop", "orjson", "hpack", "prometheus_client", "opentelemetry", "ray")},
    "PIL": {"runtime", "serve"},
}  # fmt: skip
OPTIONAL = {"cli"}  # talks to other runtimes, where they are installed


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The folder or file below tcomp."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, whether it is for the type checker only) of every import in a file; `from a import b` counts as a.b."""
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


@cache
def arrows() -> dict[str, dict[str, int]]:
    """For each file the files of the package that it imports, each with a line."""
    found: dict[str, dict[str, int]] = {name: {} for name in MODULES}
    for name, path in MODULES.items():
        for line, imported, types_only in imports(path):
            target = imported if imported in MODULES else imported.rpartition(".")[0]
            if target in MODULES and target != name and not types_only:
                found[name].setdefault(target, line)
    return found


def circles() -> list[list[str]]:
    """The strongly connected components of more than one file (R. Tarjan, Depth-First Search and Linear Graph Algorithms, 1972)."""
    graph, number, low = arrows(), dict[str, int](), dict[str, int]()
    stack: list[str] = []
    found = []

    def visit(v: str) -> None:
        number[v] = low[v] = len(number)
        stack.append(v)
        for w in graph[v]:
            if w not in number:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == number[v]:
            circle = stack[stack.index(v) :]
            del stack[stack.index(v) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * len(graph) + limit)
    try:
        for v in graph:
            if v not in number:
                visit(v)
    finally:
        sys.setrecursionlimit(limit)
    return found


def upwards(layers: list[set[str]], prefix: str) -> list[str]:
    """The arrows between parts (words behind the prefix) that do not point to a lower layer."""
    level = {part: n for n, layer in enumerate(layers) for part in layer}
    wrong = []
    for name, targets in arrows().items():
        for target, line in targets.items():
            if name.startswith(prefix) and target.startswith(prefix):
                one, other = (module.removeprefix(prefix).split(".")[0] for module in (name, target))
                if one != other and level[other] >= level[one]:
                    wrong.append(f"{MODULES[name].relative_to(ROOT.parent)}:{line} imports {target}")
    return wrong


def test_every_part_has_a_layer() -> None:
    assert {part_of(name) for name in MODULES} - {"__init__"} == set().union(*LAYERS)


def test_no_two_files_import_each_other() -> None:
    knots = [c for c in circles() if not (len(c) <= KNOT and all(name.startswith("tcomp.ir.") for name in c))]
    assert not knots, "\n".join(" <-> ".join(c) for c in knots)


def test_imports_point_downwards() -> None:
    assert not (wrong := upwards(LAYERS, "tcomp.")), "\n".join(wrong)


def test_imports_of_schedules_point_downwards() -> None:
    assert not (wrong := upwards(SCHEDULE_LAYERS, "tcomp.schedules.")), "\n".join(wrong)


def test_no_folder_is_full() -> None:
    folders = {path.parent for path in (*FILES, *(ROOT.parent / "tests").rglob("*.py"))}
    files = {folder: [f for f in folder.glob("*.py") if f.name != "__init__.py"] for folder in folders}
    assert not (full := {str(folder): len(found) for folder, found in files.items() if len(found) > MOST_FILES}), full


def test_kinds_of_targets_are_told_apart_by_backends_alone() -> None:
    """Everything else asks the target, or its backend."""
    tests = re.compile(r"""\.kind [!=]= "(cpu|cuda)"|isinstance\([^)]*(Cpu|Cuda)(Target|Backend)|case (Cpu|Cuda)(Target|Backend)""")
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{n}: {line.strip()}"
        for path in FILES
        if "backends" not in path.parts and path.name != "target.py"
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if tests.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_third_party_packages_stay_in_their_parts() -> None:
    wrong = []
    for path in FILES:
        part = part_of(module_of(path))
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
    assert not loaded & {"llvmlite", "onnx", "rich", "typer", "cryptography"}
    assert not [m for m in loaded if m.startswith("tcomp.") and not m.startswith(("tcomp.runtime", "tcomp.errors"))]


@pytest.mark.parametrize("worker", ["worker", "worker_gpu"])
def test_measuring_loads_no_compiler(worker: str) -> None:
    """The process that runs candidates knows how arrays lie in memory, and nothing of compilers and models of cost."""
    program = (
        f"import sys, tcomp.autotune.measurement.{worker}; "
        "print(*sorted({m.split('.')[0] if m[:6] != 'tcomp.' else m for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    loaded = set(done.stdout.split())
    assert not loaded & {"llvmlite", "onnx", "xgboost", "islpy", "rich", "torch", "typer"}
    parts = {m.split(".")[1] for m in loaded if m.startswith("tcomp.")}
    assert parts <= {"autotune", "errors", "ir", "runtime"}


def test_any_module_of_the_ir_can_be_imported_first() -> None:
    """The nouns mention each other: printing and parsing are imported where they are used, so that there is no cycle at load time."""
    names = [
        ".".join(p.relative_to(ROOT.parent).with_suffix("").parts) for p in FILES if part_of(module_of(p)) == "ir" and p.stem != "__init__"
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for loaded in [m for m in sys.modules if m.split('.')[0] == 'tcomp']: del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], check=False, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
