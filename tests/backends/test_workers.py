"""Compilation of kernels: the cache on disk, worker processes, and their failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tcomp import cache as kept
from tcomp.backends import Backend, backend_of, kernel as kernel_module, workers as kernels
from tcomp.backends.kernel import CompiledKernel, predicted_seconds
from tcomp.backends.workers import IN_PROCESS, Compilation, compile_kernels
from tcomp.errors import CodegenError, TcompError
from tcomp.ir import te
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph, GraphBuilder, Operator, canonical_graph_text
from tcomp.ops import elementwise as ew

HOST = backend_of()
MANY = (ew.NEG, ew.RELU, ew.TANH, ew.EXP, ew.SIGMOID)[: IN_PROCESS + 2]


def text_of(op: Operator, size: int = 100) -> str:
    b = GraphBuilder()
    return canonical_graph_text(b.build(b.add(op, [b.input("x", "float32", (size,))])))


TEXTS = [text_of(op) for op in MANY]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("a kernel is compiled that should be in the cache")

    monkeypatch.setattr(kernels, "compile_kernel", fail)
    monkeypatch.setattr(kernels._Worker, "compile", fail)


def files(cache: Path) -> list[Path]:
    return sorted(p for p in cache.rglob("*") if p.is_file())


# ---------------------------------------------------------------- the folder


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kept.folder() == tmp_path / "cache"
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("TCOMP_CACHE")
        else:
            monkeypatch.setenv("TCOMP_CACHE", empty)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert kept.folder() == tmp_path / "xdg" / "tcomp"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert kept.folder() == tmp_path / ".cache" / "tcomp"


def test_kernels_are_stored_and_found(cache: Path, request: pytest.FixtureRequest) -> None:
    progress: list[tuple[int, int]] = []
    first = compile_kernels([TEXTS[0], TEXTS[1], TEXTS[0]], HOST, lambda *done: progress.append(done))
    assert progress == [(0, 2), (1, 2), (2, 2)] and len(files(cache)) == 2
    assert all(k.code.startswith(b"\x7fELF") and k.symbol.encode() in k.code for k in first.values())
    request.getfixturevalue("no_compiler")
    assert compile_kernels(TEXTS[:2], HOST) == first


def test_predictions_are_stored_and_found(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Symbolic sizes are taken at some number."""

    def of(size: Dim) -> Graph:
        b = GraphBuilder()
        return b.build(b.add(ew.EXP, [b.input("x", "float32", (size, 1000))]))

    short, long, unknown = (of(size) for size in (10, 1000, te.var("n")))
    first = [predicted_seconds(g, HOST) for g in (short, long, unknown)]
    assert 0 < first[0] < first[1] and first[2] > 0 and len(files(cache)) == 3
    monkeypatch.setattr(kernel_module, "build_loops", lambda *args: pytest.fail("a prediction is made that should be in the cache"))
    assert [predicted_seconds(g, HOST) for g in (short, long, unknown)] == first


def test_kernels_of_other_targets_and_compilers_are_others(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def symbol(backend: Backend) -> str:
        return compile_kernels(TEXTS[:1], backend)[TEXTS[0]].symbol

    here = symbol(HOST)
    there = symbol(backend_of("aarch64"))
    monkeypatch.setattr(kept, "source_version", lambda: "another compiler")
    assert len({here, there, symbol(HOST)}) == 3 and len(files(cache)) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff\xfe",
        lambda data: b"[1, 2]",
        lambda data: b"7",
        lambda data: b"[" * 200_000,
        lambda data: data.replace(b'"code": "', b'"code": "AAAA'),
        lambda data: data.replace(b'"temporaries": []', b'"temporaries": ["1 << 60"]'),
        lambda data: data[1:],
    ],
)  # fmt: skip
def test_damaged_files_are_compiled_anew(cache: Path, damage: Any) -> None:
    want = compile_kernels(TEXTS[:1], HOST)
    (file,) = files(cache)
    intact = file.read_bytes()
    file.write_bytes(damage(intact))
    assert compile_kernels(TEXTS[:1], HOST) == want
    assert file.read_bytes() == intact


@pytest.mark.parametrize("change", [{"code": 3}, {"code": "?"}, {"scalars": None}, {"in_place": [1]}, {"symbol": "kernel_of_another"}])
def test_records_that_are_no_kernels_are_compiled_anew(cache: Path, change: dict[str, Any]) -> None:
    want = compile_kernels(TEXTS[:1], HOST)
    name = want[TEXTS[0]].symbol.removeprefix("kernel_")
    record = kept.load("kernels", name)
    kept.store("kernels", name, {**record, **change})
    assert compile_kernels(TEXTS[:1], HOST) == want and kept.load("kernels", name) == record


def test_a_file_under_another_name_is_not_believed(cache: Path) -> None:
    kept.store("layouts", "ab12", [1, "(a)"])
    (file,) = files(cache)
    for folder, name in (("ab", "ab34"), ("cd", "cd12")):
        (file.parents[1] / folder).mkdir(exist_ok=True)
        (file.parents[1] / folder / f"{name}.json").write_bytes(file.read_bytes())
        assert kept.load("layouts", name) is None
    assert kept.load("layouts", "ab12") == [1, "(a)"]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no/such")):
        monkeypatch.setenv("TCOMP_CACHE", str(bad))
        assert TEXTS[0] in compile_kernels(TEXTS[:1], HOST)
    assert (tmp_path / "file").read_text() == "in the way"


# ---------------------------------------------------------------- processes


PROGRAM = """
import json, sys
from tcomp.backends import backend_of
from tcomp.backends.workers import compile_kernels
from tcomp.target import Target
found = compile_kernels(json.load(sys.stdin), backend_of())
print(json.dumps(sorted([k.symbol, k.code.hex()] for k in found.values())))
"""


