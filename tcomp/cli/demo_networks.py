"""Networks that packages on PyPI ship, with inputs and what their outputs should be: what `tcomp demo` compiles."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]

TEXT = "text"
LIGHT = ("resnet50", "densenet121", "inception_v1", "inception_v2", "shufflenet", "squeezenet", "vgg19", "zfnet512", "bvlc_alexnet")
EXTRA = "pip install 'tcomp[demo]'"
_RECOGNISER = ("rapidocr-onnxruntime", "rec_infer.onnx")  # the package that ships it, and how the name of its file ends
_HEIGHT = 48  # pixels of a line of text, as the recogniser was trained
_RTOL, _ATOL = 1e-3, 1e-7  # those of the ONNX backend tests for the light models


@dataclass(frozen=True)
class Verdict:
    """Whether an output is right; `rows` say so for people, `record` for programs."""

    right: bool
    rows: dict[str, str]
    record: dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A model file, its input, and what judges its first output. `picture` is what a person sees of the input, if anything."""

    name: str
    path: Path
    feeds: dict[str, Array]
    judge: Callable[[Array], Verdict]
    picture: Image | None = None


def light(name: str) -> Network:
    """A network of the ONNX backend tests, whose weights are placeholders. Raises InputError if it is not installed."""
    import onnx
    from onnx import numpy_helper

    base = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    path, output = base / f"light_{name}.onnx", base / f"light_{name}_output_0.pb"
    if not (path.is_file() and output.is_file()):
        raise InputError(f"the installed onnx package does not ship {name}", hint="pip install --upgrade onnx")
    expected = numpy_helper.to_array(onnx.TensorProto.FromString(output.read_bytes()))
    (taken,) = (i for i in onnx.load(path, load_external_data=False).graph.input if i.name not in _initialised(path))
    shape = [d.dim_value for d in taken.type.tensor_type.shape.dim]
    ramp = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / np.prod(shape)

    def judge(result: Array) -> Verdict:
        error = float(np.abs(result - expected).max()) if result.shape == expected.shape else float("inf")
        right = result.shape == expected.shape and bool(np.allclose(result, expected, _RTOL, _ATOL))
        said = f"{'right' if right else 'WRONG'}: largest error {error:.1e}, largest value {np.abs(expected).max():.2g}"
        return Verdict(right, {"result": said}, {"max_error": error})

    return Network(name, path, {taken.name: ramp.astype(np.float32)}, judge)


def _initialised(path: Path) -> set[str]:
    import onnx

    return {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.initializer}


def missing_for_text() -> list[str]:
    """What must be installed for `reading`, and is not."""
    absent = [] if importlib.util.find_spec("PIL") else ["pillow"]
    return absent if _recogniser() else [*absent, _RECOGNISER[0]]


def _recogniser() -> Path | None:
    """The trained network that PP-OCR reads lines of text by (Y. Du et al., PP-OCRv3, arXiv 2206.03001): a file of a wheel, which is found
    without importing the package."""
    package, ending = _RECOGNISER
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(ending)]
    return found[0] if found and found[0].is_file() else None


def reading(text: str) -> Network:
    """A network that was trained to read, and a picture of `text` for it. Raises InputError if something is not installed, or the text
    cannot be drawn or read: it has to be of 1 to 40 characters that the network knows."""
    if absent := missing_for_text():
        raise InputError(f"reading text needs {' and '.join(absent)}", hint=EXTRA)
    import onnx

    path = _recogniser()
    assert path is not None
    model = onnx.load(path)
    # Class 0 is "nothing", the last one a space.
    alphabet = ["", *{entry.key: entry.value for entry in model.metadata_props}["character"].split("\n"), " "]
    if unknown := set(text) - set(alphabet):
        raise InputError(
            f"the network knows no {', '.join(map(repr, sorted(unknown)))}", where="--text", hint="letters, digits, punctuation"
        )
    if not 1 <= len(text) <= 40 or text != text.strip() or "  " in text:
        raise InputError("the text must have 1 to 40 characters, with single spaces between words", where="--text")
    picture = _drawn(text)
    pixels = np.asarray(picture, np.float32)[:, :, ::-1].transpose(2, 0, 1)[None] / np.float32(127.5) - 1  # blue first

    def judge(result: Array) -> Verdict:
        classes, before = result[0].argmax(axis=1), 0
        read, sure = "", []
        for step, found in enumerate(map(int, classes)):
            if found and found != before:  # what is seen in several places in a row is one letter
                read += alphabet[found]
                sure.append(float(result[0, step, found]))
            before = found
        confidence = float(np.mean(sure)) if sure else 0.0
        read = " ".join(read.split())  # it also sees spaces at the margins
        rows = {"drawn": text, "read": f"{read} ({100 * confidence:.1f} % sure)"}
        return Verdict(read == text, rows, {"text": text, "read": read, "confidence": confidence})

    return Network(TEXT, path, {model.graph.input[0].name: np.ascontiguousarray(pixels)}, judge, picture)


def _drawn(text: str) -> Image:
    """A line of text, black on white."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=36)
    left, top, right, bottom = font.getbbox(text)
    picture = Image.new("RGB", (int(right - left) + 24, _HEIGHT), "white")
    ImageDraw.Draw(picture).text((12 - left, (_HEIGHT - top - bottom) / 2), text, font=font, fill="black")
    return picture
