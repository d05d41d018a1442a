"""151 ONNX models that mean harm, by classes: `python -m tests.frontends.hostile` compiles each in a process of its own with limits, and prints figures.

Every model must compile, be refused by a `TcompError`, or be ended by its limits; nothing may crash or raise anything else.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tcomp.errors import TcompError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model

SECONDS, MEMORY = 10, 3 << 30
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def info(name: str, shape: Sequence[int | str | None] | None, kind: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: Sequence[NodeProto], inputs: Sequence[ValueInfoProto], outputs: Sequence[str], opset: int = 21, **constants: object
) -> ModelProto:
    """A model whose outputs have no declared shapes."""
    infos = [helper.make_empty_tensor_value_info(name) for name in outputs]
    arrays = [a if isinstance(a, TensorProto) else numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), infos, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


X = info("x", [4])


def chain(op: str, count: int, *others: str, shape: Sequence[int | str] = (4,), kind: int = FLOAT, **attrs: object) -> ModelProto:
    """op(op(op(x, ...), ...), ...): `others` are further operands, "" for the value itself once more."""
    names = ["x", *(f"a{n}" for n in range(count))]
    nodes = [node(op, [a, *(o or a for o in others)], [b], **attrs) for a, b in pairwise(names)]
    given = {"one": np.ones(1, np.float32), "index": np.zeros(4, np.int64), "two": np.array(2)}
    return model(nodes, [info("x", shape, kind)], names[-1:], **{n: a for n, a in given.items() if n in others})


def deep() -> Iterator[tuple[str, ModelProto]]:
    """Long chains: expressions and graphs that are as deep as the file is long."""
    for op, others in {"Relu": (), "Mish": (), "Add": ("x",), "Mul": ("",), "Gather": ("index",), "Gelu": ()}.items():
        for count in (60, 1500):
            yield f"{op} {count}", chain(op, count, *others)
    yield "concat chain 300", chain("Concat", 300, "x", axis=0)
    yield "integer squares 40", chain("Mul", 40, "", kind=INT64)
    yield "integer negations 4000", chain("Neg", 4000, kind=INT64)
    yield "transposes 3000", chain("Transpose", 3000, shape=(3, 4))
    yield "unsqueezes 40", chain("Unsqueeze", 40, "two", shape=(3, 4))


def wide() -> Iterator[tuple[str, ModelProto]]:
    """Many operands, nodes and outputs."""
    for count in (9, 64, 600, 2000):
        names = [f"x{n}" for n in range(count)]
        yield f"concat of {count}", model([node("Concat", names, ["y"], axis=0)], [info(n, [2, 3]) for n in names], ["y"])
    for count in (20, 300):
        names = [f"x{n}" for n in range(count)]
        yield f"concat of {count} sizes", model([node("Concat", names, ["y"], axis=0)], [info(n, [f"d{n}", 3]) for n in names], ["y"])
    for op in ("Sum", "Max", "Mean"):
        names = [f"x{n}" for n in range(700)]
        yield f"{op} of 700", model([node(op, names, ["y"])], [info(n, [4]) for n in names], ["y"])
    for count in (10, 500):
        parts = [f"s{n}" for n in range(count)]
        split = node("Split", ["x"], parts, axis=0, num_outputs=count)
        yield f"split and concat {count}", model([split, node("Concat", parts, ["y"], axis=0)], [info("x", [2 * count, 3])], ["y"])
    outputs = [f"y{n}" for n in range(3000)]
    yield "3000 outputs", model([node("Relu", ["x"], [o]) for o in outputs], [X], outputs)
    yield "3000 inputs", model([node("Relu", ["x0"], ["y"])], [info(f"x{n}", ["n"]) for n in range(3000)], ["y"])
    yield "3000 constants", model([node("Relu", ["x"], ["y"])], [X], ["y"], **{f"c{n}": np.zeros(1) for n in range(3000)})
    yield "dead nodes", model([node("Relu", ["x"], ["y"]), *(node("Relu", ["y"], [f"z{n}"]) for n in range(5000))], [X], ["y"])


def sizes() -> Iterator[tuple[str, ModelProto]]:
    """Sizes beyond memory, products that wrap around, shape arithmetic that explodes."""
    for size in (1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -1, -(1 << 40)):
        yield f"input of {size}", model([node("Relu", ["x"], ["y"])], [info("x", [size])], ["y"])
        yield f"fill of {size}", model([node("ConstantOfShape", ["s"], ["y"])], [], ["y"], s=np.array([size]))
        yield f"wrapping product {size}", model([node("ConstantOfShape", ["s"], ["y"])], [], ["y"], s=np.array([size, 1 << 33, 1 << 33]))
        yield f"tile {size}", model([node("Tile", ["x", "r"], ["y"])], [X], ["y"], r=np.array([size]))
        yield f"pad {size}", model([node("Pad", ["x", "r"], ["y"])], [X], ["y"], r=np.array([size, 0]))
        yield f"reshape {size}", model([node("Reshape", ["x", "r"], ["y"])], [X], ["y"], r=np.array([size, 4]))
        yield f"range {size}", model([node("Range", ["a", "b", "c"], ["y"])], [], ["y"], a=np.array(0), b=np.array(size), c=np.array(1))
        yield f"slice {size}", model([node("Slice", ["x", "a", "b"], ["y"])], [X], ["y"], a=np.array([0]), b=np.array([size]))
    for op, operand in (("Mul", ""), ("Mul", "s0"), ("Add", "s0"), ("Div", "t"), ("Sub", "t"), ("Mod", "t")):
        for count in (5, 30):
            names = [f"s{n}" for n in range(count + 1)]
            steps = [node(op, [a, operand or a], [b]) for a, b in pairwise(names)]
            nodes = [node("Shape", ["x"], ["s0"]), *steps, node("Expand", ["z", names[-1]], ["y"])]
            yield (
                f"shape {op} {operand or 'itself'} {count}",
                model(nodes, [info("x", ["a", "b"]), info("z", [1])], ["y"], t=np.array([3, 2])),
            )
    mixed = [node(("Div", "Add")[n % 2], [f"s{n}", ("t", "s0")[n % 2]], [f"s{n + 1}"]) for n in range(300)]
    nodes = [node("Shape", ["x"], ["s0"]), *mixed, node("Expand", ["z", "s300"], ["y"])]
    yield "deep shape formula", model(nodes, [info("x", ["a", "b"]), info("z", [1])], ["y"], t=np.array([3, 2]))
    yield "cumulative sum 2^63", model(
        [node("Add", ["a", "b"], ["s"]), node("Add", ["s", "c"], ["t"]), node("CumSum", ["t", "axis"], ["y"])],
        [info("a", ["a", 1, 1]), info("b", [1, "b", 1]), info("c", [1, 1, "c"])], ["y"], axis=np.array(0),
    )  # fmt: skip


def branches(depth: int, both: bool, name: str = "r") -> GraphProto:
    """`If` inside `If`: in both branches, or in one."""
    out = [info(f"{name}{depth}", [4])]
    if depth == 0:
        return helper.make_graph([node("Relu", ["x"], [f"{name}0"])], "leaf", [], out)
    plain = helper.make_graph([node("Neg", ["x"], [f"{name}{depth}e"])], "plain", [], [info(f"{name}{depth}e", [4])])
    inner = branches(depth - 1, both, name)
    other = branches(depth - 1, both, f"{name}_") if both else plain
    return helper.make_graph([node("If", ["c"], [f"{name}{depth}"], then_branch=inner, else_branch=other)], "b", [], out)


def loop_model(trips: int, depth: int = 1) -> ModelProto:
    """Loops inside loops, of many trips."""

    def body(level: int) -> GraphProto:
        i, go, state, more = f"i{level}", f"g{level}", f"s{level}", f"m{level}"
        inner = [node("Add", [state, "one"], [f"r{level}"])]
        if level:
            inner = [node("Loop", ["trips", "", state], [f"r{level}"], body=body(level - 1))]
        inputs = [info(i, [], INT64), info(go, [], BOOL), info(state, [4])]
        return helper.make_graph(
            [node("Identity", [go], [more]), *inner], f"b{level}", inputs, [info(more, [], BOOL), info(f"r{level}", [4])]
        )

    loop = node("Loop", ["trips", "", "x"], ["y"], body=body(depth - 1))
    return model([loop], [X], ["y"], trips=np.array(trips), one=np.ones(1, np.float32))


def nested() -> Iterator[tuple[str, ModelProto]]:
    """Graphs inside graphs, loops without end, functions that call functions."""
    for depth in (2, 6, 10):
        graph = branches(depth, True)
        yield (
            f"if in both branches {depth}",
            model([*graph.node, node("Identity", [graph.output[0].name], ["y"])], [X, info("c", [], BOOL)], ["y"]),
        )
    for depth in (10, 20, 30):
        graph = branches(depth, False)
        yield (
            f"if in one branch {depth}",
            model([*graph.node, node("Identity", [graph.output[0].name], ["y"])], [X, info("c", [], BOOL)], ["y"]),
        )
    for trips in (0, -5, 31, 1 << 20, 1 << 62):
        yield f"loop of {trips}", loop_model(trips)
    for depth in (2, 3, 20, 30):
        yield f"{depth} loops of 2^62", loop_model(1 << 62, depth)
        yield f"{depth} loops of 30", loop_model(30, depth)
    for count in (5, 14, 40):  # each function calls the next one twice
        functions = [
            helper.make_function("own", f"f{n}", ["a"], ["b"], [node(f"f{n + 1}", ["a"], ["t"], domain="own"), node(f"f{n + 1}", ["t"], ["b"], domain="own")],
                                 [helper.make_opsetid("own", 1)])
            for n in range(count)
        ]  # fmt: skip
        functions.append(
            helper.make_function("own", f"f{count}", ["a"], ["b"], [node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 21)])
        )
        calls = model([node("f0", ["x"], ["y"], domain="own")], [X], ["y"])
        calls.functions.extend(functions)
        calls.opset_import.append(helper.make_opsetid("own", 1))
        yield f"functions that double {count}", calls
    recursive = model([node("f", ["x"], ["y"], domain="own")], [X], ["y"])
    recursive.functions.append(
        helper.make_function("own", "f", ["a"], ["b"], [node("f", ["a"], ["b"], domain="own")], [helper.make_opsetid("own", 1)])
    )
    recursive.opset_import.append(helper.make_opsetid("own", 1))
    yield "a function that calls itself", recursive


def names_and_data() -> Iterator[tuple[str, ModelProto]]:
    """Names that collide, are long or steer terminals; tensors that are not what they say."""
    odd = [
        "a/b",
        "a.b",
        "a:b",
        "a_b",
        "a b",
        "A_B",
        "\x1b[2J",
        "\u202etxt",
        "%s%n",
        "x" * 100_000,
        "../../etc",
        "\0",
        "kernel",
        "int",
        "é",
        "a\nb",
    ]
    for name in odd:
        m = model([node("Relu", ["in" + name], [name], name=name)], [info("in" + name, [name, 4])], [name])
        yield f"name {name[:12]!r}", m
    yield "all odd names", model([node("Relu", ["x"], [o], name=o) for o in odd], [info("x", ["n"])], odd)
    yield "names that differ in punctuation", model([node("Relu", ["x"], [o]) for o in odd[:6]], [info("x", odd[:6])], odd[:6])
    for dims in ([1 << 40], [1 << 31, 1 << 31], [-1], [1 << 62, 4], [0, 1 << 62]):
        yield (
            f"absent data {dims}",
            model([node("Add", ["x", "w"], ["y"])], [X], ["y"], w=TensorProto(name="w", data_type=FLOAT, dims=dims)),
        )
    for location in ("/dev/zero", "/proc/self/mem", "../m.onnx", ".", "a\0b", "/etc/passwd", "x" * 5000, "\x1b[31mred"):
        w = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        w.external_data.add(key="location", value=location)
        yield f"external {location[:16]!r}", model([node("Add", ["x", "w"], ["y"])], [X], ["y"], w=w)
    for kind in (AttributeProto.GRAPHS, AttributeProto.TENSORS, AttributeProto.TYPE_PROTO):
        m = model([node("Relu", ["x"], ["y"])], [X], ["y"])
        m.graph.node[0].attribute.add(name="alpha", type=kind)
        yield f"attribute of type {kind}", m


CLASSES: Sequence[Callable[[], Iterator[tuple[str, ModelProto]]]] = (deep, wide, sizes, nested, names_and_data)


def models() -> list[tuple[str, ModelProto]]:
    """All of them, with names that are unique."""
    return [(f"{function.__name__}: {name}", m) for function in CLASSES for name, m in function()]


def sample(count: int, seed: int = 0) -> list[tuple[str, ModelProto]]:
    """Some of them, the same for the same seed."""
    return random.Random(seed).sample(models(), count)


def attempt(hostile: ModelProto, seconds: float = SECONDS) -> tuple[str, float, int]:
    """(what became of it, seconds, MiB at most) of a model compiled in a forked process with limits, beyond the memory that this process
    has: "compiled", the name of a `TcompError`, "limit" where it was ended, or what must not happen: "raw: ...", "crash: ..."."""
    content, (reader, writer), started = hostile.SerializeToString(), os.pipe(), time.perf_counter()
    memory = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    data, resident = (int(memory[name].split()[0]) << 10 for name in ("VmData", "VmRSS"))
    if (child := os.fork()) == 0:
        verdict = "compiled"
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, data + MEMORY))
            os.environ["TCOMP_JOBS"] = "1"
            compile_model(content, CompileOptions(threads=1))
        except TcompError as error:
            verdict = type(error).__name__
        except MemoryError:
            verdict = "limit"
        except BaseException as error:  # noqa: BLE001  what must not happen
            verdict = f"raw: {type(error).__name__}: {error}"
        os.write(writer, verdict.encode()[:4000])
        os._exit(0)
    os.close(writer)
    ended = bool(select.select([reader], [], [], seconds)[0])
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    said = os.read(reader, 4000).decode(errors="replace")
    os.close(reader)
    verdict = said or ("limit" if not ended else f"crash: status {status}")
    return verdict, time.perf_counter() - started, max(0, usage.ru_maxrss - (resident >> 10)) >> 10


def main() -> int:
    """Compile all models within limits; prints what became of each, and figures. Status 1 if anything else happened."""
    counts, longest, most = Counter[str](), (0.0, ""), (0, "")
    for number, (name, hostile) in enumerate(models(), 1):
        verdict, seconds, memory = attempt(hostile)
        counts[verdict.split(":")[0]] += 1
        longest, most = max(longest, (seconds, name)), max(most, (memory, name))
        print(f"{number:4} {seconds:6.2f} s {memory:6} MiB  {verdict!r:.100}  {name!r:.80}", flush=True)
    print(f"{sum(counts.values())} models: {dict(counts)}")
    print(f"longest {longest[0]:.1f} s ({longest[1]!r:.60}), most memory {most[0]} MiB ({most[1]!r:.60})")
    return int(counts["raw"] + counts["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main())
