"""Measurements on a GPU: shares of the copy bandwidth, products against cuBLAS, and the models of `benchmarks.models`.

Products are measured by the default schedule, and on sm_90a by the best tile of the other kind (`mma`, `wgmma`) as well.

    python -m benchmarks.cuda [--only resnet50,bert*] [--no-kernels] [--no-models] [--precision tf32]
    python -m benchmarks.cuda --compile-only [--arch sm_80,sm_90a]

Needs tcomp[cuda] and a GPU; prints why not and ends with status 2 where there is none. Times are medians of graph replays by the
device's clock, transfers excluded; every result is compared with its reference first.

`--compile-only` needs no GPU: see `benchmarks.cuda.kernels`. Status 1 if a model cannot be compiled, or a kernel is beyond a limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import prod
from operator import matmul
from statistics import median
from typing import Any

import numpy as np

from tcomp.backends import backend_of
from tcomp.backends.kernel import compile_loops
from tcomp.codegen.cuda.nvrtc import version
from tcomp.errors import DeviceError, TargetError, TcompError
from tcomp.ir import te
from tcomp.ir.graph import KERNEL, Graph, Node, Value
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model, package
from tcomp.runtime.cuda import CudaModule, CupyDevice
from tcomp.schedules.knobs import Knobs, Option
from tcomp.schedules.lowering import lower
from tcomp.target import CudaTarget

from .. import models
from .kernels import compile_all

MEGABYTES = 512  # of one operand of a kernel that is bound by memory: far more than caches hold
Case = tuple[str, list[te.Tensor], int, Callable[[np.ndarray], np.ndarray] | None]


def module_of(tensors: list[te.Tensor], target: CudaTarget, knobs: Knobs | None = None) -> CudaModule:
    """Tensor expressions (placeholders, then the outputs) with the default schedule, or as decided; inputs are called 0:name, ..."""
    inputs = [t for t in tensors if t.body is None]
    values = [Value(f"{n}:{t.name}", t.dtype, t.shape) for n, t in enumerate(tensors)]
    given, made = tuple(values[: len(inputs)]), tuple(values[len(inputs) :])
    compiled = compile_loops(backend_of(target).schedule(lower("kernel", inputs, tensors[len(inputs) :]), knobs), backend_of(target))
    node = Node(KERNEL, given, made, {}, "kernel", (Graph("kernel", given, made, ()),))
    return CudaModule(package(Graph("te", given, made, (node,)), {node: compiled}, CompileOptions(target)))


# ---------------------------------------------------------------- kernels bound by memory


def memory_bound() -> Iterator[Case]:
    """(name, tensors, bytes that must move, reference)."""
    length = 1024
    rows = (MEGABYTES << 20) // 4 // length
    shape, size = (rows, length), rows * length * 4
    x = te.placeholder(shape, "float32", "x")
    yield (
        "relu(2 x + 1)",
        [x, te.compute(shape, lambda i, j: te.maximum(x[i, j] * 2.0 + 1.0, 0.0), "y")],
        2 * size,
        (lambda a: np.maximum(a * 2 + 1, 0)),
    )
    k = te.reduce_axis(length, "k")
    yield "row sums", [x, te.compute((rows,), lambda i: te.sum(x[i, k], k), "y")], size, lambda a: a.sum(1)
    c = te.reduce_axis(rows, "c")
    yield "column sums", [x, te.compute((length,), lambda j: te.sum(x[c, j], c), "y")], size, lambda a: a.sum(0, dtype=np.float64)
    flat = te.placeholder((rows * length,), "float32", "x")
    f = te.reduce_axis(rows * length, "f")
    yield "sum of all", [flat, te.compute((), lambda: te.sum(flat[f], f), "y")], size, lambda a: a.sum(dtype=np.float64)
    m, s = te.reduce_axis(length, "m"), te.reduce_axis(length, "s")
    top = te.compute((rows,), lambda i: te.max(x[i, m], m), "top")
    e = te.compute(shape, lambda i, j: te.exp(x[i, j] - top[i]), "e")
    total = te.compute((rows,), lambda i: te.sum(e[i, s], s), "total")
    yield "softmax", [x, te.compute(shape, lambda i, j: e[i, j] / total[i], "y")], 2 * size, None
    mean = te.compute((rows,), lambda i: te.sum(x[i, m], m) / float(length), "mean")
    spread = te.compute((rows,), lambda i: te.sum((x[i, s] - mean[i]) * (x[i, s] - mean[i]), s) / float(length), "spread")
    norm = te.compute(shape, lambda i, j: (x[i, j] - mean[i]) / te.sqrt(spread[i] + 1e-5), "y")
    yield "layer norm", [x, norm], 2 * size, None


def measure_memory(target: CudaTarget) -> None:
    import cupy

    source, place = (cupy.empty(MEGABYTES << 18, "float32") for _ in range(2))
    copied = cupyx_time(lambda: cupy.copyto(place, source))
    peak = 2 * source.nbytes / copied
    print(f"copy bandwidth: {peak / 1e12:.2f} TB/s read and written")
    rng = np.random.default_rng(0)
    for name, tensors, moved, reference in memory_bound():
        module = module_of(tensors, target)
        spec = module.inputs[0]
        given = rng.standard_normal([int(n) for n in spec.shape], dtype=np.float32)
        (result,) = module.run({spec.name: given}).values()
        worst = float("nan")
        if reference is not None:
            want = reference(given)
            worst = float(np.abs(result - want).max() / np.abs(want).max())
        seconds = median(module.replays({spec.name: given}))
        print(f"  {name:16} {seconds * 1e3:8.3f} ms  {moved / seconds / peak:6.1%} of the copy bandwidth   error {worst:.1e}")


def cupyx_time(work: Callable[[], Any], runs: int = 20) -> float:
    """Median seconds of a CuPy operation on the current stream."""
    import cupy

    work()
    marks = [cupy.cuda.get_current_stream().record()]
    for _ in range(runs):
        work()
        marks.append(cupy.cuda.get_current_stream().record())
    marks[-1].synchronize()
    return median(float(cupy.cuda.get_elapsed_time(a, b)) / 1e3 for a, b in pairwise(marks))


# ---------------------------------------------------------------- products


def measure_products(target: CudaTarget) -> None:
    import cupy

    rng = np.random.default_rng(0)
    print("products a @ b.T with float32 sums, against cuBLAS without TF32:")
    for dtype, n in (("float32", 1024), ("float32", 2048), ("float32", 4096), ("float16", 4096), ("float16", 8192)):
        a, b = te.placeholder((n, n), dtype, "a"), te.placeholder((n, n), dtype, "b")
        k = te.reduce_axis(n, "k")

        def element(i: te.Expr, j: te.Expr, a: te.Tensor = a, b: te.Tensor = b, k: te.Expr = k) -> te.Expr:
            return te.sum(te.cast(a[i, k], "float32") * te.cast(b[j, k], "float32"), k)

        sums = te.compute((n, n), element, "sums")
        c = sums if dtype == "float32" else te.compute((n, n), lambda i, j, s=sums, d=dtype: te.cast(s[i, j], d), "c")
        asked = Knobs()
        modules = {"": module_of([a, b, c], target, asked)}
        for name, option in other_kind(asked):
            modules[f" {option}"] = module_of([a, b, c], target, Knobs({name: option}))
        x, y = (rng.standard_normal((n, n), dtype=np.float32).astype(dtype) for _ in range(2))
        p, q = cupy.asarray(x), cupy.asarray(y)
        want = (p.astype("float64") @ q.astype("float64").T).get()
        theirs = cupyx_time(partial(matmul, p, q.T))
        for choice, module in modules.items():
            inputs = {module.inputs[0].name: x, module.inputs[1].name: y}
            (got,) = module.run(inputs).values()
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            seconds = median(module.replays(inputs))
            rate = 2 * n**3 / seconds / 1e12
            print(
                f"  {dtype} {n}^3{choice}: {seconds * 1e3:8.3f} ms = {rate:6.1f} TFLOP/s, {theirs / seconds:6.1%} of cuBLAS   error {error:.1e}"
            )


def other_kind(knobs: Knobs) -> Iterator[tuple[str, Option]]:
    """Of each decision on a tile: the best one of the instruction, `mma` or `wgmma`, that is not the default."""
    for name, answer in knobs.asked.items():
        if name.endswith(".tile") and isinstance(answer.default, tuple):
            yield from [
                (name, o) for o in answer.options if isinstance(o, tuple) and (o[-1] == "wgmma") != (answer.default[-1] == "wgmma")
            ][:1]


# ---------------------------------------------------------------- models


# float32 results may be as far off as products in less than float32 are
_TOLERANCES = {"fp32": 0.0, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}


def measure_models(patterns: str | None, target: CudaTarget) -> bool:
    print(f"models, float32 products of matrices in {target.precision}:")
    right = True
    for model in models.select(patterns):
        try:
            right &= measure_model(model, target)
        except models.Unavailable as reason:
            print(f"  {model.name:20} skipped: {reason}")
        except TcompError as problem:
            right = False
            print(f"  {model.name:20} {type(problem).__name__}: {problem.what}")
    return right


def measure_model(model: models.Model, target: CudaTarget) -> bool:
    path = models.obtain(model)
    inputs, wanted = (models.load_arrays(path, which) for which in ("inputs", "outputs"))
    artifact, report = compile_model(path, CompileOptions(target, **models.compile_arguments(model, inputs)))
    module = CudaModule(artifact)
    inputs = {name: array for name, array in inputs.items() if name not in model.fixed}
    results = module.run(inputs)
    worst = 0.0
    for key, want in wanted.items():
        if prod(want.shape):
            difference = np.abs(results[key].astype(np.float64) - want).max() / max(float(np.abs(want).max()), 1e-30)
            worst = max(worst, float(difference)) if np.isfinite(difference) else float("inf")
    seconds = median(module.replays(inputs))
    good = worst <= max(model.tolerance, _TOLERANCES[target.precision])
    print(
        f"  {model.name:20} {seconds * 1e3:9.3f} ms  {report.kernels:4} kernels  error {worst:.1e}{'' if good else '  WRONG'}", flush=True
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="PATTERNS", help="names or patterns of models, separated by commas")
    parser.add_argument("--no-kernels", action="store_true", help="measure no single kernels")
    parser.add_argument("--no-models", action="store_true", help="measure no models")
    parser.add_argument("--precision", default="fp32", help="of float32 products of the models: fp32, tf32, fp16, bf16")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing: compile the models, and say what their kernels take")
    parser.add_argument("--arch", help="GPU architectures to compile for, with --compile-only (default: sm_80,sm_90a)")
    options = parser.parse_args()
    if options.arch and not options.compile_only:
        parser.error("--arch is for --compile-only: what is measured is compiled for the GPU that is here")
    try:
        if options.compile_only:
            version()
            return (
                0
                if compile_all(
                    options.only, CudaTarget.parse(f"cuda -arch={options.arch or 'sm_80,sm_90a'} -precision={options.precision}")
                )
                else 1
            )
        capability = CupyDevice().capability
        arch = f"cuda -arch=sm_{capability}{'a' if capability in (90, 100) else ''}"
        target = CudaTarget.parse(f"{arch} -precision={options.precision}")
        if not options.no_kernels:
            measure_memory(CudaTarget.parse(arch))
            measure_products(CudaTarget.parse(arch))
        return 0 if options.no_models or measure_models(options.only, target) else 1
    except (DeviceError, TargetError) as problem:
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
