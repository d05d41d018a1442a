"""Models with element types of 2 to 8 bits, compiled, against onnx's reference: packed tensors, quantisation, conversions, control flow."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tcomp
from tcomp.errors import ImportModelError, TcompError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.frontends.onnx.reader import ELEM_TYPES, TensorReader
from tcomp.ir.dtypes import NARROW, NARROW_FLOATS, NARROW_INTEGERS, SCALE, integer_range, to_numpy
from tcomp.ir.graph import content_hash
from tcomp.ir.interpreters.graph import evaluate_graph
from tcomp.ir.text.parser import parse_graph
from tcomp.options import CompileOptions
from tcomp.verification import verify

DTYPES = [dtype for dtype in NARROW if dtype in ELEM_TYPES]  # older versions of onnx lack some
MOVED = [dtype for dtype in DTYPES if not dtype.startswith("float6")]  # which are for Cast, QuantizeLinear and DequantizeLinear alone
OPSET = onnx.defs.onnx_opset_version()


def random(dtype, *shape, seed=0):
    """Random bits that are not NaN or infinity."""
    codes = np.arange(1 << NARROW[dtype], dtype=np.uint8).view(to_numpy(dtype))
    return np.random.default_rng(seed).choice(codes[np.isfinite(codes.astype(np.float32))], shape)


def run(model, inputs):
    return list(tcomp.compile(model).run(inputs).values())


def check(model, inputs):
    """Equal to the reference, types and NaN included."""
    found, wanted = run(model, inputs), ReferenceEvaluator(model).run(None, inputs)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 64, 1001])
def test_packed_tensors(dtype, count, tmp_path):
    """Bytes, in the file and beside it, and the field of integers; too few and too many are refused."""
    array = random(dtype, count)
    raw = numpy_helper.from_array(array, "w")
    fields = helper.make_tensor("w", raw.data_type, [count], array)
    if dtype == SCALE:  # `make_tensor` rounds what it is given, numbers below 2**-126 wrongly
        fields.int32_data[:] = raw.raw_data
    external = onnx.TensorProto()
    external.CopyFrom(raw)
    (tmp_path / "w.bin").write_bytes(raw.raw_data)
    external.ClearField("raw_data")
    external.data_location = TensorProto.EXTERNAL
    external.external_data.add(key="location", value="w.bin")
    reader = TensorReader(tmp_path, {})
    for tensor in (raw, fields, external):
        found = reader.array(tensor)
        assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
    raw.raw_data += b"\0"
    with pytest.raises(ImportModelError, match="does not fit its type"):
        reader.array(raw)


@pytest.mark.parametrize("dtype", MOVED)
def test_moved_and_converted(make_model, dtype):
    """Through operators that move elements, with free sizes; a constant, and a large one in a product."""
    w, x = random(dtype, 67, 45, seed=1), random(dtype, 3, 5)
    kind = ELEM_TYPES[dtype]
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Identity", ["t"], ["y"]),
        helper.make_node("Pad", ["t", "pads"], ["p"], mode="edge"),
        helper.make_node("Reshape", ["p", "flat"], ["r"]),
        helper.make_node("Cast", ["r"], ["z"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["wide"], ["top"], keepdims=0),
        helper.make_node("ConstantOfShape", ["sizes"], ["c"], value=helper.make_tensor("v", kind, [1], [1])),
    ]
    constants = {"w": w, "pads": np.array([1, 0, 0, 2]), "flat": np.array([-1]), "sizes": np.array([2, 3])}
    model = make_model(
        nodes, {"x": (dtype, ["a", "b"])}, {"y": dtype, "z": "float32", "top": "float32", "c": dtype}, opset=25, constants=constants
    )
    model.ir_version = 13
    check(model, {"x": x})
    text = str(import_model(model))
    assert dtype in text


@pytest.mark.parametrize("dtype", MOVED)
def test_control_flow_carries_them(make_model, dtype):
    kind = ELEM_TYPES[dtype]
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Transpose", ["v"], ["turned"], perm=[1, 0])],
        "body",
        [info("n", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", kind, [3, 3])],
        [info("on", TensorProto.BOOL, []), info("turned", kind, [3, 3])],
    )
    nodes = [helper.make_node("Loop", ["count", "yes", "x"], ["y"], body=body)]
    constants = {"count": np.array(3), "yes": np.array(True)}
    model = make_model(nodes, {"x": (dtype, [3, 3])}, {"y": dtype}, opset=25, constants=constants)
    model.ir_version = 13
    x = random(dtype, 3, 3)
    assert run(model, {"x": x})[0].tobytes() == x.T.tobytes()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != SCALE])
@pytest.mark.parametrize("granularity", ["tensor", "axis", "block"])
@pytest.mark.parametrize("wide", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("zero", [False, True])
def test_quantisation(dtype, granularity, wide, zero):
    """To a type and back, by each granularity; 5 elements in blocks of 2."""
    rng, kind, other = np.random.default_rng(0), ELEM_TYPES[dtype], ELEM_TYPES[wide]
    info, sizes, shape = helper.make_tensor_value_info, [4, 5, 3], {"tensor": [], "axis": [5], "block": [4, 3, 3]}[granularity]
    x = (rng.standard_normal(sizes) * rng.choice([1, 10, 1000], sizes)).astype(to_numpy(wide))
    if dtype in NARROW_FLOATS:
        x.reshape(-1)[:3] = [np.nan, np.inf, -np.inf]
    scale = rng.choice([0.25, 0.5, 1.0, 3.0], shape).astype(to_numpy(wide))
    zeros = random(dtype, *shape) if dtype in NARROW_INTEGERS else np.zeros(shape, to_numpy(dtype))
    given = [info("s", other, shape), *([info("z", kind, shape)] if zero else [])]
    names, where = ["s", "z"][: len(given)], {} if granularity == "tensor" else {"axis": 1}
    where |= {"block_size": 2} if granularity == "block" else {}
    feeds = {"s": scale, "z": zeros} if zero else {"s": scale}
    for saturate in (1, 0) if dtype.startswith("float8") else (1,):
        node = helper.make_node(
            "QuantizeLinear", ["x", *names], ["y"], **where, saturate=saturate, **({} if zero else {"output_dtype": kind})
        )
        graph = helper.make_graph([node], "g", [info("x", other, sizes), *given], [info("y", kind, sizes)])
        check(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), {"x": x, **feeds})
    node = helper.make_node("DequantizeLinear", ["x", *names], ["y"], **where)
    graph = helper.make_graph([node], "g", [info("x", kind, sizes), *given], [info("y", other, sizes)])
    check(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), {"x": random(dtype, *sizes), **feeds})


def test_block_scales_of_powers_of_two(make_model):
    """Microscaling: float4 with a scale of type e8m0 for each 32."""
    w, scale = random("float4_e2m1fn", 64, 16), (2.0 ** np.arange(-16, 16).reshape(2, 16)).astype(ml_dtypes.float8_e8m0fnu)
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=0, block_size=32, output_dtype=TensorProto.FLOAT)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("w", TensorProto.FLOAT4E2M1, [64, 16]),
                      helper.make_tensor_value_info("s", TensorProto.FLOAT8E8M0, [2, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 16])],
    )  # fmt: skip
    if "tensor(float8e8m0)" not in onnx.defs.get_schema("DequantizeLinear", OPSET).inputs[1].types:
        pytest.skip("this version of onnx has no scales of that type")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    np.testing.assert_array_equal(run(model, {"w": w, "s": scale})[0], w.astype(np.float32) * scale.astype(np.float32).repeat(32, axis=0))


def test_a_network_with_weights_of_4_bits(make_model):
    """Weights by blocks, activations in float32; `verify` compares kernel by kernel."""
    rng = np.random.default_rng(0)
    constants = {"w": random("int4", 64, 48), "s": rng.uniform(0.01, 0.1, (2, 48)).astype(np.float32), "z": random("int4", 2, 48, seed=2)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wide"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "wide"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    model = make_model(nodes, {"x": ("float32", ["n", 64])}, {"y": "float32"}, constants=constants)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(run(model, {"x": x})[0], want, rtol=1e-4, atol=1e-4)
    assert verify(import_model(model), {"x": x}, CompileOptions(), full=True).ok


def test_refusals(make_model):
    """What the standard leaves out, or has no value for."""
    model = make_model([helper.make_node("Add", ["x", "x"], ["y"])], {"x": ("int4", [2])}, {"y": "int4"})
    with pytest.raises(TcompError, match="int4"):
        import_model(model)
    model = make_model([helper.make_node("Pad", ["x", "p"], ["y"])], {"x": (SCALE, [2])}, {"y": SCALE}, 25, {"p": np.array([1, 1])})
    model.ir_version = 13
    with pytest.raises(UnsupportedError, match="has no 0 to pad with"):
        import_model(model)
    inputs = {
        n: ("float8_e4m3fn" if n in "abz" else "float32", [2, 2] if n in "ab" else []) for n in ("a", "s", "z", "b", "t", "u", "r", "v")
    }
    inputs |= {"u": ("float8_e4m3fn", []), "v": ("float8_e4m3fn", [])}
    node = helper.make_node("QLinearMatMul", ["a", "s", "z", "b", "t", "u", "r", "v"], ["y"])
    with pytest.raises(TcompError, match="integers are wanted"):
        import_model(make_model([node], inputs, {"y": "float8_e4m3fn"}))


def test_casts_between_narrow_types(make_model):
    for dtype in DTYPES:
        x = random(dtype, 64)
        targets = [d for d in DTYPES if d != dtype]
        nodes = [helper.make_node("Cast", ["x"], [d], to=ELEM_TYPES[d], name=d) for d in targets]
        model = make_model(nodes, {"x": (dtype, [64])}, {d: d for d in targets}, opset=OPSET)
        model.ir_version = onnx.IR_VERSION
        for target, got in tcomp.compile(model).run({"x": x}).items():
            wide = x.astype(np.float64)
            if target in NARROW_INTEGERS:
                want = np.trunc(wide.clip(-(2.0**31), 2.0**31 - 1)).astype(np.int64).astype(to_numpy(target))
            elif target == SCALE:
                power = np.ceil(np.log2(wide, where=wide > 0, out=np.full(64, -127.0))).clip(-127, 127)
                want = np.where(wide < 0, np.nan, 2.0**power).astype(to_numpy(target))
            else:
                top = float(ml_dtypes.finfo(target).max)
                want = wide.clip(-top, top).astype(to_numpy(target))
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=f"{dtype} -> {target}")
    assert integer_range("int4") == (-8, 7) and integer_range("uint2") == (0, 3)


@pytest.mark.parametrize("dtype", MOVED)
def test_graphs_are_printed_and_read(make_model, dtype):
    """Small constants as numbers, large ones by their hash."""
    constants = {"small": random(dtype, 2, 3), "large": random(dtype, 100, 100), "n": np.array([3, 2])}
    nodes = [helper.make_node("Reshape", ["small", "n"], ["y"]), helper.make_node("Transpose", ["large"], ["t"])]
    nodes += [helper.make_node("Cast", ["x"], ["z"], to=ELEM_TYPES[dtype], round_mode="nearest", saturate=0)]
    model = make_model(nodes, {"x": ("float32", ["n"])}, {"y": dtype, "t": dtype, "z": dtype}, 25, constants)
    model.ir_version = 13
    graph = import_model(model)
    arrays = {content_hash(a): np.asarray(a) for a in graph.constants.values()}
    again = parse_graph(str(graph), {n.op.name: n.op for n in graph.nodes}, arrays)
    assert str(again) == str(graph)
    for old, new in zip(graph.constants.values(), again.constants.values(), strict=True):
        assert old.dtype == new.dtype and np.asarray(old).tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("middle", ["float32", "int32", "float64", "bool"])
def test_conversions_there_and_back(make_model, dtype, middle):
    """An infinity comes back as the largest finite value, a fraction as an integer: nothing cancels out but what is exact."""
    codes = np.arange(1 << NARROW[dtype], dtype=np.uint8).view(to_numpy(dtype))
    x = codes[np.isfinite(codes.astype(np.float64))] if middle == "int32" else codes
    there, back = helper.np_dtype_to_tensor_dtype(np.dtype(middle)), ELEM_TYPES[dtype]
    both = [helper.make_node("Cast", ["x"], ["m"], to=there), helper.make_node("Cast", ["m"], ["y"], to=back)]
    (whole,) = run(make_model(both, {"x": (dtype, x.shape)}, {"y": dtype}, OPSET), {"x": x})
    (first,) = run(make_model(both[:1], {"x": (dtype, x.shape)}, {"m": middle}, OPSET), {"x": x})
    (second,) = run(make_model(both[1:], {"m": (middle, x.shape)}, {"y": dtype}, OPSET), {"m": first})
    np.testing.assert_array_equal(whole.astype(np.float64), second.astype(np.float64))
    other = make_model([helper.make_node("Cast", ["y"], ["m"], to=there)], {"y": (dtype, x.shape)}, {"m": middle}, OPSET)
    through = make_model([both[1], *other.graph.node], {"m": (middle, x.shape)}, {"m2": middle}, OPSET)
    through.graph.node[1].output[0] = "m2"
    np.testing.assert_array_equal(run(through, {"m": first})[0], run(other, {"y": second})[0])


def chain(rng, make_model):
    """A random model of conversions, quantisations and movements, half of them of types of few bits; and its input."""
    kinds = [*DTYPES, "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"]
    dtype = str(rng.choice(MOVED))
    x = random(dtype, *rng.choice([1, 2, 3, 5, 17], rng.integers(1, 4)), seed=int(rng.integers(1 << 30)))
    nodes, constants, types, rank = [], {}, [dtype], x.ndim
    for n in range(rng.integers(2, 7)):
        source, target, name = types[-1], types[-1], "x" if n == 0 else f"v{n}"
        options = ["Cast", "Cast", *(["Transpose", "Pad"] if not source.startswith("float6") else [])]
        options += ["QuantizeLinear"] if source in ("float32", "float16", "bfloat16") else []
        options += ["DequantizeLinear"] if source in (*NARROW, "int8", "uint8") and source != SCALE else []
        match op := str(rng.choice(options)):
            case "Cast":
                target = str(rng.choice(kinds))
                rest, attrs = [], {"to": ELEM_TYPES[target], "saturate": int(rng.integers(2))}
                attrs |= {"round_mode": str(rng.choice(["up", "down", "nearest"]))} if target == SCALE else {}
            case "Transpose":
                rest, attrs = [], {"perm": rng.permutation(rank).tolist()}
            case "Pad":
                constants[f"c{n}"] = rng.integers(0, 3, 2 * rank)
                rest, attrs = [f"c{n}"], {"mode": "edge"}
            case _:
                wide = source if op == "QuantizeLinear" else str(rng.choice(["float32", "float16", "bfloat16"]))
                target = str(rng.choice([d for d in DTYPES if d != SCALE])) if op == "QuantizeLinear" else wide
                constants[f"c{n}"] = np.array(rng.choice([0.5, 3.0, 0.1])).astype(to_numpy(wide))
                rest, attrs = [f"c{n}"], {"output_dtype": ELEM_TYPES[target]}
        nodes.append(helper.make_node(op, [name, *rest], [f"v{n + 1}"], **attrs))
        types.append(target)
    sizes = [f"d{n}" if rng.integers(2) else size for n, size in enumerate(x.shape)]
    outputs = {f"v{n}": types[n] for n in {len(nodes), int(rng.integers(1, len(nodes) + 1))}}
    model = make_model(nodes, {"x": (dtype, sizes)}, outputs, OPSET, constants)
    model.ir_version = onnx.IR_VERSION
    return model, x


@pytest.mark.parametrize("seed", [*range(25), 425, 569])  # the last two found rules that were wrong
def test_random_chains(make_model, seed):
    """What is compiled gives what the graph means as it was imported: passes change nothing."""
    model, x = chain(np.random.default_rng(seed), make_model)
    wanted = evaluate_graph(import_model(model), {"x": x})
    for name, got in tcomp.compile(model).run({"x": x}).items():
        assert got.dtype == wanted[name].dtype
        np.testing.assert_array_equal(got.astype(np.float64), wanted[name].astype(np.float64))
