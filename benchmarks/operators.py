"""Single operators on one core: tcomp, ONNX Runtime and torch in turns, beside what the machine can do at most.

    python -m benchmarks.operators [--only 'add,softmax,gemm*'] [--rounds 15] [--list]

Operators that move memory are measured in GB/s: each input read once and the output written once, on at least 16 Mi elements; the peak is
a triad, `a = b + 2 c`, on as many elements, counted likewise. (A cache line that is fetched before it is overwritten
counts for nobody, so stores that pass the caches by show as bandwidth: the triad is measured with either kind.) Contractions are measured
in GFLOP/s beside fused multiply-adds in registers. tcomp gets one-operator ONNX models and schedules them by default, without Winograd's
algorithm, and takes and returns tensors in ONNX's layouts, as the peers do.

All contenders work on the same inputs in one thread, one after the other in every round, and are timed by the processor time of that thread. Printed are the rates of the fastest run (and of
the median), the shares of the peaks, and tcomp's time over that of the fastest peer (below 1 is faster).
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[_name] = "1"  # read when the libraries are imported
os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # torch: large pages, as NumPy has them

import numpy as np
import onnx
from onnx import numpy_helper, parser

import tcomp
from tcomp import Schedule
from tcomp.calibration import peak_flops
from tcomp.ir.loops import VECTORIZED, Buffer, Kernel, loop, store
from tcomp.target import CpuTarget

from .contenders.worker import difference

SAMPLE = 4e-3  # seconds that a timed sample takes at least

Run = Callable[[], Any]


class Missing(Exception):
    """The contender cannot run this here; the message says why."""


@dataclass(frozen=True)
class Case:
    """An operator: ONNX text of its body (inputs x, y, ...; result z), shapes, and the same in torch."""

    name: str
    body: str
    shapes: Sequence[tuple[int, ...]]
    result: tuple[int, ...]
    torch: Callable[..., Any]  # (torch, *inputs, *constants)
    flops: float = 0.0  # 0: memory is what counts
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """Operations or bytes."""
        return self.flops or 4.0 * (sum(map(prod, self.shapes)) + prod(self.result))

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shapes = {**dict(zip("xyuv", self.shapes, strict=False)), **self.constants}
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def model(self, arrays: Mapping[str, np.ndarray]) -> onnx.ModelProto:
        def typed(name: str, shape: Sequence[int]) -> str:
            return f"float[{', '.join(map(str, shape))}] {name}"

        inputs = ", ".join(typed(name, arrays[name].shape) for name in arrays if name not in self.constants)
        head = f'<ir_version: 9, opset_import: ["": 20]> g ({inputs}) => ({typed("z", self.result)})'
        made = parser.parse_model(f"{head} {{ {self.body} }}")
        made.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in self.constants)
        return made


N = 1 << 24
FLAT, ROWS, SQUARE, IMAGE = (N,), (N >> 10, 1 << 10), (1 << 12, 1 << 12), (1, 64, 512, 512)
_CHAIN = "a = Mul(x, y) b = Add(a, x) c = Relu(b) d = Sub(c, y) e = Abs(d) f = Max(e, x) g1 = Neg(f) z = Add(g1, y)"


def _chain(t: Any, x: Any, y: Any) -> Any:
    return t.maximum(t.abs(t.relu(x * y + x) - y), x).neg() + y


def _gemm(m: int, n: int, k: int) -> Case:
    return Case(f"gemm_{m}x{n}x{k}", "z = MatMul(x, w)", [(m, k)], (m, n), lambda t, x, w: x @ w, 2.0 * m * n * k, {"w": (k, n)})


def _convs(size: int, i: int, o: int, kernel: int) -> Case:
    """Convolutions from i to o channels and back, eight in a row, so that layouts and padding are as they are inside of a network."""
    pad, weights = kernel // 2, [f"w{n}" for n in range(8)]
    values = ["x", *(f"t{n}" for n in range(1, 8)), "z"]
    body = " ".join(
        f"{b} = Conv<pads=[{pad}, {pad}, {pad}, {pad}]>({a}, {w})" for a, b, w in zip(values, values[1:], weights, strict=False)
    )

    def in_torch(t: Any, x: Any, *weights: Any) -> Any:
        x = x.contiguous(memory_format=t.channels_last)
        for w in weights:
            x = t.nn.functional.conv2d(x, w, None, 1, pad)
        return x

    shapes = {w: (o, i, kernel, kernel) if n % 2 == 0 else (i, o, kernel, kernel) for n, w in enumerate(weights)}
    image = (1, i, size, size)
    return Case(f"conv{kernel}x{kernel}_{i}_{o}_{size}", body, [image], image, in_torch, 16.0 * size**2 * i * o * kernel**2, shapes)


CASES = [
    Case("add", "z = Add(x, y)", [FLAT, FLAT], FLAT, lambda t, x, y: x + y),
    Case("relu", "z = Relu(x)", [FLAT], FLAT, lambda t, x: t.relu(x)),
    Case("gelu", "z = Gelu(x)", [FLAT], FLAT, lambda t, x: t.nn.functional.gelu(x)),
    Case("chain_of_8", _CHAIN, [FLAT, FLAT], FLAT, _chain),
    Case("softmax", "z = Softmax<axis=-1>(x)", [ROWS], ROWS, lambda t, x: t.softmax(x, -1)),
    Case("layernorm", "z = LayerNormalization<axis=-1, epsilon=0.00001>(x, s, b)", [ROWS], ROWS,
         lambda t, x, s, b: t.nn.functional.layer_norm(x, ROWS[1:], s, b), constants={"s": ROWS[1:], "b": ROWS[1:]}),
    Case("transpose", "z = Transpose<perm=[1, 0]>(x)", [SQUARE], SQUARE, lambda t, x: x.t().contiguous()),
    Case("transpose_nhwc", "z = Transpose<perm=[0, 2, 3, 1]>(x)", [IMAGE], (1, 512, 512, 64), lambda t, x: x.permute(0, 2, 3, 1).contiguous()),
    Case("depthwise3x3", "z = Conv<group=64, pads=[1, 1, 1, 1]>(x, w)", [IMAGE], IMAGE,
         lambda t, x, w: t.nn.functional.conv2d(x, w, None, 1, 1, 1, 64), constants={"w": (64, 1, 3, 3)}),
    Case("depthwise3x3_unpadded", "z = Conv<group=64>(x, w)", [IMAGE], (1, 64, 510, 510),
         lambda t, x, w: t.nn.functional.conv2d(x, w, None, 1, 0, 1, 64), constants={"w": (64, 1, 3, 3)}),
    *(_gemm(n, n, n) for n in (512, 1024, 2048)),
    *(_gemm(m, n, n) for m in (1, 8) for n in (1024, 4096)),
    # The convolutions of ResNet-50 that keep the size.
    *(_convs(56 >> n, 64 << n, 64 << n, 3) for n in range(4)),
    *(_convs(56 >> n, 64 << n, 256 << n, 1) for n in range(4)),
]  # fmt: skip


# Each contender makes of an operator what is timed: it returns the result.


def in_tcomp(case: Case, arrays: Mapping[str, np.ndarray]) -> Run:
    module = tcomp.compile(case.model(arrays), threads=1, direct=True)
    inputs = [arrays[i.name] for i in module.inputs]
    return lambda: module(*inputs)


def in_onnxruntime(case: Case, arrays: Mapping[str, np.ndarray]) -> Run:
    try:
        import onnxruntime
    except ImportError as e:
        raise Missing(str(e)) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(case.model(arrays).SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, result = session.io_binding(), np.empty(case.result, np.float32)
    for i in session.get_inputs():
        binding.bind_cpu_input(i.name, arrays[i.name])
    binding.bind_output("z", "cpu", 0, np.float32, case.result, result.ctypes.data)

    def run() -> np.ndarray:
        session.run_with_iobinding(binding)
        return result

    return run


def in_torch(case: Case, arrays: Mapping[str, np.ndarray]) -> Run:
    try:
        import torch
    except ImportError as e:
        raise Missing(str(e)) from None
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(a) for a in arrays.values()]

    def run() -> Any:
        with torch.inference_mode():
            return case.torch(torch, *tensors)

    return run


CONTENDERS: dict[str, Callable[[Case, Mapping[str, np.ndarray]], Run]] = {
    "tcomp": in_tcomp, "onnxruntime": in_onnxruntime, "torch": in_torch,
}  # fmt: skip


def triad(target: CpuTarget, size: int, streamed: bool) -> Run:
    """a = b + 2 c on `size` elements in full vectors, in order; `streamed`: by stores that pass the caches by."""
    lanes = target.lanes(32)
    a, b, c = (Buffer(name, "float32", (size // lanes, lanes)) for name in "abc")
    body = loop("i", size // lanes, lambda i: loop("j", lanes, lambda j: store(a, (i, j), b[i, j] + c[i, j] * 2.0), VECTORIZED))
    s = Schedule(Kernel("triad", (a, b, c), (a,), (), body))
    if streamed:
        s.stream("a")
    run = tcomp.build(s, target, threads=1)
    arrays = [aligned((size // lanes, lanes)) for _ in range(3)]
    return lambda: run(*arrays)


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Ones, from the start of a cache line on. (Zeros that were never written would all be one page.)"""
    room = np.empty(4 * prod(shape) + 64, np.uint8)
    array = room[-room.ctypes.data % 64 :][: 4 * prod(shape)].view(np.float32).reshape(shape)
    array.fill(1.0)
    return array