def start(program: str) -> subprocess.Popen[str]:
    root = str(Path(kernels.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_share_the_folder(cache: Path) -> None:
    running = [start(PROGRAM) for _ in range(3)]
    answers = [p.communicate(json.dumps(TEXTS), timeout=120)[0] for p in running]
    assert len(set(answers)) == 1 and len(json.loads(answers[0])) == len(TEXTS)
    assert len(files(cache / "kernels")) == len(TEXTS) and all(f.suffix == ".json" for f in files(cache))


def test_out_of_the_cache_without_llvm(cache: Path) -> None:
    """It takes longer to load than many a compilation out of the cache."""
    program = (
        "import sys, numpy as np, tcomp\n"
        "from tcomp.pipeline import compile_graph\n"
        "from tcomp.ir.graph import GraphBuilder\n"
        "from tcomp.ops.elementwise import EXP\n"
        "from tcomp.target import Target\n"
        "b = GraphBuilder()\n"
        "module = tcomp.Module.load(compile_graph(b.build(b.add(EXP, [b.input('x', 'float32', (100,))]))))\n"
        "(y,) = module.run({'x': np.zeros(100, np.float32)}).values()\n"
        "print(y.sum(), str(Target.host()), 'llvmlite.binding' in sys.modules, sep=', ')\n"
    )
    first, second = (start(program).communicate(timeout=120)[0].strip() for _ in range(2))
    assert first == f"100.0, {HOST.target}, True"
    assert second == f"100.0, {HOST.target}, False"


def test_workers_make_what_this_process_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    by_workers = compile_kernels(TEXTS, HOST)
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(kernels, "_jobs", lambda: 1)
    assert compile_kernels(TEXTS, HOST) == by_workers


def test_kernels_are_begun_before_all_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was begun early is compiled once, and found where the cache held it before."""
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    want, progress = compile_kernels(TEXTS, HOST), list[tuple[int, int]]()
    monkeypatch.setenv("TCOMP_CACHE", str(tmp_path / "other"))
    assert compile_kernels(TEXTS[:1], HOST) == {TEXTS[0]: want[TEXTS[0]]}
    given, compile_one = list[str](), kernels._Worker.compile
    monkeypatch.setattr(kernels._Worker, "compile", lambda self, text, *rest: given.append(text) or compile_one(self, text, *rest))
    with Compilation(HOST) as compilation:
        for text in (*TEXTS, TEXTS[1]):
            compilation.begin(text)
        assert compilation.finish([TEXTS[2], *TEXTS], lambda *done: progress.append(done)) == want
    assert sorted(given) == sorted(TEXTS[1:])
    assert progress == [(n, len(TEXTS)) for n in range(1, len(TEXTS) + 1)]


def test_few_kernels_that_were_begun_need_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    monkeypatch.setattr(kernels, "_Worker", lambda: pytest.fail("a worker is started"))
    with Compilation(HOST) as compilation:
        compilation.begin(TEXTS[0])
        assert set(compilation.finish(TEXTS[:IN_PROCESS])) == set(TEXTS[:IN_PROCESS])


def test_workers_end_where_a_pass_fails_after_kernels_were_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    started, start = list[kernels._Worker](), kernels._Worker.__init__
    monkeypatch.setattr(kernels._Worker, "__init__", lambda self: (started.append(self), start(self))[1])
    with pytest.raises(TcompError, match="a pass fails"), Compilation(HOST) as compilation:
        for text in TEXTS:
            compilation.begin(text)
        raise TcompError("a pass fails")
    assert len(started) == 2 and all(w.process is None or w.process.poll() is not None for w in started)


def test_workers_do_not_import_from_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """Another `tcomp` there, a checkout say, would make kernels that this process takes for its own."""
    (tmp_path / "tcomp").mkdir()
    (tmp_path / "tcomp" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    assert len(compile_kernels(TEXTS, HOST)) == len(TEXTS)


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler that is killed in the middle of its first kernel."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nread line\necho started >> {tmp_path}/log\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    yield tmp_path / "log"


@pytest.mark.usefixtures("dying")
def test_the_death_of_a_worker_is_reported_with_its_kernel(cache: Path) -> None:
    with pytest.raises(CodegenError) as found:
        compile_kernels(TEXTS, HOST)
    error = found.value
    assert "the compiler process died" in error.what and "-9" in error.why
    assert any(text in error.where for text in TEXTS) and "report" in error.hint
    assert not files(cache)


def test_a_worker_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_jobs", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CodegenError, match="the compiler process died"):
        compile_kernels(TEXTS, HOST)


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_of_kernels_name_them(monkeypatch: pytest.MonkeyPatch, cache: Path, jobs: int) -> None:
    monkeypatch.setattr(kernels, "_jobs", lambda: jobs)
    bad = TEXTS[0].replace("neg", "no_such_operator")
    with pytest.raises(TcompError) as found:
        compile_kernels([*TEXTS, bad], HOST)
    assert "no_such_operator" in found.value.what and bad in found.value.where


def test_scalars_and_temporaries() -> None:
    from tcomp.ir.expr import dim
    from tcomp.ops.reduction import SOFTMAX

    b = GraphBuilder()
    n = dim("n", 1)
    text = canonical_graph_text(b.build(b.add(SOFTMAX, [b.input("x", "float32", (n, 3, n))], {"axes": (1,)})))
    compiled = compile_kernels([text], HOST)[text]
    assert isinstance(compiled, CompiledKernel) and compiled.scalars == ("n",)
    assert all("n" in size for size in compiled.temporaries)
