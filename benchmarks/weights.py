"""Weights of few bits: products against ONNX Runtime, and decoding against the bandwidth of memory.

    python -m benchmarks.weights products --threads 1,2
    python -m benchmarks.weights decode --size 0.5B --weights int4,int8 --context 128,2048
    python -m benchmarks.weights batches --size 0.5B --weights int4 --context 128,1024

`products`: MatMulNBits (blocks of 32, accuracy level 4) of 1, 4, 16 and 512 rows, in turns with ONNX Runtime.

`decode`: a decoder of the sizes of Qwen2.5 with random weights, one token after the other behind a context; the bytes of weights that a token
reads and of the cache, over its time, as a share of what memory delivers in turns with it: the best of a sum and of a product with float32
weights that no cache holds. `copied` is the same step with the cache as inputs and outputs, which copies it.

`batches`: steps of 1, 4 and 16 sequences in one run, and of a model for one sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

import tcomp
from tcomp.frontends.language_models.config import DecoderConfig
from tcomp.frontends.language_models.decoder import decoder_graph
from tcomp.frontends.language_models.stored import StoredBlocks
from tcomp.generation.slots import checked_model, new_state, run_tokens
from tcomp.ir.expr import Dim, dim
from tcomp.ops.quantization import packed
from tcomp.options import CompileOptions
from tcomp.passes.quantized_weights import quantized
from tcomp.pipeline import compile_graph
from tcomp.runtime import LoadedModel, Module, State

from .timing import least_times

SIZES = {  # hidden, intermediate, layers, heads, kv heads, tied
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
}
BITS = {"int4": 4, "int8": 8}
VOCABULARY = 151936
STREAMED = 1 << 28  # bytes that no cache holds
BLOCK = 32


def _model(nodes: list[Any], inputs: Mapping[str, Any], constants: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()]
    held = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)


def reads_of_memory(threads: int) -> dict[str, Callable[[], object]]:
    """Runs that read `STREAMED` bytes from memory by so many threads: a sum, and a product with float32 weights."""
    rows = STREAMED // 4 // 4096
    sum_of = _model([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], {"x": [rows, 4096]}, {})
    product = _model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 4096]}, {"w": np.ones((4096, rows), np.float32)})
    summed, multiplied = (tcomp.compile(m, threads=threads) for m in (sum_of, product))
    x, row = np.ones((rows, 4096), np.float32), np.ones((1, 4096), np.float32)
    return {"sum": lambda: summed.run({"x": x}), "product": lambda: multiplied.run({"x": row})}


def n_bits(rows: int, k: int, n: int, bits: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, (n, k // BLOCK, BLOCK * bits // 8), np.uint8)
    scales = rng.random((n, k // BLOCK), np.float32) * 0.01 + 0.001
    attributes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    return _model([node], {"x": [rows, k]}, {"w": weights, "s": scales})


def products(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each product in turns with ONNX Runtime."""
    import onnxruntime

    for threads in args.threads:
        for bits in args.bits:
            for rows in args.rows:
                model = n_bits(rows, args.k, args.n, bits)
                options = onnxruntime.SessionOptions()
                options.intra_op_num_threads = threads
                theirs = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
                ours = tcomp.compile(model, threads=threads)
                x = np.random.default_rng(1).standard_normal((rows, args.k), np.float32)
                a, b = ours.run({"x": x})["y"], theirs.run(None, {"x": x})[0]
                calls = {"tcomp": lambda ours=ours, x=x: ours.run({"x": x}), "ort": lambda theirs=theirs, x=x: theirs.run(None, {"x": x})}
                times = least_times(calls, args.seconds, args.rounds)
                found = {"threads": threads, "bits": bits, "rows": rows, "tcomp_ms": times["tcomp"] * 1e3, "ort_ms": times["ort"] * 1e3}
                yield found | {"ratio": times["tcomp"] / times["ort"], "difference": float(np.abs(a - b).max() / np.abs(b).max())}


def config_of(size: str, layers: int | None) -> DecoderConfig:
    """That of one of `SIZES`, with fewer layers if so wanted."""
    hidden, inner, count, heads, kv_heads, tied = SIZES[size]
    return DecoderConfig(
        "qwen2", VOCABULARY, hidden, inner, layers or count, heads, kv_heads, hidden // heads, 32768, 1e-6, 1e6, tied, True
    )