def samples(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of one run, `rounds` times, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    repeats = {name: max(1, round(SAMPLE / seconds(run, 2))) for name, run in runs.items()}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, repeats[name]))
    return times


def seconds(run: Run, repeats: int) -> float:
    """Of processor time for one run: what else the machine does counts less."""
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def measure(case: Case, target: CpuTarget, rounds: int) -> Iterator[str]:
    """The lines of the report on an operator."""
    arrays = case.arrays()
    runs: dict[str, Run] = {}
    for name, make in CONTENDERS.items():
        try:
            runs[name] = make(case, arrays)
        except Missing as e:
            yield f"{case.name}: no {name}: {e}"
    results = {name: np.asarray(run()) for name, run in runs.items()}
    for name, found in results.items():
        if (error := difference({"z": found}, {"z": results["tcomp"]})) > 1e-4:
            yield f"{case.name}: {name} differs from tcomp by {error:.1e}"
    del results
    peaks = [peak_flops(target)]
    if not case.flops:
        runs |= {"triad": triad(target, N, False), "streamed triad": triad(target, N, True)}
    times = samples(runs, rounds)
    peaks.append(peak_flops(target))
    tops = [max(peaks)] if case.flops else [12.0 * N / min(times.pop(name)) for name in ("triad", "streamed triad")]
    peers = [min(t) for name, t in times.items() if name != "tcomp"]
    unit = "GFLOP/s" if case.flops else "GB/s"
    for name, t in times.items():
        rate = case.work / min(t)
        shares = "".join(f"{rate / top:7.0%} of {top / 1e9:5.1f}" for top in tops)
        ratio = f"{min(t) / min(peers):8.2f}" if peers and name == "tcomp" else ""
        yield f"{case.name:<24}{name:<12}{rate / 1e9:7.1f} ({case.work / np.median(t) / 1e9:6.1f}) {unit:<8}{shares}{ratio}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options.add_argument("--only", default="*", help="names or patterns of operators, separated by commas")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--list", action="store_true", help="name the operators")
    args = options.parse_args()
    chosen = [c for c in CASES if any(fnmatch.fnmatch(c.name, pattern) for pattern in args.only.split(","))]
    if args.list:
        print(*(c.name for c in chosen), sep="\n")
        return
    # Results that are freed stay with the process: what an operator costs is measured, not what new pages cost.
    for option, value in ((-4, 0), (-1, 1 << 30)):  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
        ctypes.CDLL(None).mallopt(option, value)
    print(f"{'':<37}fastest (median)   share of the triad   and of the streamed one, or of the multiply-adds; tcomp / best peer")
    for case in chosen:
        for line in measure(case, CpuTarget.host(), args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
