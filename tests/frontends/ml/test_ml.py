"""Operators of `ai.onnx.ml`: hand-made models against ONNX Runtime or NumPy, and converted estimators against scikit-learn."""

import importlib.util
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tcomp
from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir.interpreters.graph import evaluate_graph

F, D, I = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
RNG = np.random.default_rng(6)
X = RNG.standard_normal((23, 5)).astype(np.float32)
HOLES = np.where(RNG.random(X.shape) < 0.2, np.nan, np.round(X * 2) / 2).astype(np.float32)
HOLES[0], HOLES[1] = np.inf, -np.inf
WHOLE = RNG.integers(-3, 4, (6, 4))
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")


def model(op, inputs, outputs, version=3, **attrs):
    """A model of one node."""
    infos = [
        helper.make_tensor_value_info(f"x{n}", helper.np_dtype_to_tensor_dtype(a.dtype), ["n", *a.shape[1:]] if a.ndim > 1 else a.shape)
        for n, a in enumerate(inputs)
    ]
    results = [helper.make_tensor_value_info(f"y{n}", kind, None) for n, kind in enumerate(outputs)]
    node = helper.make_node(op, [i.name for i in infos], [r.name for r in results], domain="ai.onnx.ml", **attrs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)]
    return helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=opsets, ir_version=10)


def interpreted(op, inputs, outputs, version=3, **attrs):
    """What the interpreter computes for one node."""
    graph = import_model(model(op, inputs, outputs, version, **attrs))
    results = evaluate_graph(graph, {f"x{n}": a for n, a in enumerate(inputs)})
    return [results[f"y{n}"] for n in range(len(outputs))]


