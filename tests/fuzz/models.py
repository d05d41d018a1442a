"""ONNX models damaged: fields of their protobuf messages, or bytes; and models whose tensors lie in a file of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnx.backend.test
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.external_data_helper import set_external_data

from tcomp.frontends.onnx import import_model
from tcomp.ir.verify.graph import verify_graph
from tests.fuzz.mutations import damaged_bytes, damaged_message, integer, messages
from tests.fuzz.target import Folders, Target, packed, unpacked

MODEL, WEIGHTS = "m.onnx", "w.bin"


def onnx_files() -> list[bytes]:
    """Small models of the ONNX backend suite."""
    folder = Path(onnx.backend.test.__file__).parent / "data"
    return [path.read_bytes() for path in sorted(folder.rglob("model.onnx")) if path.stat().st_size < 4000]


def operator_models() -> list[bytes]:
    """The one-node models of the ONNX backend suite, with their functions expanded as well (10 seconds to make)."""
    from tests.conformance.suite import Suite

    found = [case.model.SerializeToString() for case in Suite().cases.values() if case.model is not None]
    return [data for data in found if len(data) < 4000]


def text_models() -> list[bytes]:
    """Models of strings, which become host steps."""
    from tests.frontends.test_host_steps import BOOL, FLOAT, INT, TEXT, classifier, model

    counted = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0, "ngram_counts": [0], "ngram_indexes": [0, 1]}
    found = [
        classifier()[0],
        model(
            [("StringConcat", ["a", "b"], ["c"]), ("CastLike", ["c", "a"], ["k"]), ("Cast", ["k"], ["d"], {"to": FLOAT})],
            {"a": (TEXT, ["n"]), "b": (TEXT, ["n"])},
            {"d": (FLOAT, ["n"])},
        ),
        model(
            [("StringSplit", ["a"], ["c", "m"], {"delimiter": ","}), ("Unsqueeze", ["c", "ax"], ["u"]), ("Squeeze", ["u"], ["v"])],
            {"a": (TEXT, ["n"])},
            {"v": (TEXT, None), "m": (INT, ["n"])},
            {"ax": np.array([0])},
        ),
        model(
            [("Cast", ["x"], ["t"], {"to": TEXT}), ("RegexFullMatch", ["t"], ["r"], {"pattern": "[0-9.]+"})],
            {"x": (FLOAT, ["n"])},
            {"r": (BOOL, ["n"])},
        ),
        model(
            [
                ("ml.OneHotEncoder", ["x"], ["y"], {"cats_strings": ["a", "b"]}),
                ("TfIdfVectorizer", ["x"], ["z"], {**counted, "pool_strings": ["a", "b"]}),
            ],
            {"x": (TEXT, [3])},
            {"y": (FLOAT, [3, 2]), "z": (FLOAT, [2])},
        ),
        model(
            [
                ("ml.LabelEncoder", ["x"], ["y"], {"keys_int64s": [1, 2], "values_strings": ["p", "q"]}),
                ("Constant", [], ["k"], {"value_string": "z"}),
                ("StringConcat", ["y", "k"], ["w"]),
            ],
            {"x": (INT, [3])},
            {"w": (TEXT, [3])},
        ),
    ]
    return [m.SerializeToString() for m in found]


def shown(data: bytes) -> str:
    try:
        return f"{data!r}\n{onnx.printer.to_text(ModelProto.FromString(data))}"
    except Exception as error:  # noqa: BLE001  the printer is no part of this
        return f"{data!r}\n{error}"


class OnnxModels(Target):
    """Models. `files` makes those to start from."""

    def __init__(self, files: Callable[[], list[bytes]]) -> None:
        self.files = files

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        return self.files()

    def damage(self, rng: Random, data: bytes) -> bytes:
        if rng.randrange(8) == 0:
            return damaged_bytes(rng, data)
        model = ModelProto.FromString(data)
        damaged_message(rng, model)
        return model.SerializeToString()

    def read(self, data: bytes) -> None:
        graph = import_model(data)
        verify_graph(graph)
        str(graph)

    def show(self, data: bytes) -> str:
        return shown(data)


class ExternalData(Folders):
    """Models whose tensors lie in another file, in a folder with all that a location should not name."""

    places = ("pipe", "loop", "out", "up", "here", "folder", "folder/../w.bin", "./w.bin", "../w.bin", "/dev/zero", "/etc/passwd", "", ".",
              MODEL, WEIGHTS, "no", "a\0b", "x" * 300, "x/" * 3000, "w.bin/", "é", "out/hostname")  # fmt: skip
    keys = ("location", "offset", "length", "checksum", "basepath", "")
    numbers = ("", " 8 ", "+8", "0x10", "1_0", "-0", "8.0", "1e3", "nan", "²", "٣", "9" * 5000)

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        os.mkfifo(self.folder / "pipe")
        (self.folder / "folder").mkdir()
        for name, leads in (("loop", "loop"), ("out", "/etc/passwd"), ("up", ".."), ("here", WEIGHTS)):
            (self.folder / name).symlink_to(leads)
        return [packed(files) for data in onnx_files() if WEIGHTS in (files := moved_out(data))]

    def damage(self, rng: Random, data: bytes) -> bytes:
        files = unpacked(data)
        match rng.randrange(8):
            case 0:
                files[MODEL] = damaged_bytes(rng, files[MODEL])
            case 1:
                files[WEIGHTS] = damaged_bytes(rng, files[WEIGHTS])
            case what:
                model = ModelProto.FromString(files[MODEL])
                tensors = [m for m in messages(model) if isinstance(m, TensorProto)]
                if what == 2:
                    damaged_message(rng, model)
                elif tensors:
                    self.damage_tensor(rng, rng.choice(tensors))
                files[MODEL] = model.SerializeToString()
        return packed(files)

    def damage_tensor(self, rng: Random, tensor: TensorProto) -> None:
        """Where a tensor is said to lie, how large it is, and whether it lies elsewhere at all."""
        for _ in range(rng.choice((1, 1, 2, 3))):
            entries = list(tensor.external_data)
            match rng.randrange(8):
                case 0:
                    damaged_message(rng, tensor)
                case 1:
                    tensor.external_data.add(key=rng.choice(self.keys), value=rng.choice((*self.places, *self.numbers)))
                case 2 if entries:
                    del tensor.external_data[rng.randrange(len(entries))]
                case 3 if tensor.dims:
                    at = rng.randrange(len(tensor.dims))
                    tensor.dims[at] = max(-(1 << 63), min(integer(rng, tensor.dims[at]), (1 << 63) - 1))
                case _ if entries:
                    entry = rng.choice(entries)
                    if entry.key == "location":
                        entry.value = rng.choice(self.places)
                    elif rng.randrange(4):
                        entry.value = str(integer(rng, int(entry.value) if entry.value.isdecimal() and len(entry.value) < 20 else 0))
                    else:
                        entry.value = rng.choice(self.numbers)

    def read(self, data: bytes) -> None:
        self.write(data)
        graph = import_model(self.folder / MODEL)
        verify_graph(graph)
        str(graph)
        for array in graph.constants.values():
            np.asarray(array).tobytes()  # what is mapped is there

    def show(self, data: bytes) -> str:
        files = unpacked(data)
        return f"{files.get(WEIGHTS)!r}\n{shown(files[MODEL])}"


def moved_out(data: bytes) -> dict[str, bytes]:
    """The files of a model with the data of its tensors in another one."""
    model, weights = ModelProto.FromString(data), b""
    for tensor in messages(model):
        if isinstance(tensor, TensorProto) and tensor.data_type != TensorProto.STRING and not tensor.external_data:
            content = numpy_helper.to_array(tensor).tobytes()
            for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.raw_data = b""
            set_external_data(tensor, WEIGHTS, len(weights), len(content))
            tensor.ClearField("raw_data")
            weights += content
    return {MODEL: model.SerializeToString()} | ({WEIGHTS: weights} if weights else {})
