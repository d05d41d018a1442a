"""Default GPU schedules: the loops one by one equal the reference, and so does the emitted CUDA C++ run by a host that plays the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.cuda import nvrtc
from tcomp.codegen.cuda.kernel import emit_kernel
from tcomp.errors import CodegenError, TargetError
from tcomp.ir import te
from tcomp.ir.dtypes import to_numpy
from tcomp.ir.expr import Expr, as_expr, cast, evaluate_int, select
from tcomp.ir.loops import Allocate, Buffer, For, Kernel, block, hoist_temporaries, loop, store, walk
from tcomp.schedules.gpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import Schedule, prove
from tcomp.target import CudaTarget
from tests.codegen.cuda import cuda_host
from tests.schedules.programs import Program, layouts, programs
from tests.schedules.running import expected, interpreted

TARGET = CudaTarget.parse("cuda")
MEDIUM = programs(largest=40, volume=3000)
LARGE = programs(largest=300, volume=200_000)
needs_compiler = pytest.mark.skipif(cuda_host.compiler() is None, reason="there is no C++ compiler")


def lowered(program: Program) -> Kernel:
    return lower("program", program.inputs, program.outputs)


def emulated(
    program: Program, kernel: Kernel, descending: bool = False, barriers: bool = True, target: CudaTarget = TARGET
) -> list[np.ndarray]:
    """The results of the emitted text; every result and temporary starts out as garbage."""
    kernel, _ = hoist_temporaries(kernel)
    text, launches = emit_kernel(kernel, target)
    text = text if barriers else text.replace("__syncthreads();", "")
    given_arrays = program.arrays()
    shapes = [[evaluate_int(as_expr(d), program.dims) for d in b.shape] for b in kernel.buffers]
    arrays = [np.full(shape, 77).astype(to_numpy(b.dtype)) for b, shape in zip(kernel.buffers, shapes, strict=True)]
    for n, t in enumerate(program.inputs):
        arrays[n] = np.ascontiguousarray(given_arrays[t]).reshape(shapes[n])
    arrays = [_aligned(a) for a in arrays]
    for launch in launches:
        grid = [evaluate_int(as_expr(d), program.dims) for d in launch.grid]
        args = [arrays[n].ctypes.data for n in launch.buffers] + [program.dims[kernel.scalars[n]] for n in launch.scalars]
        cuda_host.launch(text, launch.function, grid, launch.block, args, descending)
    results = arrays[len(program.inputs) : len(program.inputs) + len(program.outputs)]
    return [a.reshape(program.shape(t)) for a, t in zip(results, program.outputs, strict=True)]


def _aligned(array: np.ndarray) -> np.ndarray:
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    result = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def agree(program: Program, found: Sequence[np.ndarray]) -> None:
    for got, want in zip(found, expected(program), strict=True):
        program.same(got, want)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(MEDIUM)
def test_schedules_keep_the_meaning(program: Program) -> None:
    """By the interpreter, which checks bounds and undefined reads, with the threads of a phase in random order."""
    kernel = lowered(program)
    s = schedule(kernel, TARGET)
    agree(program, interpreted(program, s.kernel, shuffle=1))
    assert str(Schedule(kernel).replay(s.trace)) == str(s.kernel)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(), st.data())
def test_schedules_through_layouts(program: Program, data: st.DataObject) -> None:
    tensors = (*program.inputs, *program.outputs)
    chosen = [data.draw(layouts(t.ndim)) for t in tensors]
    kernel = lower("program", program.inputs, program.outputs, dict(zip(tensors, chosen, strict=True)))
    found = interpreted(program, schedule(kernel, TARGET).kernel, chosen)
    agree(program, found)


@needs_compiler
@settings(max_examples=40, deadline=None, derandomize=True)
@given(LARGE, st.booleans())
def test_emitted_text_equals_the_reference(program: Program, descending: bool) -> None:
    agree(program, emulated(program, schedule(lowered(program), TARGET).kernel, descending))


# ---------------------------------------------------------------- every family, at the sizes where it is chosen


def product(rows: int, depth: int, columns: int, transposed: bool = False) -> Program:
    a = te.placeholder((rows, depth), "float32", "a")
    b = te.placeholder((columns, depth) if transposed else (depth, columns), "float32", "b")
    bias = te.placeholder((columns,), "float32", "bias")
    k = te.reduce_axis(depth, "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * (b[j, k] if transposed else b[k, j]), k), "c")
    return Program((a, b, bias), (te.compute((rows, columns), lambda i, j: te.maximum(c[i, j] + bias[j], 0), "out"),), {})


def convolution(size: int, channels: int, features: int) -> Program:
    x = te.placeholder((size + 2, size + 2, channels), "float32", "x")
    f = te.placeholder((3, 3, channels, features), "float32", "f")
    p, q, c = te.reduce_axis(3, "p"), te.reduce_axis(3, "q"), te.reduce_axis(channels, "c")
    y = te.compute((size, size, features), lambda i, j, o: te.sum(x[i + p, j + q, c] * f[p, q, c, o], [p, q, c]), "y")
    return Program((x, f), (y,), {})


def image(n: int, channels: int, size: int, features: int, kernel: int, stride: int = 1, pad: int = 0) -> Program:
    """A convolution of padded images, channels first, and what follows it."""
    x, w = te.placeholder((n, channels, size, size), "float32", "x"), te.placeholder((features, channels, kernel, kernel), "float32", "w")
    side = (size + 2 * pad - kernel) // stride + 1
    c, p, q = te.reduce_axis(channels, "c"), te.reduce_axis(kernel, "p"), te.reduce_axis(kernel, "q")

    def at(b: Expr, i: Expr, j: Expr) -> Expr:
        inside = (i >= 0) & (i < size) & (j >= 0) & (j < size)
        return select(inside, x[b, c, i, j], 0) if pad else x[b, c, i, j]

    def element(b: Expr, o: Expr, i: Expr, j: Expr) -> Expr:
        return te.sum(at(b, i * stride + p - pad, j * stride + q - pad) * w[o, c, p, q], [c, p, q])

    y = te.compute((n, features, side, side), element, "y")
    return Program((x, w), (te.compute((n, features, side, side), lambda *i: te.maximum(y[i], 0), "out"),), {})


def batched(n: int, rows: int, depth: int, columns: int, transposed: bool = False) -> Program:
    a = te.placeholder((n, rows, depth), "float32", "a")
    b = te.placeholder((n, columns, depth) if transposed else (n, depth, columns), "float32", "b")
    k = te.reduce_axis(depth, "k")
    c = te.compute((n, rows, columns), lambda z, i, j: te.sum(a[z, i, k] * (b[z, j, k] if transposed else b[z, k, j]), k), "c")
    return Program((a, b), (c,), {})


def halves(rows: int, depth: int, columns: int) -> Program:
    a, b = te.placeholder((rows, depth), "float16", "a"), te.placeholder((depth, columns), "float16", "b")
    k = te.reduce_axis(depth, "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(cast(a[i, k], "float32") * cast(b[k, j], "float32"), k), "c")
    return Program((a, b), (te.compute((rows, columns), lambda i, j: cast(c[i, j], "float16"), "out"),), {}, exact=False)


def gram(rows: int, depth: int) -> Program:
    """Both factors from one buffer, as queries and keys of attention often are."""
    a, k = te.placeholder((rows, depth), "float32", "a"), te.reduce_axis(depth, "k")
    return Program((a,), (te.compute((rows, rows), lambda i, j: te.sum(a[i, k] * a[j, k], k), "c"),), {})


def total(count: int, dtype: str = "float32") -> Program:
    x = te.placeholder((count,), dtype, "x")
    k = te.reduce_axis(count, "k")
    return Program((x,), (te.compute((), lambda: te.sum(cast(x[k], "float64"), k), "total"),), {})


def columns(rows: int, count: int, reduction: Callable[..., Expr]) -> Program:
    x, k = te.placeholder((rows, count), "float32", "x"), te.reduce_axis(rows, "k")
    return Program((x,), (te.compute((count,), lambda j: reduction(x[k, j], k), "y"),), {})


def softmax(rows: int, length: int) -> Program:
    x = te.placeholder((rows, length), "float64", "x")
    k, j = te.reduce_axis(length, "k"), te.reduce_axis(length, "j")
    top = te.compute((rows,), lambda r: te.max(x[r, k], k), "top")
    e = te.compute((rows, length), lambda r, i: te.exp(x[r, i] - top[r]), "e")
    norm = te.compute((rows,), lambda r: te.sum(e[r, j], j), "norm")
    return Program((x,), (te.compute((rows, length), lambda r, i: e[r, i] / norm[r], "softmax"),), {}, exact=False)


def scaled(*shape: int, dtype: str = "float32") -> Program:
    x = te.placeholder(shape, dtype, "x")
    return Program((x,), (te.compute(shape, lambda *i: te.maximum(x[i] * 2 + 1, 0), "y"),), {})


FAMILIES = {
    "product-staged": product(384, 48, 288),
    "product-staged-transposed": product(192, 32, 544, transposed=True),
    "product-staged-sevens": product(1568, 24, 256),
    "product-staged-odd": product(67, 45, 301),
    "product-staged-dynamic": product(768, 32, 1024, transposed=True),
    "divided-product": product(64, 1500, 72),
    "divided-product-transposed": product(50, 2100, 90, transposed=True),
    "product-gram": gram(67, 45),
    "batched-odd": batched(6, 50, 33, 75),
    "batched-transposed": batched(6, 50, 33, 75, transposed=True),
    "product-large-tiles": product(256, 24, 512),
    "matvec": product(1, 300, 70, transposed=True),
    "matvec-divided": product(1, 3001, 70),
    "matvec-divided-long": product(2, 9000, 300),
    "strips-step": product(1, 256, 1024),
    "strips-odd": product(3, 77, 1003),
    "strips-rows": product(15, 260, 130),
    "strips-short": batched(3, 5, 40, 20),
    "strips-batched": batched(16, 1, 129, 64),
    "strips-half": halves(2, 130, 200),
    "convolution": convolution(18, 5, 64),
    "convolution-divided": convolution(5, 520, 24),
    "convolution-sevens": convolution(14, 6, 512),
    "convolution-odd": convolution(13, 3, 37),
    "image-14": image(1, 20, 14, 72, 3, pad=1),
    "image-strided": image(2, 18, 15, 40, 3, 2, 1),
    "image-divided": image(1, 130, 7, 40, 3, pad=1),
    "image-1x1": image(2, 33, 9, 70, 1),
    "image-stem": image(1, 3, 40, 24, 7, 2, 3),
    "total-divided": total(200_003),
    "total-half": total(70_000, "float16"),
    "column-sums": columns(40_000, 50, te.sum),
    "column-maxima": columns(1001, 129, te.max),
    "softmax": softmax(37, 197),
    "softmax-short": softmax(300, 7),
    "softmax-long": softmax(3, 5000),
    "elementwise-vectors": scaled(64, 1024),
    "elementwise-half": scaled(64, 1024, dtype="float16"),
    "elementwise-odd": scaled(3, 10_007),
    "elementwise-bytes": scaled(64, 1024, dtype="int8"),
}


@needs_compiler
@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_the_host(name: str) -> None:
    program = FAMILIES[name]
    kernel = schedule(lowered(program), TARGET).kernel
    for descending in (False, True):
        agree(program, emulated(program, kernel, descending))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_runs_on_one_thread(name: str) -> None:
    """Every fold is inside of a loop over threads; only single elements are stored outside."""
    kernel = schedule(lowered(FAMILIES[name]), TARGET).kernel
    assert not kernel.notes
    for launch in emit_kernel(hoist_temporaries(kernel)[0], TARGET)[1]:
        assert launch.block[0] > 1


def nvrtc_missing() -> str:
    try:
        nvrtc.version()
    except TargetError as problem:
        return problem.why
    return ""


@pytest.mark.skipif(bool(nvrtc_missing()), reason=nvrtc_missing())
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_fit_a_multiprocessor(name: str, arch: str) -> None:
    """No spills, and registers and shared memory for at least one block."""
    text, launches = emit_kernel(hoist_temporaries(schedule(lowered(FAMILIES[name]), TARGET).kernel)[0], TARGET)
    usage = nvrtc.compile_text(text, arch).usage
    for launch in launches:
        u = usage[launch.function]
        assert u.spilled == 0 and u.shared + launch.shared <= TARGET.shared_per_block and u.registers * prod(launch.block) <= 1 << 16


@pytest.mark.parametrize(
    "name", ["matvec-divided", "matvec-divided-long", "divided-product", "image-divided", "total-divided", "column-sums"]
)
def test_long_folds_of_few_results_are_divided(name: str) -> None:
    launches = emit_kernel(hoist_temporaries(schedule(lowered(FAMILIES[name]), TARGET).kernel)[0], TARGET)[1]
    first = launches[0]
    assert len(launches) > 1 and prod(n for n in first.grid if isinstance(n, int)) * prod(first.block) >= 1 << 12


@pytest.mark.parametrize("name", [n for n in FAMILIES if n.startswith(("product-", "divided-product", "batched", "image", "convolution"))])
def test_products_of_any_size_and_shape_are_staged(name: str) -> None:
    """Odd sizes, images, batches, folds that are divided: slices of both factors in shared memory, copied in the background."""
    s = schedule(lowered(FAMILIES[name]), TARGET)
    assert {"cache_factors", "pipeline"} <= {step.primitive for step in s.trace}
    assert "start_copy" in emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)[0]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n.startswith(("strips", "matvec-divided"))])
def test_products_of_few_rows_share_the_fold_among_threads(name: str) -> None:
    """One launch, or one after the parts of a fold that is divided; neighbouring threads load neighbouring vectors."""
    s = schedule(lowered(FAMILIES[name]), TARGET)
    launches = emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)[1]
    assert len(launches) == 1 + name.startswith("matvec") and launches[0].barriers >= 1
    assert "cache_write" in {step.primitive for step in s.trace} and "shared" in str(s.kernel)
    assert ("Vector<" in emit_kernel(hoist_temporaries(s.kernel)[0], TARGET)[0]) == (name != "strips-odd")


@pytest.mark.parametrize("name", ["strips-step", "strips-odd", "strips-batched", "matvec-divided", "product-staged-odd", "softmax-short"])
def test_schedules_are_proved(name: str) -> None:
    """Every step, by exact dependence analysis."""
    kernel = lowered(FAMILIES[name])
    proof = prove(kernel, schedule(kernel, TARGET).trace)
    assert proof.ok, proof.refused


@needs_compiler
@pytest.mark.parametrize("size", [33, 100])
def test_rows_by_matrices_of_symbolic_sizes(size: int) -> None:
    """As attention to what came before: as many elements of the fold, or as many columns, as words."""
    n, k, d = te.var("n", 1, 512), te.reduce_axis(te.var("n", 1, 512), "k"), te.reduce_axis(48, "d")
    p, v, q, w = (te.placeholder(x, "float32", a) for x, a in (((4, n), "p"), ((4, n, 36), "v"), ((4, 48), "q"), ((4, 48, n), "w")))
    outputs = (
        te.compute((4, 36), lambda h, j: te.sum(p[h, k] * v[h, k, j], k), "o"),
        te.compute((4, n), lambda h, j: te.sum(q[h, d] * w[h, d, j], d), "c"),
    )
    for inputs, output in (((p, v), outputs[0]), ((q, w), outputs[1])):
        program = Program(inputs, (output,), {n: size})
        s = schedule(lowered(program), TARGET)
        assert not s.kernel.notes and "shared" in str(s.kernel)
        agree(program, emulated(program, s.kernel))


@needs_compiler
@pytest.mark.parametrize("size", [1, 33, 70])
def test_products_of_symbolic_sizes_are_staged(size: int) -> None:
    """As scores of attention are, which have a row and a column for each word."""
    n = te.var("n", 1, 512)
    q, v, k = te.placeholder((3, n, 20), "float32", "q"), te.placeholder((3, n, 20), "float32", "v"), te.reduce_axis(20, "k")
    c = te.compute((3, n, n), lambda h, i, j: te.sum(q[h, i, k] * v[h, j, k], k), "c")
    program = Program((q, v), (c,), {n: size})
    s = schedule(lowered(program), TARGET)
    assert not s.kernel.notes and "cache_factors" in {step.primitive for step in s.trace}
    agree(program, emulated(program, s.kernel))


def test_a_block_asks_for_memory_beyond_48_kib_and_gets_what_there_is() -> None:
    kernel = lowered(FAMILIES["product-staged-dynamic"])
    knobs = Knobs()
    schedule(kernel, TARGET, knobs)
    (stages,) = (n for n in knobs.asked if n.endswith(".stages"))
    (tiles,) = (n for n in knobs.asked if n.endswith(".tile"))
    large = Knobs({stages: 4, tiles: max(knobs.asked[tiles].options, key=lambda t: t[2] * t[5])})
    text, (launch,) = emit_kernel(hoist_temporaries(schedule(kernel, TARGET, large).kernel)[0], TARGET)
    assert (launch.shared > 48 << 10) == ("extern __shared__" in text)
    small = CudaTarget.parse("cuda -arch=sm_75")
    with pytest.raises(CodegenError, match="bytes of shared memory"):
        emit_kernel(shared_kernel(small.shared_per_block + 4), small)
    assert emit_kernel(shared_kernel(small.shared_per_block), small)[1][0].shared == small.shared_per_block


def shared_kernel(size: int) -> Kernel:
    a, out = Buffer("a", "float32", (32,)), Buffer("out", "float32", (32,))
    room = Buffer("room", "float32", (size // 4,), "shared")
    there = loop("t", 32, lambda t: store(room, (t,), a[t]), "thread.x")
    back = loop("u", 32, lambda u: store(out, (u,), room[31 - u]), "thread.x")
    return Kernel("k", (a, out), (out,), (), Allocate(room, block(there, back)))


@needs_compiler
def test_memory_that_is_asked_for_on_the_host() -> None:
    text, (launch,) = emit_kernel(shared_kernel(60 << 10), TARGET)
    assert launch.shared == 60 << 10
    a, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    cuda_host.launch(text, launch.function, [1, 1, 1], launch.block, [a.ctypes.data, out.ctypes.data])
    np.testing.assert_array_equal(out, a[::-1])


def kinds(program: Program) -> set[str]:
    return {s.kind for s in walk(schedule(lowered(program), TARGET).kernel.body) if isinstance(s, For)}


def test_families_use_what_they_should() -> None:
    staged = schedule(lowered(FAMILIES["product-staged"]), TARGET).kernel
    assert "shared" in str(staged) and "thread.y" in kinds(FAMILIES["product-staged"])
    assert "thread.y" in kinds(FAMILIES["product-staged-sevens"])
    assert {"block.x", "thread.x", "vectorized"} <= kinds(FAMILIES["elementwise-vectors"])
    assert str(schedule(lowered(FAMILIES["softmax"]), TARGET).kernel).count("block.x") == 1, "softmax is one launch"
    assert str(schedule(lowered(FAMILIES["softmax-short"]), TARGET).kernel).count("block.x") == 1


@needs_compiler
@pytest.mark.parametrize("reversed_", [False, True])
def test_small_results_of_one_shape_are_computed_side_by_side(reversed_: bool) -> None:
    """Unless one needs an element of another that another thread computes."""
    x, b = te.placeholder((7, 45), "float32", "x"), te.placeholder((45,), "float32", "b")
    y = te.compute((7, 45), lambda i, j: x[i, j] * 2 + b[j], "y")
    z = te.compute((7, 45), lambda i, j: te.maximum(y[i, 44 - j if reversed_ else j], b[j]), "z")
    program = Program((x, b), (y, z), {})
    kernel = schedule(lowered(program), TARGET).kernel
    assert len(emit_kernel(hoist_temporaries(kernel)[0], TARGET)[1]) == 1 + reversed_ and not kernel.notes
    for descending in (False, True):
        agree(program, emulated(program, kernel, descending))


@needs_compiler
@pytest.mark.parametrize("name", ["product-staged", "softmax"])
def test_missing_barriers_would_be_found(name: str) -> None:
    """The host that plays the device does show what it is there to show."""
    program = FAMILIES[name]
    kernel = schedule(lowered(program), TARGET).kernel
    found = [emulated(program, kernel, descending, barriers=False) for descending in (False, True)]
    assert any(not np.array_equal(got, want) for results in found for got, want in zip(results, expected(program), strict=True))
