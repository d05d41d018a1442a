"""The commands with a model whose strings the runtime maps."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.frontends.test_host_steps import FLOAT, TEXT, classifier, image_model, model


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("strings") / "words.onnx"
    onnx.save(classifier()[0], path)
    return path


def test_check_and_explain_name_the_steps(tcomp, words):
    checked = tcomp.json("check", words)
    assert checked["ok"] and checked["counts"]["host step"] == 2
    assert "host step: LabelEncoder (1), Gather (1)" in tcomp("check", words).stdout.replace("ai.onnx.ml.", "")
    steps = tcomp.json("explain", words)["host_steps"]
    assert [(s["operator"], s["when"]) for s in steps] == [("LookUp", "before"), ("Gather", "after")]
    assert "LookUp" in tcomp("explain", words).stdout


def test_run_takes_lines_of_text(tcomp, words, tmp_path):
    two_axes = tcomp.json("run", words)
    assert two_axes["inputs"]["words"]["dtype"] == "string" and two_axes["outputs"][0]["dtype"] == "string"
    np.save(tmp_path / "words.npy", np.array([["cat", "dog"]]))
    said = tcomp("run", words, "--input", f"words={tmp_path}/words.npy", "--save", tmp_path / "out.npz", "--profile")
    assert "host steps: ids_node (LookUp)" in " ".join(said.stdout.split()) and "string" in said.stdout
    saved = np.load(tmp_path / "out.npz")
    assert saved["label"].dtype.kind == "U" and saved["label"].shape == (1,)
    lines = model([("ml.LabelEncoder", ["x"], ["y"], {"keys_strings": ["a b", "c"], "values_floats": [1.5, 2.5]})],
                  {"x": (TEXT, ["n"])}, {"y": (FLOAT, ["n"])})  # fmt: skip
    onnx.save(lines, tmp_path / "lines.onnx")
    (tmp_path / "x.txt").write_text("a b\nc\n")
    assert tcomp.json("run", tmp_path / "lines.onnx", "--input", f"x={tmp_path}/x.txt")["outputs"][0]["first"] == [1.5, 2.5]


def test_run_reads_images(tcomp, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra `image`")
    onnx.save(image_model(), tmp_path / "image.onnx")
    image.fromarray(np.full((4, 6, 3), 9, np.uint8)).save(tmp_path / "cat.png")
    found = tcomp.json("run", tmp_path / "image.onnx", "--input", f"file={tmp_path}/cat.png")["outputs"]
    assert found[0]["first"] == [9, 9, 9] and found[1]["shape"] == [4, 6, 3]


def test_mistakes(tcomp, words, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    np.save(tmp_path / "numbers.npy", np.zeros((1, 2)))
    for value, message in (
        ("3", "takes strings"),
        (f"{tmp_path}/numbers.npy", "does not hold strings"),
        (f"{tmp_path}/bad.txt", "cannot be read"),
    ):
        assert message in tcomp("run", words, "--input", f"words={value}", status=2).stderr
    said = tcomp("package", words, "--format", "c", "-o", tmp_path / "c", status=2).stderr
    assert "host steps cannot be packaged for C" in said and "ids_node (LookUp)" in said


def test_verify_compares_what_was_compiled(tcomp, words):
    assert tcomp.json("verify", words)["ok"]
