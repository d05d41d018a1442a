"""The operators of host steps, by name: their function, how many inputs they take, and the type of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tcomp.runtime.host_steps import image, movement as mv, text
from tcomp.runtime.host_steps.steps import Array, SavedArray, restored_array


@dataclass(frozen=True)
class NoAttributes:
    """Of operators that have none."""


@dataclass(frozen=True)
class ConstantAttributes:
    """`value`: the array."""

    value: SavedArray


@dataclass(frozen=True)
class Operator:
    """`function(inputs, prepared)` gives as many arrays as the operator has outputs. `least` to `most` inputs are taken, `outputs` given
    (None: any number, as the attributes say). `prepare` makes what the function takes of the attributes, once, and refuses bad ones."""

    function: Callable[[Sequence[Array], Any], list[Array]]
    least: int
    most: int
    attributes: type[Any] = NoAttributes
    outputs: int | None = 1
    prepare: Callable[[Any], Any] = lambda attributes: attributes


MANY = 1 << 16  # inputs of a Concat

OPERATORS: Mapping[str, Operator] = {
    "Constant": Operator(lambda _, value: [value], 0, 0, ConstantAttributes, prepare=lambda a: restored_array(a.value)),
    "StringNormalizer": Operator(text.normalize, 1, 1, text.NormalizeAttributes),
    "StringConcat": Operator(text.concatenate, 2, 2),
    "StringSplit": Operator(text.split, 1, 1, text.SplitAttributes, outputs=2),
    "RegexFullMatch": Operator(text.full_match, 1, 1, text.MatchAttributes, prepare=text.compiled),
    "LookUp": Operator(text.look_up, 1, 1, text.LookUpAttributes, prepare=text.tabulated),
    "Cast": Operator(text.cast, 1, 1, text.CastAttributes, prepare=text.castable),
    "ImageDecoder": Operator(image.decode, 1, 1, image.DecodeAttributes, prepare=image.decodable),
    "Identity": Operator(lambda xs, _: [xs[0]], 1, 1),
    "Reshape": Operator(mv.reshape, 2, 2, mv.ReshapeAttributes),
    "Squeeze": Operator(lambda xs, _: [np.squeeze(xs[0], tuple(map(int, xs[1])) if len(xs) > 1 else None)], 1, 2),
    "Unsqueeze": Operator(lambda xs, _: [np.expand_dims(xs[0], tuple(map(int, xs[1])))], 2, 2),
    "Flatten": Operator(mv.flatten, 1, 1, mv.AxisAttributes),
    "Transpose": Operator(lambda xs, a: [np.ascontiguousarray(xs[0].transpose(a.perm or None))], 1, 1, mv.TransposeAttributes),
    "Concat": Operator(mv.concat, 1, MANY, mv.AxisAttributes),
    "Gather": Operator(mv.gather, 2, 2, mv.AxisAttributes),
    "GatherElements": Operator(mv.gather_elements, 2, 2, mv.AxisAttributes),
    "ArrayFeatureExtractor": Operator(mv.features, 2, 2),
    "Slice": Operator(mv.cut, 3, 5),
    "Split": Operator(mv.split, 1, 2, mv.SplitAttributes, outputs=None),
    "Expand": Operator(mv.expand, 2, 2),
    "Tile": Operator(mv.tile, 2, 2),
    "Where": Operator(mv.where, 3, 3),
    "Equal": Operator(mv.equal, 2, 2),
    "Shape": Operator(lambda xs, a: [np.array(xs[0].shape[a.start : a.end], np.int64)], 1, 1, mv.ShapeAttributes),
    "Size": Operator(lambda xs, _: [np.array(xs[0].size, np.int64)], 1, 1),
    "Compress": Operator(lambda xs, a: [np.compress(xs[1], xs[0], a.axis)], 2, 2, mv.CompressAttributes),
}
