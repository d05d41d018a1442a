"""ImageDecoder: an encoded image becomes an array, by Pillow (the extra `image`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tcomp.errors import InputError
from tcomp.runtime.host_steps.steps import Array

MAX_PIXELS = 1 << 28  # of one image: a small file may describe an enormous one
FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")  # those of ONNX's definition, by Pillow's names
MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}  # pixel format -> Pillow's mode


@dataclass(frozen=True)
class DecodeAttributes:
    """`pixel_format`: one of `MODES`."""

    pixel_format: str


def decodable(attributes: DecodeAttributes) -> DecodeAttributes:
    """The attributes. Raises InputError for an unknown format of pixels."""
    if attributes.pixel_format not in MODES:
        raise InputError(f"ImageDecoder knows no pixel format {attributes.pixel_format!r}", hint=f"one of {', '.join(MODES)}")
    return attributes


def decode(arguments: Sequence[Array], attributes: DecodeAttributes) -> list[Array]:
    """uint8 [bytes of a file] -> uint8 [height, width, channels]. Raises InputError for other formats, and what is too large."""
    try:
        from PIL import Image  # only where images are decoded
    except ImportError:
        raise InputError("decoding images needs Pillow", hint="pip install 'tcomp[image]'") from None
    try:
        with Image.open(io.BytesIO(arguments[0].tobytes()), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InputError(f"an image has {image.width} x {image.height} pixels, more than the {MAX_PIXELS} allowed")
            pixels = np.asarray(image.convert(MODES[attributes.pixel_format]))
    except InputError:
        raise
    except Exception as problem:  # noqa: BLE001  Pillow's readers of damaged files raise what they like
        formats = f"it takes {', '.join(FORMATS)}"
        raise InputError("an image cannot be decoded", why=f"{type(problem).__name__}: {problem}"[:300], hint=formats) from None
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return [np.ascontiguousarray(pixels[:, :, ::-1] if attributes.pixel_format == "BGR" else pixels)]
