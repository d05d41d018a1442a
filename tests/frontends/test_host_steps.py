"""Strings and encoded images: the steps that the runtime performs in NumPy around the machine code."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper

import tcomp
from tcomp.errors import ArtifactError, ImportModelError, InputError, OutOfRangeError, StoppedError, UnsupportedError
from tcomp.frontends.onnx.importer import HOST, check_model
from tcomp.runtime import read_artifact, write_artifact
from tcomp.runtime.host_steps.prepared import PreparedStep
from tcomp.runtime.host_steps.regex import Pattern
from tcomp.runtime.host_steps.steps import Step, saved_array
from tcomp.runtime.manifest import parse_manifest

FLOAT, INT, TEXT, BYTES, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.UINT8, TensorProto.BOOL


def model(nodes, inputs, outputs, weights=None, opset=20):
    """A model of (operator, inputs, outputs, attributes) of the standard or, with a name like `ml.X`, of ai.onnx.ml."""
    made = []
    for op, ins, outs, *rest in nodes:
        domain = "ai.onnx.ml" if op.startswith("ml.") else ""
        made.append(helper.make_node(op.removeprefix("ml."), ins, outs, name=f"{outs[0]}_node", domain=domain, **(rest[0] if rest else {})))
    ends = [[helper.make_tensor_value_info(n, t, s) for n, (t, s) in e.items()] for e in (inputs, outputs)]
    constants = [w if isinstance(w, TensorProto) else numpy_helper.from_array(w, n) for n, w in (weights or {}).items()]
    graph = helper.make_graph(made, "g", ends[0], ends[1], constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def texts(*words):
    return np.array(words, object)


def labels_of(*words):
    return helper.make_tensor("labels", TEXT, [len(words)], [w.encode() for w in words])


VOCABULARY = {"keys_strings": ["cat", "dog", "bird"], "values_int64s": [0, 1, 2], "default_int64": 3}


def classifier():
    """Words -> numbers -> mean of embeddings -> label as a string, and scores."""
    table = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    nodes = [
        ("ml.LabelEncoder", ["words"], ["ids"], VOCABULARY),
        ("Gather", ["table", "ids"], ["rows"]),
        ("ReduceMean", ["rows", "axes"], ["scores"], {"keepdims": 0}),
        ("ArgMax", ["scores"], ["best"], {"axis": 1, "keepdims": 0}),
        ("Gather", ["labels", "best"], ["label"]),
    ]
    weights = {"table": table, "axes": np.array([1]), "labels": labels_of("no", "perhaps", "ja ✓")}
    outputs = {"label": (TEXT, ["n"]), "scores": (FLOAT, ["n", 3])}
    return model(nodes, {"words": (TEXT, ["n", "w"])}, outputs, weights), table


def test_strings_before_and_after_machine_code():
    proto, table = classifier()
    module = tcomp.compile(proto)
    assert [s.dtype for s in module.inputs] == ["string"] and module.inputs[0].shape == ("n", "w")
    words = [["cat", "dog", "fish"], ["bird", "bird", "bird"]]
    scores = table[[[0, 1, 3], [2, 2, 2]]].mean(1)
    for given_words in (words, np.array(words), np.array(words, object)):
        found = module.run({"words": given_words})
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-5)
        assert found["label"].dtype == object
        assert found["label"].tolist() == [["no", "perhaps", "ja ✓"][n] for n in scores.argmax(1)]
    out = np.empty((2, 3), np.float32)
    assert module.run({"words": words}, out={"scores": out})["scores"] is out
    names = [name for name, _ in module.profile({"words": words}, runs=2)]
    assert (
        names[0].startswith("host step ")
        and names[-1] == "host step label_node (Gather)"
        and len(names) == len(module.facts({"words": words}))
    )
    bound = module.bind({"words": np.array(words, object)})
    bound.inputs["words"][:] = "dog"
    np.testing.assert_allclose(bound.run()["scores"], table[[[1] * 3] * 2].mean(1), rtol=1e-5)
    assert module.trace({"words": words}) and not any("Constant" in name for name in names)


def test_records_of_host_steps():
    proto, _ = classifier()
    assert [(r.op_type, r.status == HOST) for r in check_model(proto)] == [
        ("LabelEncoder", True), ("Gather", False), ("ReduceMean", False), ("ArgMax", False), ("Gather", True)
    ]  # fmt: skip


def test_saved_models_keep_their_steps(tmp_path):
    proto, _ = classifier()
    module = tcomp.compile(proto, shapes={"words": [2, 3]})
    module.save(tmp_path / "m.tcomp")
    again = tcomp.load(tmp_path / "m.tcomp")
    assert again.inputs[0].shape == (2, 3)
    words = [["cat", "dog", "fish"], ["bird", "bird", "bird"]]
    assert again.run({"words": words})["label"].tolist() == module.run({"words": words})["label"].tolist()
    with pytest.raises(InputError, match="wrong shape"):
        again.run({"words": [["cat"]]})


def test_what_is_no_array_of_strings():
    module = tcomp.compile(classifier()[0])
    for wrong in (np.zeros((2, 2), np.float32), [[1, 2]], np.array([[b"x"]]), [["a"], ["b", "c"]], texts("a")):
        with pytest.raises(InputError, match="words"):
            module.run({"words": wrong})
    with pytest.raises(InputError, match="label"):
        module.run({"words": [["a"]]}, out={"label": np.empty(1, object)})
    with pytest.raises(StoppedError):
        module.run({"words": np.full((300, 3), "cat")}, timeout=1e-9)


def test_an_unknown_word_may_be_out_of_range():
    nodes = [("ml.LabelEncoder", ["x"], ["ids"], VOCABULARY), ("Cast", ["ids"], ["y"], {"to": FLOAT}), ("Gather", ["names", "ids"], ["z"])]
    names = helper.make_tensor("names", TEXT, [2], [b"a", b"b"])
    module = tcomp.compile(model(nodes, {"x": (TEXT, ["n"])}, {"y": (FLOAT, ["n"]), "z": (TEXT, ["n"])}, {"names": names}))
    assert module.run({"x": ["dog"]})["z"].tolist() == ["b"]
    with pytest.raises(OutOfRangeError, match="z_node"):
        module.run({"x": ["fish"]})


def test_a_linear_classifier_with_names():
    coefficients = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    attributes = {"coefficients": coefficients.ravel().tolist(), "intercepts": [0.1, 0.2, 0.3], "classlabels_strings": ["a", "b", "c"]}
    nodes = [
        ("ml.LinearClassifier", ["x"], ["label", "scores"], attributes),
        ("ml.ZipMap", ["scores"], ["map"], {"classlabels_strings": ["a", "b", "c"]}),
    ]
    proto = model(nodes, {"x": (FLOAT, ["n", 4])}, {"label": (TEXT, ["n"]), "map": (FLOAT, ["n", 3])})
    x = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    found = tcomp.compile(proto).run({"x": x})
    scores = x @ coefficients.T + np.float32([0.1, 0.2, 0.3])
    np.testing.assert_allclose(found["map"], scores, rtol=1e-4, atol=1e-5)
    assert found["label"].tolist() == [list("abc")[n] for n in scores.argmax(1)]


def test_text_to_counts_and_categories():
    attributes = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": 1,
        "max_skip_count": 0,
        "ngram_counts": [0],
        "ngram_indexes": [0, 1, 2],
    }
    nodes = [
        ("StringNormalizer", ["words"], ["lower"], {"case_change_action": "LOWER", "stopwords": ["the"]}),
        ("TfIdfVectorizer", ["lower"], ["counts"], {**attributes, "pool_strings": ["cat", "dog", "sat"]}),
        ("ml.OneHotEncoder", ["kind"], ["hot"], {"cats_strings": ["u", "v"], "zeros": 1}),
    ]
    module = tcomp.compile(
        model(nodes, {"words": (TEXT, ["w"]), "kind": (TEXT, ["k"])}, {"counts": (FLOAT, [3]), "hot": (FLOAT, ["k", 2])})
    )
    found = module.run({"words": ["The", "Cat", "and", "a", "CAT", "sat"], "kind": ["v", "w", "u"]})
    assert found["counts"].tolist() == [2, 0, 1] and found["hot"].tolist() == [[0, 1], [0, 0], [1, 0]]


def test_numbers_that_strings_need_are_computed_before():
    nodes = [
        ("Shape", ["x"], ["shape"]),
        ("Concat", ["shape", "one"], ["wanted"], {"axis": 0}),  # numbers alone, that the strings need to be numbers
        ("Reshape", ["names", "wanted"], ["column"]),
        ("ml.LabelEncoder", ["column"], ["ids"], {"keys_strings": ["a", "b"], "values_floats": [1.5, 2.5], "default_float": -1.0}),
        ("Mul", ["ids", "ids"], ["y"]),
    ]
    weights = {"one": np.array([1])}
    module = tcomp.compile(model(nodes, {"x": (FLOAT, ["n"]), "names": (TEXT, ["n"])}, {"y": (FLOAT, ["n", 1])}, weights))
    assert module.run({"x": np.zeros(3, np.float32), "names": ["b", "a", "?"]})["y"].tolist() == [[6.25], [2.25], [1.0]]


def test_strings_between_numbers_are_refused():
    nodes = [
        ("Exp", ["x"], ["e"]), ("Cast", ["e"], ["text"], {"to": TEXT}), ("Cast", ["text"], ["back"], {"to": FLOAT}), ("Exp", ["back"], ["y"])
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match="numbers, then with strings, then with numbers"):
        tcomp.compile(model(nodes, {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}))
    with pytest.raises(UnsupportedError, match="Unique"):
        tcomp.compile(model([("Unique", ["x"], ["y"])], {"x": (TEXT, [2])}, {"y": (TEXT, ["n"])}))


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([("Slice", ["x", "two", "far"], ["y"])], ["c", "d"]),
        ([("Slice", ["x", "minus", "least", "zero", "minus"], ["y"])], ["d", "c", "b", "a"]),
        ([("Split", ["x"], ["y", "z"], {"num_outputs": 2})], ["a", "b"]),
        ([("Reshape", ["x", "pair"], ["m"]), ("Transpose", ["m"], ["t"]), ("Flatten", ["t"], ["y"], {"axis": 0})], [["a", "c", "b", "d"]]),
        ([("Unsqueeze", ["x", "zero"], ["u"]), ("Tile", ["u", "pair"], ["t"]), ("Squeeze", ["u"], ["y"])], ["a", "b", "c", "d"]),
        ([("Equal", ["x", "x"], ["e"]), ("Compress", ["x", "e"], ["y"])], ["a", "b", "c", "d"]),
        ([("Concat", ["x", "x"], ["c"], {"axis": 0}), ("GatherElements", ["c", "pair"], ["y"])], ["c", "c"]),
        ([("StringConcat", ["x", "x"], ["d"]), ("Equal", ["d", "x"], ["e"]), ("Where", ["e", "d", "x"], ["y"])], ["a", "b", "c", "d"]),
        ([("Unsqueeze", ["x", "one"], ["u"]), ("Expand", ["u", "pair"], ["y"])], None),
    ],
)
def test_movement(nodes, expected):
    weights = {"zero": [0], "one": [1], "two": [2], "minus": [-1], "least": [-(1 << 62)], "far": [1 << 62], "pair": [2, 2]}
    proto = model(nodes, {"x": (TEXT, [4])}, {"y": (TEXT, None)}, {n: np.array(v, np.int64) for n, v in weights.items()})
    if expected is None:
        with pytest.raises(InputError, match="y_node"):
            tcomp.compile(proto).run({"x": list("abcd")})
    else:
        assert tcomp.compile(proto).run({"x": list("abcd")})["y"].tolist() == expected


def test_casts():
    nodes = [("Cast", ["x"], ["text"], {"to": TEXT}), ("Cast", ["words"], ["y"], {"to": FLOAT}), ("Cast", ["digits"], ["n"], {"to": INT})]
    inputs = {"x": (FLOAT, [5]), "words": (TEXT, ["w"]), "digits": (TEXT, ["d"])}
    module = tcomp.compile(model(nodes, inputs, {"text": (TEXT, [5]), "y": (FLOAT, ["w"]), "n": (INT, ["d"])}))
    x = np.float32([1.5, np.nan, np.inf, -np.inf, 0.1])
    found = module.run({"x": x, "words": ["1e3", "-INF", "nan", " 2.5 "], "digits": ["-7"]})
    assert found["text"].tolist() == ["1.5", "NaN", "INF", "-INF", "0.1"] and found["n"].tolist() == [-7]
    np.testing.assert_array_equal(found["y"], np.float32([1000, -np.inf, np.nan, 2.5]))
    for word in ("x", "1_0", ""):
        with pytest.raises(InputError, match="not a number"):
            module.run({"x": x, "words": [word], "digits": ["1"]})


def image_model(pixel_format="RGB"):
    nodes = [
        ("ImageDecoder", ["file"], ["pixels"], {"pixel_format": pixel_format}),
        ("Cast", ["pixels"], ["real"], {"to": FLOAT}), ("ReduceMean", ["real", "axes"], ["y"], {"keepdims": 0})
    ]  # fmt: skip
    outputs = {"y": (FLOAT, ["c"]), "pixels": (BYTES, ["h", "w", "c"])}
    return model(nodes, {"file": (BYTES, ["bytes"])}, outputs, {"axes": np.array([0, 1])})


def test_images():
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra `image`")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    encoded = np.frombuffer(file.getvalue(), np.uint8)
    for pixel_format, expected in (("RGB", pixels), ("BGR", pixels[:, :, ::-1])):
        found = tcomp.compile(image_model(pixel_format)).run({"file": encoded})
        np.testing.assert_array_equal(found["pixels"], expected)
        np.testing.assert_allclose(found["y"], expected.astype(np.float32).mean((0, 1)), rtol=1e-5)
    for damaged in (encoded[:40], np.zeros(100, np.uint8), np.frombuffer(b"GIF89a" + bytes(50), np.uint8)):
        with pytest.raises(InputError, match="cannot be decoded"):
            tcomp.compile(image_model()).run({"file": damaged})


# ---------------------------------------------------------------- regular expressions

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", "^", r"\b", "[a-c]", r"\.", "1", r"\B", "(?i:B)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}?", "{2,}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, st.text("abcB1. _\n", min_size=1, max_size=7))
def test_patterns_match_as_in_python(pattern, text):
    assert Pattern(pattern).full_match(text) == (re.compile(pattern, re.ASCII).fullmatch(text) is not None)


def test_what_only_re2_has():
    assert Pattern(r"[[:alpha:]_]+[]x-]\x41\x{1F600}\pL\Qa.b\E$\z").full_match("ab]A\U0001f600éa.b")
    assert not Pattern(r"\p{Lu}[[:^digit:]]\P{L}").full_match("a1a") and Pattern(r"(?m)a$\nb").full_match("a\nb")
    assert not Pattern("a$").full_match("a\n") and Pattern(r"(?P<name>x)(?s).").full_match("x\n")


def test_no_pattern_takes_long():
    for pattern, length in ((r"(a|a)*b", 20_000), (r"(a*)*(a*)*c", 20_000), (r"((a?){30}){30}b", 200)):
        assert not Pattern(pattern).full_match("a" * length)


@pytest.mark.parametrize(
    "pattern", ["(?=a)", r"\1", "(", "a**", "[z-a]", "[", "a)", "x{2000}", "((x{100}){100}){100}", r"\p{Greek}", "*", "(" * 300]
)
def test_patterns_that_are_refused(pattern):
    with pytest.raises(InputError, match="cannot be used"):
        Pattern(pattern)
    with pytest.raises(ImportModelError, match="cannot be used"):
        tcomp.compile(model([("RegexFullMatch", ["x"], ["y"], {"pattern": pattern})], {"x": (TEXT, [1])}, {"y": (BOOL, [1])}))


# ---------------------------------------------------------------- untrusted artifacts


def forged(change):
    """The manifest of a model with host steps, changed."""
    artifact = tcomp.compile(classifier()[0]).artifact
    manifest = json.loads(bytes(artifact.image[192 : 192 + len(artifact._manifest)]))
    change(manifest["host"])
    weights = [(w.name, artifact.weight(w.name)) for w in artifact.manifest.weights]
    file = io.BytesIO()
    return manifest, artifact, weights, file


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: h["before"][0].update(operator="os.system"), "unknown operator"),
        (lambda h: h["before"][-1]["attributes"].pop("keys"), "an object"),
        (lambda h: h["before"][-1]["attributes"]["keys"].update(shape=[1 << 40]), "malformed"),
        (lambda h: h["before"][-1]["attributes"]["values"].update(data="!"), "malformed"),
        (lambda h: h["before"][-1]["attributes"]["values"].update(dtype="object"), "malformed"),
        (lambda h: h["before"][-1].update(inputs=["nobody"]), "which is not there"),
        (lambda h: h["before"][-1].update(outputs=["words"]), "are called"),
        (lambda h: h["before"][-1].update(outputs=["ids", "more"]), "outputs"),
        (lambda h: h["before"].pop(), "machine code"),
        (lambda h: h["after"].pop(), "no host step makes the output"),
        (lambda h: h["inputs"][0].update(dtype="pointer"), "element type"),
        (lambda h: h.update(before=7), "an array"),
    ],
)
def test_malformed_steps_are_refused(change, message, tmp_path):
    manifest, artifact, weights, _ = forged(change)
    path = tmp_path / "m.tcomp"
    with pytest.raises(ArtifactError, match=message):
        write_artifact(path, artifact.code, weights, manifest)
        tcomp.load(read_artifact(path))


def test_manifests_without_steps_are_read():
    manifest, *_ = forged(lambda h: None)
    del manifest["host"]
    data = json.dumps(manifest).encode()
    assert parse_manifest(data).host is None


@pytest.mark.parametrize(
    "operator, attributes, arrays",
    [
        ("Expand", {}, [texts("a"), np.array([1 << 40])]),
        ("Tile", {}, [texts("a"), np.array([1 << 40])]),
        ("Gather", {"axis": 0}, [np.full((1, 1 << 20), "a", object), np.zeros(1 << 12, np.int64)]),
        ("StringConcat", {}, [np.full(1 << 9, "a" * (1 << 19), object), texts("b")]),
        ("Reshape", {"allow_zero": False}, [texts("a"), np.array([0, 0, 0, 3])]),
        ("Transpose", {"perm": [3, 4]}, [texts("a")]),
        ("Concat", {"axis": 7}, [texts("a"), texts("b")]),
        ("Squeeze", {}, [texts("a", "b"), np.array([0])]),
        ("Where", {}, [np.array([True]), texts("a", "b", "c"), texts("a", "b")]),
    ],
)
def test_steps_are_bounded(operator, attributes, arrays):
    names = tuple(f"x{n}" for n in range(len(arrays)))
    step = PreparedStep(Step(operator, "s", names, ("y",), attributes), ("s",))
    with pytest.raises(InputError):
        step.perform(dict(zip(names, arrays, strict=True)))


def test_numbers_survive_json():
    for array in (np.array([np.nan, -0.0, np.inf]), np.array([[True], [False]]), np.arange(3, dtype=np.uint16), texts("ä", "")):
        step = PreparedStep(Step("Constant", "c", (), ("c",), {"value": json.loads(json.dumps(saved_array(array)))}), ("c",))
        values: dict = {}
        step.perform(values)
        assert values["c"].dtype == array.dtype
        np.testing.assert_array_equal(values["c"], array)


def test_graphs_carry_their_steps():
    from tcomp.frontends.onnx import import_model

    graph = import_model(classifier()[0])
    assert graph.host is not None and [s.operator for s in graph.host.after] == ["Gather"]
    assert dataclasses.replace(graph, name="other").host is graph.host


def test_a_constant_of_strings_may_be_the_result():
    constants = [("Constant", [], ["y"], {"value_string": "text"}), ("Constant", [], ["z"], {"value_strings": ["a", "b"]})]
    found = tcomp.compile(model(constants, {}, {"y": (TEXT, []), "z": (TEXT, [2])})).run({})
    assert found["y"].tolist() == "text" and found["z"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 1 << 40), "opset 1099511627776"),
        (lambda m: m.graph.ClearField("input"), "`words` is used but defined nowhere"),
        (lambda m: m.graph.node[0].input.append("words"), "2 inputs"),
        (lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "a"), "give no value"),
    ],
)
def test_damaged_models_are_refused(change, what):
    proto, _ = classifier()
    change(proto)
    with pytest.raises(ImportModelError, match=what):
        tcomp.compile(proto)


def test_vectors_of_any_length_are_not_followed():
    """onnx's inference would write their elements down."""
    proto = model(
        [("ml.LabelEncoder", ["x"], ["y"], {"keys_int64s": [1], "values_strings": ["a"]})], {"x": (INT, [1 << 36])}, {"y": (TEXT, ["n"])}
    )
    assert [r.status for r in check_model(proto)] == [HOST]
    double = [("Concat", [f"x{n}"] * 2, [f"x{n + 1}"], {"axis": 0}) for n in range(32)]
    proto = model([*double, ("Cast", ["x32"], ["y"], {"to": TEXT})], {"x0": (INT, [1])}, {"y": (TEXT, ["n"])})
    assert {r.status for r in check_model(proto)} <= {HOST, "supported"}