def random_weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a name: ones, zeros for biases, of matrices random numbers."""
    if len(shape) == 1:
        return np.ones(shape, np.float32) if name.endswith("weight") else np.zeros(shape, np.float32)
    shifted = np.roll(_numbers(), zlib.crc32(name.encode()) % _numbers().size)  # equal matrices would become one
    return np.resize(shifted, int(np.prod(shape))).reshape(shape).astype(np.float16 if "embed" in name else np.float32)


@cache
def _numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)


def decoder(size: str, kind: str | None, layers: int | None, path: Path, batch: Dim = 1) -> LoadedModel:
    """A decoder with random weights, compiled once into a file, for so many sequences at a time."""

    def given(name: str, shape: tuple[int, ...]) -> np.ndarray | StoredBlocks:  # matrices in few bits one by one: never all as floats
        found = random_weights(name, shape)
        if kind not in BITS or found.ndim == 1 or "embed" in name:
            return found
        numbers, scales = quantized(found, BITS[kind])
        zeros = np.full(scales.shape, 1 << (BITS[kind] - 1), np.uint8)
        return StoredBlocks(packed(numbers, BITS[kind]), scales, zeros, BITS[kind], BLOCK)

    if not path.exists():
        graph = decoder_graph(config_of(size, layers), given, batch)
        compile_graph(graph, CompileOptions(weights=kind, state="auto")).save(path)
    return Module.load(path)


def streamed_weights(model: LoadedModel) -> int:
    """Bytes of weights that a token reads: all but the table of embeddings, of which it reads a row."""
    sizes = {w.name.split(":", 1)[1]: w.size for w in model.manifest.weights}
    return sum(sizes.values()) - sizes.get("model.embed_tokens.weight", 0)


def decode(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of one token behind contexts."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for threads in args.threads:
        reads = reads_of_memory(threads)
        for kind in args.weights:
            path = args.folder / f"{args.size}-{args.layers or 'all'}-{kind}.tcomp"
            decoder(args.size, None if kind == "float32" else kind, args.layers, path)
            model = Module.load(path, threads=threads, mmap=False)  # in large pages, as `Generator.load` does
            assert isinstance(model, Module)
            for context in args.context:
                state = State(model, context + 16)
                ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, context))

                def prefill(s: State = state, i: np.ndarray = ids) -> None:
                    s.truncate(0)
                    s.run({"ids": i})

                first = least_times({"prefill": prefill}, 0.0, 1)["prefill"]
                past = {name: np.ascontiguousarray(a) for name, a in state.values().items()}
                one = ids[:, :1]

                def step(s: State = state, n: int = context, i: np.ndarray = one) -> None:
                    s.truncate(n)
                    s.run({"ids": i})

                calls = {"decode": step, "copied": lambda m=model, p=past, i=one: m.run({"ids": i, **p})}
                times = least_times({**calls, **reads}, args.seconds, args.rounds)
                delivered = STREAMED / min(times[name] for name in reads)
                bytes_read = streamed_weights(model) + sum(a.nbytes for a in past.values())
                found = {"threads": threads, "weights": kind, "context": context, "tokens_per_s": 1 / times["decode"]}
                found |= {"MB": bytes_read / 1e6, "GB_per_s": bytes_read / times["decode"] / 1e9, "memory_GB_per_s": delivered / 1e9}
                found |= {"share": bytes_read / times["decode"] / delivered, "copied_tokens_per_s": 1 / times["copied"]}
                yield found | {"prefill_tokens_per_s": context / first}


def batches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of one token of several sequences behind contexts, in turns with that of a model for one sequence."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for threads in args.threads:
        for kind in args.weights:
            one, several = (args.folder / f"{args.size}-{args.layers or 'all'}{part}-{kind}.tcomp" for part in ("", "-16"))
            models = []
            for path, batch in ((one, 1), (several, dim("batch", 1, 16))):
                decoder(args.size, None if kind == "float32" else kind, args.layers, path, batch)
                models.append(checked_model(Module.load(path, threads=threads, mmap=False)))
            for context in args.context:
                calls: dict[str, Callable[[], object]] = {}
                for name, model, rows in (("alone", models[0], 1), *((f"batch_{n}", models[1], n) for n in (1, 4, 16))):
                    state = new_state(model, rows, context + 16)
                    state.extend(context)

                    def step(s: State = state, n: int = rows, length: int = context) -> None:
                        s.truncate(length)
                        run_tokens(s, [[5]] * n, [0] * n, None)

                    calls[name] = step
                times = least_times(calls, args.seconds, args.rounds)
                found = {"threads": threads, "weights": kind, "context": context, "alone_tokens_per_s": 1 / times["alone"]}
                found |= {f"batch_{n}_tokens_per_s": n / times[f"batch_{n}"] for n in (1, 4, 16)}
                yield found | {"16_over_alone": 16 * times["alone"] / times["batch_16"]}


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def show(rows: Sequence[dict[str, Any]], file: Path | None, title: str = "") -> None:
    """Print rows, which may lack columns, as a table; write them to a file of JSON, if one is given."""
    table, names = Table(box=box.SIMPLE, title=title or None), list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        found = (row.get(name, "-") for name in names)
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in found))
    Console(width=200).print(table)
    if file is not None:
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("products", "decode", "batches"))
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 512])
    parser.add_argument("--bits", type=numbers, default=[4])
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--layers", type=int, help="default: all of them")
    parser.add_argument("--weights", type=lambda t: t.split(","), default=["int4", "int8"], help="some of int4, int8, bf16, fp16, float32")
    parser.add_argument("--context", type=numbers, default=[128, 2048])
    parser.add_argument("--folder", type=Path, default=Path("build/weights"), help="where compiled decoders are kept")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    rows = []
    for row in {"products": products, "decode": decode, "batches": batches}[args.what](args):
        rows.append(row)
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()), flush=True
        )
    show(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
