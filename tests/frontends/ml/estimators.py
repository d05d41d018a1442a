"""Every estimator that skl2onnx can convert, converted, compiled and compared with what scikit-learn computes.

    python -m tests.frontends.ml.estimators [NAME ...]         one line an estimator, and how many there are of each outcome

Classifiers have integer labels, three of them and then two; `predict` and `predict_proba` (or `decision_function`) are compared, of others
`transform`. `Unavailable` says why an estimator has nothing to compare: it takes text, or skl2onnx itself cannot convert it.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np

RNG = np.random.default_rng(5)
X = RNG.standard_normal((120, 5)).astype(np.float32)
CENTRES = RNG.standard_normal((3, 5)) * 1.5
MEMBERS = np.argmin(((X[:, None] - CENTRES) ** 2).sum(-1), axis=1)
VALUES = (X @ [1.0, -2.0, 0.5, 0.0, 1.5] + np.sin(X[:, 0] * 2)).astype(np.float32)
COUNTS = np.round(np.abs(X) * 3).astype(np.float32)
POSITIVE = ("CategoricalNB", "ComplementNB", "MultinomialNB", "TfidfTransformer", "OneHotEncoder", "OrdinalEncoder")  # of counts
TEXT = ("CountVectorizer", "DictVectorizer", "FeatureHasher", "TfidfVectorizer", "LabelEncoder", "LabelBinarizer")  # or labels alone


OPSETS = {"": 18, "ai.onnx.ml": 3}


class Unavailable(Exception):
    """There is nothing to compare."""


def estimator_names() -> list[str]:
    """What skl2onnx lists."""
    from skl2onnx._supported_operators import sklearn_operator_name_map

    return sorted({kind.__name__ for kind in sklearn_operator_name_map})


def _made(name: str) -> Any:
    """An estimator, small enough to be fast."""
    from skl2onnx._supported_operators import sklearn_operator_name_map
    from sklearn import ensemble, linear_model, preprocessing, tree

    kind = next(k for k in sklearn_operator_name_map if k.__name__ == name)
    logistic, ridge = linear_model.LogisticRegression(), linear_model.Ridge()
    given: dict[str, dict[str, Any]] = {
        "Pipeline": {"steps": [("scale", preprocessing.StandardScaler()), ("model", logistic)]},
        "FeatureUnion": {"transformer_list": [("a", preprocessing.StandardScaler()), ("b", preprocessing.MinMaxScaler())]},
        "ColumnTransformer": {"transformers": [("a", preprocessing.StandardScaler(), [0, 2]), ("b", preprocessing.MinMaxScaler(), [1])]},
        "VotingClassifier": {"estimators": [("a", logistic), ("b", tree.DecisionTreeClassifier(max_depth=3))], "voting": "soft", "flatten_transform": False},
        "VotingRegressor": {"estimators": [("a", ridge), ("b", tree.DecisionTreeRegressor(max_depth=3))]},
        "StackingClassifier": {"estimators": [("a", logistic), ("b", tree.DecisionTreeClassifier(max_depth=3))]},
        "StackingRegressor": {"estimators": [("a", ridge), ("b", tree.DecisionTreeRegressor(max_depth=3))]},
        "GridSearchCV": {"estimator": logistic, "param_grid": {"C": [0.5, 1.0]}},
        "SelectFromModel": {"estimator": ensemble.RandomForestRegressor(5, random_state=0)},
        "RFE": {"estimator": ridge}, "RFECV": {"estimator": ridge},
        "OneVsOneClassifier": {"estimator": logistic}, "OneVsRestClassifier": {"estimator": logistic},
        "MultiOutputClassifier": {"estimator": logistic}, "MultiOutputRegressor": {"estimator": ridge},
        "CalibratedClassifierCV": {"estimator": logistic, "cv": 2}, "TunedThresholdClassifierCV": {"estimator": logistic},
        "KBinsDiscretizer": {"encode": "onehot-dense"}, "OneHotEncoder": {"sparse_output": False, "handle_unknown": "ignore"},
        "SVC": {"probability": True}, "NuSVC": {"probability": True, "nu": 0.1},
        "CastRegressor": {"estimator": ridge}, "FunctionTransformer": {}, "NearestNeighbors": {"radius": None},
        "GenericUnivariateSelect": {"param": 60}, "GaussianRandomProjection": {"n_components": 3}, "LocalOutlierFactor": {"novelty": True}, "RadiusNeighborsClassifier": {"radius": 10.0},
        "RadiusNeighborsRegressor": {"radius": 10.0}, "CategoricalNB": {"min_categories": 20},
    }  # fmt: skip
    parameters = dict(given.get(name, {}))
    if "n_estimators" in (known := inspect.signature(kind).parameters):
        parameters["n_estimators"] = 7
    if "random_state" in known:
        parameters["random_state"] = 0
    return kind(**parameters)


def compare(name: str, classes: int = 3, native: bool = True) -> str:
    """Compare one estimator; returns which methods agree. Raises `Unavailable`, `AssertionError`, or what compiling raises."""
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType

    import tcomp
    from tcomp.frontends.onnx import import_model
    from tcomp.ir.interpreters.graph import evaluate_graph

    if name in TEXT:
        raise Unavailable("it takes text or labels")
    model, x = _made(name), COUNTS if name in POSITIVE else X
    labels = MEMBERS if classes == 3 else (MEMBERS > 0).astype(np.int64)
    from sklearn.base import is_classifier, is_outlier_detector

    y: Any = (
        labels
        if is_classifier(model) or name == "NeighborhoodComponentsAnalysis"
        else np.stack([VALUES, VALUES**2], -1)
        if name.startswith("MultiTask")
        else VALUES
    )
    if name in ("PoissonRegressor", "GammaRegressor", "TweedieRegressor"):
        y = np.abs(VALUES) + 1
    if name in ("MultiOutputClassifier", "MultiOutputRegressor"):
        y = np.stack([y, y[::-1]], -1)
    try:
        model.fit(x, y)
        options = {id(model): {"zipmap": False}} if is_classifier(model) and name != "LinearSVC" else None
        converted = skl2onnx.convert_sklearn(
            model, initial_types=[("x", FloatTensorType([None, x.shape[1]]))], options=options, target_opset=OPSETS
        )
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if native:
        outputs = list(tcomp.compile(converted).run({"x": x}).values())
    else:
        outputs = list(evaluate_graph(import_model(converted), {"x": x}).values())
    found, methods = [], ["transform"]
    if hasattr(model, "predict") and not name.startswith("RFE"):
        methods = ["predict", "predict_proba"] if is_classifier(model) else ["predict"]
    if name.endswith("Mixture") or is_outlier_detector(model):
        methods = ["predict", "decision_function", "predict_proba"]
    for method in (m for m in methods if hasattr(model, m)):
        expected: Any = getattr(model, method)(x)
        if not isinstance(expected, tuple | list):
            expected = np.asarray(expected.toarray() if hasattr(expected, "toarray") else expected)
            got = outputs[min(len(found), len(outputs) - 1)]
            try:
                _agree(f"{name}.{method}", got.reshape(expected.shape) if got.size == expected.size else got, expected)
            except AssertionError:
                _agree_with_runtime(converted, x, outputs)
                raise Unavailable(f"{method} of the converted model differs, in ONNX Runtime as well") from None
            found.append(method)
    return ", ".join(found) or "compiled only"


def _agree_with_runtime(converted: Any, x: np.ndarray, outputs: list[np.ndarray]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, expected in zip(outputs, session.run(None, {"x": x}), strict=True):
        _agree("ONNX Runtime", got, expected)


def _agree(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Labels agree but for rows on a border; numbers within what float32 allows."""
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    if got.dtype.kind in "iu":
        assert (got != expected).mean() <= 0.01, f"{what}: {(got != expected).sum()} labels differ"
    else:
        size = np.abs(expected[np.isfinite(expected)]).max(initial=1e-3)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-4 * size, err_msg=what)


def main(names: list[str]) -> None:
    """Compare the named estimators, or all."""
    warnings.filterwarnings("ignore")
    outcomes: Counter[str] = Counter()
    for name in names or estimator_names():
        for classes in (3, 2):
            try:
                outcome, text = "equal", compare(name, classes)
            except Unavailable as error:
                outcome, text = "unavailable", str(error)
            except AssertionError as error:
                outcome, text = "DIFFERENT", " ".join(str(error).split())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                outcome, text = type(error).__name__, " ".join(str(error).split())
            if classes == 3 or "Classif" in name or outcome != "equal":
                print(f"{name:32} {classes} {outcome:12} {text[:260]}", flush=True)
                outcomes[outcome] += 1
    print(dict(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