def check(op, inputs, outputs, version=3, native=False, **attrs):
    """ONNX Runtime, the interpreter, and where asked for native code agree."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    made, fed = model(op, inputs, outputs, version, **attrs), {f"x{n}": a for n, a in enumerate(inputs)}
    expected = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, fed)
    got = [interpreted(op, inputs, outputs, version, **attrs)]
    if native:
        got.append(list(tcomp.compile(made).run(fed).values()))
    for results in got:
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == wanted.dtype
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- features, encoders, linear models


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_normalizer(norm):
    rows = np.where(np.arange(23)[:, None] == 3, 0, X)
    check("Normalizer", [rows.astype(np.float32)], [F], norm=norm)
    check("Normalizer", [X[0]], [F], norm=norm)


def test_features():
    check("Scaler", [X], [F], offset=[1.0, 2, 3, 4, 5], scale=[2.0, 1, 1, 1, 0.5])
    check("Binarizer", [X], [F], threshold=0.3)
    check("Imputer", [HOLES], [F], imputed_value_floats=[1.0, 2, 3, 4, 5], replaced_value_float=float("nan"))
    check("Imputer", [WHOLE], [I], imputed_value_int64s=[9], replaced_value_int64=2)
    check("ArrayFeatureExtractor", [X, np.array([2, 0])], [F])
    check("ArrayFeatureExtractor", [X[0], np.array([[2, 0]])], [F])
    check("FeatureVectorizer", [X, X], [F], inputdimensions=[2, 7])
    np.testing.assert_array_equal(interpreted("Binarizer", [WHOLE], [I], threshold=0.5)[0], WHOLE > 0)


def test_encoders():
    check("OneHotEncoder", [WHOLE], [F], cats_int64s=[-1, 0, 2])
    check("OneHotEncoder", [WHOLE + np.float32(0.3)], [F], cats_int64s=[-1, 0, 2])
    check("LabelEncoder", [WHOLE], [F], keys_int64s=[2, -1, 0], values_floats=[0.5, 1.5, 2.5], default_float=7.0)
    tensors = {"keys_tensor": [2, 3], "values_tensor": [20, 30], "default_tensor": [-7]}
    check("LabelEncoder", [WHOLE], [I], 4, True, **{n: onnx.numpy_helper.from_array(np.array(a)) for n, a in tensors.items()})
    keys = [float("nan"), float(HOLES[2, 0]), 0.5]  # bits are compared, so that NaN is a key as well
    (got,) = interpreted("LabelEncoder", [HOLES], [I], keys_floats=keys, values_int64s=[5, 6, 7], default_int64=-1)
    wanted = np.where(np.isnan(HOLES), 5, np.where(HOLES == keys[1], 6, np.where(HOLES == 0.5, 7, -1)))
    np.testing.assert_array_equal(got, wanted)


def test_category_that_is_required():
    module = tcomp.compile(model("OneHotEncoder", [WHOLE], [F], cats_int64s=[-3, -2, -1, 0, 1, 2, 3], zeros=0))
    np.testing.assert_array_equal(module.run({"x0": WHOLE})["y0"], WHOLE[..., None] == np.arange(-3, 4))
    with pytest.raises(tcomp.TcompError, match="OneHotEncoder|out of"):
        module.run({"x0": WHOLE + 7})


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_models(transform):
    c = RNG.standard_normal(15).tolist()
    check("LinearRegressor", [X], [F], coefficients=c[:10], intercepts=[0.5, 0.4], targets=2, post_transform=transform)
    for classes, rows in ((3, 3), (2, 2), (2, 1)):
        labels = [4, 5, 6][:classes]
        attrs = {"coefficients": c[: 5 * rows], "intercepts": [0.5, 0.4, 0.3][:rows], "post_transform": transform}
        check("LinearClassifier", [X], [I, F], classlabels_ints=labels, **attrs)


# ---------------------------------------------------------------- support vectors


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_support_vectors(kernel, classes):
    counts, pairs = [3, 2, 4, 1][:classes], classes * (classes - 1) // 2
    total, kernel_attrs = sum(counts), {"kernel_type": kernel, "kernel_params": [0.3, 0.7, 3.0]}

    def draw(*shape):
        return RNG.standard_normal(shape).ravel().tolist()

    vectors = {"support_vectors": draw(total, 5), "coefficients": draw(classes - 1, total), "rho": draw(pairs), **kernel_attrs}
    for transform in TRANSFORMS[:3]:
        attrs = {"vectors_per_class": counts, "classlabels_ints": [5, 6, 7, 8][:classes], "post_transform": transform, **vectors}
        check("SVMClassifier", [X], [I, F], **attrs)
        check("SVMClassifier", [X], [I, F], 1, transform == "NONE", prob_a=draw(pairs), prob_b=draw(pairs), **attrs)
    for one in (0, 1):
        attrs = {**vectors, "coefficients": draw(total), "rho": [0.2], "n_supports": total, "one_class": one}
        check("SVMRegressor", [X], [F], **attrs)


# ---------------------------------------------------------------- trees


def forest(trees, depth, kind="target", ids=(0,), modes=("LEQ",), missing=False, positive=False, every=False):
    """Attributes of random trees whose leaves have a weight for one of the targets `ids`, or `every` one."""
    nodes = ("treeids", "nodeids", "modes", "featureids", "values", "truenodeids", "falsenodeids", "missing_value_tracks_true")
    attrs = {f"nodes_{n}": [] for n in nodes}
    weights = {f"{kind}_{n}": [] for n in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        rows, own = [], ids[tree % len(ids)]  # ONNX Runtime never answers a class that no tree is for

        def build(depth, rows=rows, own=own, tree=tree):
            at = len(rows)
            rows.append(None)
            if depth == 0 or RNG.random() < 0.15:
                rows[at] = ("LEAF", 0, 0.0, 0, 0, 0)
                for target in ids if every else (own,):
                    weight = RNG.standard_normal()
                    for name, value in zip(
                        weights.values(), (tree, at, int(target), abs(weight) / trees if positive else weight), strict=True
                    ):
                        name.append(value)
            else:
                value = float(RNG.choice([-1, -0.5, 0, 0.5, 1, np.inf, -np.inf] if missing else RNG.standard_normal(3)))
                test = f"BRANCH_{RNG.choice(modes)}", int(RNG.integers(5)), value
                rows[at] = (*test, build(depth - 1), build(depth - 1), int(missing and RNG.random() < 0.5))
            return at

        build(depth)
        for at, row in enumerate(rows):
            for column, value in zip(attrs.values(), (tree, at, *row), strict=True):
                column.append(value)
    if not missing:
        del attrs["nodes_missing_value_tracks_true"]
    return {**attrs, **weights}


@pytest.mark.parametrize("modes", [("LEQ",), ("LT",), ("GTE",), ("GT",), ("EQ",), ("NEQ",), ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")])
@pytest.mark.parametrize("missing", [False, True])
def test_modes_of_nodes(modes, missing):
    check(
        "TreeEnsembleRegressor",
        [HOLES],
        [F],
        native=len(modes) > 1 or modes == ("GTE",),
        n_targets=1,
        **forest(7, 4, modes=modes, missing=missing),
    )


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("ids", "every"), [((0,), False), ((0, 1, 2), True), ((0, 1), False)])
def test_aggregates(aggregate, ids, every):
    attrs = forest(12, 4, ids=ids, every=every)
    check(
        "TreeEnsembleRegressor",
        [X],
        [F],
        native=True,
        n_targets=len(ids),
        aggregate_function=aggregate,
        base_values=[0.5] * len(ids),
        **attrs,
    )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("ids", "every"), [((0,), False), ((0, 1, 2), False), ((0, 1, 2), True)])
def test_tree_classifiers(transform, ids, every):
    for positive in (False, True):
        if ids == (0,) and positive and transform == "LOGISTIC":
            continue  # ONNX Runtime leaves the transform out
        attrs = forest(9, 4, "class", ids, every=every, positive=positive)
        labels = [7, 8, 9] if len(ids) == 3 else [7, 8]
        check("TreeEnsembleClassifier", [X], [I, F], classlabels_int64s=labels, post_transform=transform, **attrs)


def test_types_of_inputs_and_thresholds():
    attrs = forest(9, 4)
    check("TreeEnsembleRegressor", [X.astype(np.float64)], [F], n_targets=1, **attrs)
    whole = RNG.integers(-2, 3, X.shape)
    expected = interpreted("TreeEnsembleRegressor", [whole.astype(np.float32)], [F], n_targets=1, **attrs)
    np.testing.assert_array_equal(interpreted("TreeEnsembleRegressor", [whole], [F], n_targets=1, **attrs)[0], expected[0])
    check("TreeEnsembleRegressor", [X], [F], n_targets=1, **forest(3, 0))
    for name in ("nodes_values", "target_weights"):
        attrs[f"{name}_as_tensor"] = onnx.numpy_helper.from_array(np.array(attrs.pop(name)))
    check("TreeEnsembleRegressor", [X.astype(np.float64)], [F], native=True, n_targets=1, **attrs)


def chain(depth):
    """A tree that is a chain: node 2 k goes to leaf 2 k + 1, or on to node 2 k + 2."""
    count, inner = 2 * depth + 1, range(0, 2 * depth, 2)
    test = [n in inner for n in range(count)]
    return {
        "nodes_treeids": [0] * count, "nodes_nodeids": list(range(count)), "nodes_featureids": [0] * count,
        "nodes_modes": ["BRANCH_LEQ" if t else "LEAF" for t in test], "nodes_values": [float(n) for n in range(count)],
        "nodes_truenodeids": [n + 1 if t else 0 for n, t in enumerate(test)],
        "nodes_falsenodeids": [n + 2 if t else 0 for n, t in enumerate(test)],
        "target_treeids": [0] * (depth + 1), "target_nodeids": [n for n in range(count) if not test[n]], "target_ids": [0] * (depth + 1),
        "target_weights": [float(n) for n in range(count) if not test[n]],
    }  # fmt: skip


@pytest.mark.parametrize("depth", [1, 31, 90])
def test_deep_trees(depth):
    x = np.repeat(np.linspace(-3, 2 * depth + 3, 40, dtype=np.float32)[:, None], 5, axis=1)
    check("TreeEnsembleRegressor", [x], [F], native=True, n_targets=1, **chain(depth))


def test_nodes_that_form_no_trees():
    attrs = chain(3)
    attrs["nodes_falsenodeids"][4] = 0
    with pytest.raises(ImportModelError, match="cycle"):
        import_model(model("TreeEnsembleRegressor", [X], [F], n_targets=1, **attrs))
    attrs["nodes_falsenodeids"][4] = 77
    with pytest.raises(ImportModelError, match="does not exist"):
        import_model(model("TreeEnsembleRegressor", [X], [F], n_targets=1, **attrs))
    with pytest.raises(ImportModelError, match="features"):
        import_model(model("TreeEnsembleRegressor", [X[:, :2]], [F], n_targets=1, **{**chain(3), "nodes_featureids": [2] * 7}))


def ensemble(dtype=np.float32, **changes):
    """Attributes of a TreeEnsemble: x0 in {1, 3, 4} ? (x1 < 0 ? 10 : 20) : 30, and x1 >= 0 ? 1 : 2 for target 1."""
    arrays = {"nodes_modes": np.array([6, 1, 2], np.uint8), "nodes_splits": np.array([0, 0, 0], dtype),
              "leaf_weights": np.array([10, 20, 30, 1, 2], dtype), "membership_values": np.array([1, 3, 4, np.nan], dtype)}  # fmt: skip
    attrs = {"nodes_featureids": [0, 1, 1], "nodes_truenodeids": [1, 0, 3], "nodes_trueleafs": [0, 1, 1], "nodes_falsenodeids": [2, 1, 4],
             "nodes_falseleafs": [1, 1, 1], "leaf_targetids": [0, 0, 0, 1, 1], "tree_roots": [0, 2], "n_targets": 2}  # fmt: skip
    return {**{n: onnx.numpy_helper.from_array(a) for n, a in arrays.items()}, **attrs, **changes}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_set_membership(dtype):
    x = np.array([[a, b] for a in (0, 1, 2, 3, 4, 5, np.nan) for b in (-1, 0, 1, np.nan)], dtype)
    made = model("TreeEnsemble", [x], [helper.np_dtype_to_tensor_dtype(x.dtype)], 5, **ensemble(dtype))
    first = np.where(np.isin(x[:, 0], (1, 3, 4)), np.where(x[:, 1] < 0, 10, 20), 30)
    expected = np.stack([first, np.where(x[:, 1] >= 0, 1, 2)], -1).astype(dtype)
    np.testing.assert_array_equal(tcomp.compile(made).run({"x0": x})["y0"], expected)
    np.testing.assert_array_equal(
        interpreted("TreeEnsemble", [x], [made.graph.output[0].type.tensor_type.elem_type], 5, **ensemble(dtype))[0], expected
    )


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 300])
def test_any_number_of_rows(rows):
    x = np.resize(X, (rows, 5))
    check("TreeEnsembleRegressor", [x], [F], native=True, n_targets=1, **forest(40, 6))


# ---------------------------------------------------------------- strings and maps


def with_names(op, names, numbers, attrs):
    """The labels that a classifier gives with names for its classes, and those with numbers."""
    outputs = [[TensorProto.STRING, F], [I, F]]
    made = [
        model(op, [X], kinds, **attrs, **labels) for kinds, labels in zip(outputs, ({"classlabels_strings": names}, numbers), strict=True)
    ]
    return [tcomp.compile(m).run({"x0": X})["y0"] for m in made]


def test_classes_with_names():
    linear = {"coefficients": RNG.standard_normal(15).tolist(), "intercepts": [0.1, 0.2, 0.3]}
    names, numbers = with_names("LinearClassifier", ["a", "b", "c"], {"classlabels_ints": [0, 1, 2]}, linear)
    assert names.tolist() == [list("abc")[n] for n in numbers] and len({*names}) > 1
    names, numbers = with_names("TreeEnsembleClassifier", ["no", "yes"], {"classlabels_int64s": [0, 1]}, forest(9, 4, "class", (0,)))
    assert names.tolist() == [("no", "yes")[n] for n in numbers] and len({*names}) > 1
    with pytest.raises(UnsupportedError, match="one label"):
        import_model(
            model("LinearClassifier", [X], [TensorProto.STRING, F], coefficients=[1.0] * 5, intercepts=[0.0], classlabels_strings=["a"])
        )


def test_maps_are_columns():
    attrs = {"classlabels_ints": [3, 4], "coefficients": [0.5] * 10, "intercepts": [0.1, 0.2], "post_transform": "SOFTMAX"}
    made = model("LinearClassifier", [X], [I, F], **attrs)
    expected = evaluate_graph(import_model(made), {"x0": X})["y1"]
    made.graph.node.append(helper.make_node("ZipMap", ["y1"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[3, 4]))
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(I, helper.make_tensor_type_proto(F, None)))
    made.graph.output[1].CopyFrom(helper.make_value_info("maps", kind))
    np.testing.assert_array_equal(evaluate_graph(import_model(made), {"x0": X})["maps"], expected)


# ---------------------------------------------------------------- converted models

CONVERTED = [
    "AdaBoostClassifier", "BaggingRegressor", "BernoulliNB", "CalibratedClassifierCV", "DecisionTreeClassifier", "ElasticNet",
    "ExtraTreesRegressor", "GaussianMixture", "GaussianNB", "GradientBoostingClassifier", "IsolationForest",
    "KMeans", "LinearSVC", "LogisticRegression", "MLPClassifier", "MinMaxScaler", "NuSVC", "OneClassSVM", "OneVsOneClassifier", "PCA", "Pipeline",
    "RandomForestClassifier", "RandomForestRegressor", "SVC", "SVR", "SimpleImputer", "StackingClassifier", "VotingRegressor",
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("skl2onnx") is None, reason="skl2onnx is not installed")
@pytest.mark.parametrize("name", CONVERTED)
def test_estimators(name):
    from tests.frontends.ml.estimators import compare

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(name, 3, native=False)
        if "Classif" in name or name in ("SVC", "NuSVC"):
            compare(name, 2, native=False)


@pytest.mark.skipif(importlib.util.find_spec("onnxmltools") is None, reason="onnxmltools is not installed")
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_boosted_trees(library, classes):
    package = pytest.importorskip(library, reason=f"{library} is not installed")
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    x = RNG.standard_normal((200, 6)).astype(np.float32)
    x[RNG.random(x.shape) < 0.05] = np.nan
    score = np.nansum(x, axis=1)
    y = score if not classes else np.digitize(score, [0.0] if classes == 2 else [-1.0, 1.0])
    kinds = {"xgboost": ("XGBRegressor", "XGBClassifier"), "lightgbm": ("LGBMRegressor", "LGBMClassifier")}[library]
    fitted = getattr(package, kinds[bool(classes)])(n_estimators=9, max_depth=4, n_jobs=1).fit(x, y)
    convert = getattr(onnxmltools, f"convert_{library}")
    options = {} if library == "xgboost" or not classes else {"zipmap": False}
    made = convert(fitted, initial_types=[("x", FloatTensorType([None, 6]))], target_opset=15, **options)
    got = list(tcomp.compile(made).run({"x": x}).values())
    if classes:
        assert (got[0].ravel() == fitted.predict(x)).mean() > 0.99
        np.testing.assert_allclose(got[1], fitted.predict_proba(x), rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_allclose(got[0].ravel(), fitted.predict(x), rtol=1e-4, atol=1e-4)


def test_many_trees_and_a_free_number_of_rows():
    """Lanes run along the trees of a row, whose features stay in registers, with links and thresholds in one table."""
    made = model("TreeEnsembleRegressor", [X], [F], n_targets=1, **forest(80, 6))
    graph, module = import_model(made), tcomp.compile(made, threads=2)
    assert any(a.dtype == np.int64 for a in graph.constants.values())
    for rows in (1, 2, 23, 50):
        x = np.resize(X, (rows, 5))
        np.testing.assert_allclose(module.run({"x0": x})["y0"], evaluate_graph(graph, {"x0": x})["y0"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("every", [False, True])
def test_many_trees_of_odd_shapes(every):
    """The first levels of all trees are tested abreast, also of those that end before; walks that go on for long are loops."""
    attrs, far = forest(140, 5, ids=(0, 1), missing=True, every=every), {**chain(40), "nodes_missing_value_tracks_true": [0] * 81}
    for name, values in far.items():
        attrs[name] = attrs[name] + ([140] * len(values) if name.endswith("treeids") else values)
    check("TreeEnsembleRegressor", [np.where(HOLES > 1, HOLES * 30, HOLES)[:4]], [F], native=True, n_targets=2, **attrs)
