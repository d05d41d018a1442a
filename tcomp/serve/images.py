"""Pictures as inputs: decoded, scaled, cut and normalised as a model's configuration says; and the best elements of its output."""

from __future__ import annotations

import io
import warnings
from http import HTTPStatus
from typing import Any

import numpy as np

from tcomp.serve.batching import Arrays
from tcomp.serve.options import ImageOptions
from tcomp.serve.refusals import Refusal, bad_request
from tcomp.serve.served import ServedModel

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_MOST_PIXELS = 50_000_000  # of a picture: more are refused before they are decoded


def read_image(content: bytes, model: ServedModel) -> Arrays:
    """The inputs of a model for the picture in a file. Raises Refusal for what is not a picture, or a model that takes none."""
    options, wire, channels_last, height, width = _target(model)
    try:
        from PIL import Image
    except ImportError:
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "this server reads no pictures", hint="install the package pillow") from None
    channels = len(options.mean)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            file = Image.open(io.BytesIO(content), formats=_FORMATS)
            if file.width * file.height > _MOST_PIXELS:
                raise bad_request("the picture is too large", why=f"it has {file.width} x {file.height} pixels")
            image = file.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as problem:
        raise bad_request("the body is not a picture", why=str(problem)[:200], hint=f"send one of {', '.join(_FORMATS)}") from None
    shorter = options.resize or max(height, width)
    scale = shorter / min(image.width, image.height)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    box = (left / size[0] * image.width, top / size[1] * image.height)
    end = ((left + width) / size[0] * image.width, (top + height) / size[1] * image.height)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, (*box, *end)), np.float32) / 255
    mean, std = (np.array(numbers, np.float32) for numbers in (options.mean, options.std))
    pixels = (pixels.reshape(height, width, channels) - mean) / std
    ordered = pixels if channels_last else pixels.transpose(2, 0, 1)
    return {wire.name: np.ascontiguousarray(ordered[np.newaxis], wire.dtype)}


def _target(model: ServedModel) -> tuple[ImageOptions, Any, bool, int, int]:
    """How, into which input; whether channels come last; height and width (pixels)."""
    options = model.options.image
    if options is None:
        raise Refusal(HTTPStatus.NOT_FOUND, f"model {model.name!r} takes no pictures", hint='add "image": {} to its serving.json')
    wires = list(model.inputs.values())
    channels = len(options.mean)
    if len(wires) == 1 and len(shape := wires[0].shape) == 4 and wires[0].dtype.kind == "f":
        for axis, sides in ((1, shape[2:]), (3, shape[1:3])):
            if shape[axis] == channels:
                height, width = (options.size if side == -1 else side for side in sides)
                return options, wires[0], axis == 3, height, width
    what = f"the input of model {model.name!r} is not a picture"
    raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, what, why=f"expected one of floats, with {channels} channels, in four axes")


def best(model: ServedModel, outputs: Arrays) -> dict[str, Any]:
    """The elements of the first output that are largest, with their labels."""
    options = model.options.image
    assert options is not None
    scores = next(iter(outputs.values())).astype(np.float64).reshape(-1)
    if options.softmax:
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    rows = []
    for index in np.argsort(-scores, kind="stable")[: options.top]:
        row = {"index": int(index), "score": float(scores[index])}
        rows.append(row | ({"label": options.labels[index]} if index < len(options.labels) else {}))
    return {"model_name": model.name, "model_version": model.version, "best": rows}
