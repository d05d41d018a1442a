"""Detection models whole, with non-maximum suppression inside, natively, compared with ONNX Runtime: one stage, two stages, YOLO."""

import numpy as np
import pytest
from onnx import helper

import tcomp
from tests.frontends.test_onnx_control import body, node

F, I, B = "float32", "int64", "bool"
CLASSES = 3


def compared(model, *cases):
    """The outputs of machine code, after they have been compared with ONNX Runtime's."""
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    module, results = tcomp.compile(model), []
    for case in cases:
        expected, got = session.run(None, case), module.run(case)
        for info, array in zip(session.get_outputs(), expected, strict=True):
            assert got[info.name].shape == array.shape, info.name
            np.testing.assert_allclose(got[info.name], array, rtol=1e-3, atol=1e-4)
        results.append(got)
    return results


class Weights(dict):
    """Named constants: random weights, and numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = np.random.default_rng(seed)

    def random(self, name, *shape, scale=1.0):
        self[name] = (self.generator.standard_normal(shape) * scale).astype(np.float32)
        return name

    def of(self, array, dtype=np.int64):
        name = f"c{len(self)}"
        self[name] = np.array(array, dtype)
        return name


def backbone(w, channels):
    """x [1, 3, h, w] -> features [1, channels, h / 4, w / 4]."""
    return [
        node("Conv", ["x", w.random("k1", 8, 3, 3, 3, scale=0.3)], ["f1"], strides=[2, 2], pads=[1, 1, 1, 1]), node("Relu", ["f1"], ["f2"]),
        node("Conv", ["f2", w.random("k2", channels, 8, 3, 3, scale=0.2)], ["f3"], strides=[2, 2], pads=[1, 1, 1, 1]), node("Relu", ["f3"], ["features"]),
    ]  # fmt: skip


def boxes_of(w, raw, boxes):
    """raw [1, n, 4] -> corners (y, x, y, x) [1, n, 4], in pixels."""
    return [
        node("Slice", [raw, w.of([0]), w.of([2]), w.of([2])], [f"{boxes}.low"]),
        node("Slice", [raw, w.of([2]), w.of([4]), w.of([2])], [f"{boxes}.size"]),
        node("Abs", [f"{boxes}.size"], [f"{boxes}.positive"]),
        node("Add", [f"{boxes}.low", f"{boxes}.positive"], [f"{boxes}.high"]),
        node("Concat", [f"{boxes}.low", f"{boxes}.high"], [boxes], axis=2),
    ]


@pytest.mark.parametrize("shape", [[1, 3, 32, 32], [1, 3, "h", "w"]])
def test_one_stage(make_model, shape):
    """As SSD: scores and boxes of all positions, suppression by class, the best ten of what is left."""
    w = Weights(0)
    nodes = [
        *backbone(w, 16),
        node("Conv", ["features", w.random("kb", 4, 16, 1, 1, scale=2.0)], ["rawboxes"]),
        node("Conv", ["features", w.random("kc", CLASSES, 16, 1, 1)], ["rawscores"]),
        node("Reshape", ["rawboxes", w.of([1, 4, -1])], ["b1"]), node("Transpose", ["b1"], ["b2"], perm=[0, 2, 1]), *boxes_of(w, "b2", "boxes"),
        node("Reshape", ["rawscores", w.of([1, CLASSES, -1])], ["s1"]), node("Sigmoid", ["s1"], ["scores"]),
        node("NonMaxSuppression", ["boxes", "scores", w.of([20]), w.of([0.45], F), w.of([0.3], F)], ["chosen"]),
        node("GatherND", ["scores", "chosen"], ["kept"]), node("Gather", ["chosen", w.of(2)], ["which"], axis=1),
        node("Gather", ["boxes", "which"], ["kb0"], axis=1), node("Squeeze", ["kb0", w.of([0])], ["keptboxes"]),
        node("Shape", ["kept"], ["n"]), node("Min", ["n", w.of([10])], ["k"]), node("TopK", ["kept", "k"], ["best", "order"]),
        node("Gather", ["keptboxes", "order"], ["bestboxes"]), node("Gather", ["chosen", w.of(1)], ["cls"], axis=1), node("Gather", ["cls", "order"], ["labels"]),
    ]  # fmt: skip
    model = make_model(nodes, {"x": (F, shape)}, {"best": F, "bestboxes": F, "labels": I, "n": I}, constants=w)
    rng = np.random.default_rng(1)
    cases = [{"x": rng.standard_normal((1, 3, 32, 32)).astype(np.float32)}, {"x": np.zeros((1, 3, 32, 32), np.float32)}]
    cases += [{"x": rng.standard_normal((1, 3, 20, 44)).astype(np.float32)}] if "h" in shape else []
    got = compared(model, *cases)
    assert 0 < got[0]["n"][0] <= 60


def test_two_stages(make_model):
    """As Faster R-CNN: proposals by TopK and suppression, RoiAlign, classes of each region, NonZero, suppression; nothing found is a case."""
    w, proposals = Weights(2), 40
    nodes = [
        *backbone(w, 12),
        node("Conv", ["features", w.random("ko", 1, 12, 1, 1)], ["o1"]), node("Reshape", ["o1", w.of([-1])], ["o2"]),
        node("Conv", ["features", w.random("kd", 4, 12, 1, 1, scale=6.0)], ["d1"]), node("Reshape", ["d1", w.of([4, -1])], ["d2"]),
        node("Transpose", ["d2"], ["d3"], perm=[1, 0]),
        node("TopK", ["o2", w.of([proposals])], ["topscores", "top"]), node("Gather", ["d3", "top"], ["d4"]), node("Unsqueeze", ["d4", w.of([0])], ["d5"]),
        *boxes_of(w, "d5", "proposals"),
        node("Unsqueeze", ["topscores", w.of([0, 1])], ["ts"]),
        node("NonMaxSuppression", ["proposals", "ts", w.of([15]), w.of([0.7], F)], ["first"]),
        node("Gather", ["first", w.of(2)], ["fi"], axis=1), node("Squeeze", ["proposals", w.of([0])], ["p2"]), node("Gather", ["p2", "fi"], ["rois"]),
        node("Shape", ["fi"], ["count"]), node("ConstantOfShape", ["count"], ["batch"], value=helper.make_tensor("v", 7, [1], [0])),
        node("RoiAlign", ["features", "rois", "batch"], ["pooled"], output_height=3, output_width=3, spatial_scale=0.25, sampling_ratio=2),
        node("Flatten", ["pooled"], ["flat"]), node("Gemm", ["flat", w.random("g1", 108, 24, scale=0.2)], ["h1"]), node("Relu", ["h1"], ["h2"]),
        node("MatMul", ["h2", w.random("g2", 24, CLASSES)], ["logits"]), node("Softmax", ["logits"], ["probs"], axis=1),
        node("Greater", ["probs", "threshold"], ["above"]), node("NonZero", ["above"], ["nz"]), node("Transpose", ["nz"], ["pairs"], perm=[1, 0]),
        node("GatherND", ["probs", "pairs"], ["found"]), node("Gather", ["pairs", w.of(0)], ["roi"], axis=1), node("Gather", ["rois", "roi"], ["foundboxes"]),
        node("Gather", ["pairs", w.of(1)], ["label"], axis=1), node("Cast", ["label"], ["labelf"], to=1), node("Mul", ["labelf", w.of(1000, F)], ["shift"]),
        node("Unsqueeze", ["shift", w.of([1])], ["shift2"]), node("Add", ["foundboxes", "shift2"], ["apart"]), node("Unsqueeze", ["apart", w.of([0])], ["a2"]),
        node("Unsqueeze", ["found", w.of([0, 1])], ["f0"]),
        node("NonMaxSuppression", ["a2", "f0", w.of([8]), w.of([0.5], F)], ["second"]),
        node("Gather", ["second", w.of(2)], ["final"], axis=1), node("Gather", ["foundboxes", "final"], ["boxes"]), node("Gather", ["label", "final"], ["labels"]),
        node("Gather", ["found", "final"], ["scores"]),
    ]  # fmt: skip
    inputs = {"x": (F, [1, 3, 48, 48]), "threshold": (F, [])}
    model = make_model(nodes, inputs, {"rois": F, "probs": F, "boxes": F, "labels": I, "scores": F}, opset=16, constants=w)
    x = np.random.default_rng(3).standard_normal((1, 3, 48, 48)).astype(np.float32)
    many, none = compared(model, {"x": x, "threshold": np.array(0.2, F)}, {"x": x, "threshold": np.array(2, F)})
    assert len(many["rois"]) > 1 and len(many["boxes"]) > 1 and many["boxes"].shape[1] == 4 and none["boxes"].shape == (0, 4)


@pytest.mark.parametrize("batch", [2, "batch"])
def test_yolo_with_suppression_behind(make_model, batch):
    """One output [batch, 4 + classes, n] of centres and sizes; results padded to a fixed number, or whole if there are none."""
    w = Weights(4)
    take = body(
        [node("Concat", ["rows", "filling"], ["long"], axis=0), node("Slice", ["long", "zero", "ten"], ["a"])], [], [("a", F, None)]
    )
    nothing = body([node("Identity", ["filling"], ["b"])], [], [("b", F, None)])
    w |= {"filling": np.full((10, 4), -1, np.float32), "zero": np.array([0]), "ten": np.array([10]), "none": np.array(0)}
    nodes = [
        *backbone(w, 8), node("Conv", ["features", w.random("kh", 4 + CLASSES, 8, 1, 1)], ["h1"]), node("Reshape", ["h1", w.of([0, 4 + CLASSES, -1])], ["out"]),
        node("Split", ["out", w.of([4, CLASSES])], ["raw", "logits"], axis=1), node("Transpose", ["raw"], ["r1"], perm=[0, 2, 1]), node("Exp", ["r1"], ["boxes"]),
        node("Sigmoid", ["logits"], ["scores"]),
        node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "floor"], ["chosen"], center_point_box=1),
        node("Gather", ["chosen", w.of([0, 2])], ["at"], axis=1), node("GatherND", ["boxes", "at"], ["rows"]),
        node("Size", ["rows"], ["size"]), node("Greater", ["size", "none"], ["some"]), node("If", ["some"], ["padded"], then_branch=take, else_branch=nothing),
    ]  # fmt: skip
    inputs = {"x": (F, [batch, 3, 24, 24]), "most": (I, []), "iou": (F, [1]), "floor": (F, [])}
    model = make_model(nodes, inputs, {"chosen": I, "rows": F, "padded": F}, constants=w)
    x = np.random.default_rng(5).standard_normal((2, 3, 24, 24)).astype(np.float32)
    limits = [(5, 0.5, 0.4), (100, 0.3, 0.55), (0, 0.5, 0.5), (3, 0.1, 1.5)]
    got = compared(model, *({"x": x, "most": np.array(m), "iou": np.array([i], F), "floor": np.array(f, F)} for m, i, f in limits))
    assert all(r["padded"].shape == (10, 4) for r in got) and len(got[0]["rows"]) > 3
