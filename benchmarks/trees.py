"""Tree ensembles side by side: tcomp, ONNX Runtime, lleaves and tl2cgen on one LightGBM model, one thread, calls in turns.

    python -m benchmarks.trees [--trees 500] [--depth 7] [--features 30] [--rows 1,64,4096] [--seconds 2]

Prints microseconds a call (the median), and those of each peer divided by tcomp's. Peers that are not installed are left out. Each call gets
the next rows of 20,000: where one row comes again and again, processors learn all branches that it takes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
Run = Callable[[int], object]  # given the number of the first row


def trained(trees: int, depth: int, features: int) -> tuple[Any, np.ndarray]:
    """(a LightGBM booster for regression, rows to predict)."""
    import lightgbm

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, features)).astype(np.float32)
    y = np.sin(x[:, 0] * 3) + x[:, 1] * x[:, 2] + rng.standard_normal(len(x)) * 0.1 + np.abs(x[:, 3:8]).sum(axis=1)
    parameters = {
        "objective": "regression",
        "num_leaves": 1 << depth,
        "max_depth": depth,
        "min_data_in_leaf": 5,
        "num_threads": 1,
        "verbose": -1,
    }
    return lightgbm.train(parameters, lightgbm.Dataset(x, y), trees), x


def contenders(booster: Any, x: np.ndarray, rows: Sequence[int], folder: Path) -> Mapping[str, Callable[[int], Run]]:
    """By name, what gives a call that predicts the first rows."""
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    import tcomp

    model = onnxmltools.convert_lightgbm(booster, initial_types=[("x", FloatTensorType([None, x.shape[1]]))], target_opset=15, zipmap=False)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    expected, found = booster.predict(x[: max(rows)]), dict[str, Callable[[int], Run]]()

    def by_tcomp(n: int) -> Run:
        module = tcomp.compile(str(folder / "model.onnx"), shapes={"x": (n, x.shape[1])}, threads=1)
        return lambda at: next(iter(module.run({"x": x[at : at + n]}).values()))

    def by_runtime(n: int) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        return lambda at: session.run(None, {"x": x[at : at + n]})[0]

    def by_lleaves(n: int) -> Run:
        import lleaves

        booster.save_model(folder / "model.txt")
        compiled = lleaves.Model(str(folder / "model.txt"))
        compiled.compile(cache=folder / "lleaves.so")
        return lambda at: compiled.predict(x[at : at + n], n_jobs=1)

    def by_tl2cgen(n: int) -> Run:
        import tl2cgen
        import treelite

        if not (folder / "tl2cgen.so").exists():
            ensemble = treelite.frontend.from_lightgbm(booster)
            tl2cgen.export_lib(ensemble, toolchain="gcc", libpath=folder / "tl2cgen.so", params={"parallel_comp": 16})
        predictor = tl2cgen.Predictor(folder / "tl2cgen.so", nthread=1)
        wide = x.astype(np.float64)
        return lambda at: predictor.predict(tl2cgen.DMatrix(wide[at : at + n]))

    for name, make in (("tcomp", by_tcomp), ("onnxruntime", by_runtime), ("lleaves", by_lleaves), ("tl2cgen", by_tl2cgen)):
        try:
            np.testing.assert_allclose(np.asarray(make(rows[0])(0)).ravel(), expected[: rows[0]], rtol=1e-3, atol=1e-3)
        except (ImportError, AttributeError, OSError) as error:  # lleaves needs an llvmlite before 0.45
            print(f"without {name}: {error}")
        else:
            found[name] = make
    return found


def medians(calls: Mapping[str, Run], starts: Sequence[int], seconds: float) -> dict[str, float]:
    """Microseconds a call, the calls of all contenders in turns, each on rows from the next of `starts` on."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(starts[0])
    end, turn = time.perf_counter() + seconds * len(calls), itertools.cycle(starts)
    while time.perf_counter() < end:
        at = next(turn)
        for name, call in calls.items():
            start = time.perf_counter()
            call(at)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Train, compile, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("trees", 500), ("depth", 7), ("features", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,64,4096")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    rows = [int(n) for n in options.rows.split(",")]
    booster, x = trained(options.trees, options.depth, options.features)
    with tempfile.TemporaryDirectory() as folder:
        made = contenders(booster, x, rows, Path(folder))
        for n in rows:
            found = medians({name: make(n) for name, make in made.items()}, range(0, len(x) - n + 1, n), options.seconds)
            ratios = ", ".join(f"{name} {t / found['tcomp']:.2f}" for name, t in found.items() if name != "tcomp")
            print(
                f"{n:5} rows: " + ", ".join(f"{name} {t:.1f} us" for name, t in found.items()) + f"; slower than tcomp: {ratios}",
                flush=True,
            )


if __name__ == "__main__":
    main()
