"""What is fuzzed: for each reader, files or texts to start from, how they are damaged, and what is done with the result.

Whatever a reader refuses must be a `TcompError`; what it accepts must print, verify and be read again without another error.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from tcomp.errors import InputError, UnsupportedError
from tcomp.frontends.onnx import import_model
from tcomp.ir import expr as E
from tcomp.ir.graph import Graph, content_hash
from tcomp.ir.loops import Buffer
from tcomp.ir.te import print_te
from tcomp.ir.text import parser
from tcomp.ir.text.expression_parser import parse_expr
from tcomp.ir.verify.graph import verify_graph
from tcomp.ir.verify.loops import verify_kernel, verify_te
from tcomp.ir.verify.program import verify_program
from tcomp.ops import OPERATORS
from tcomp.runtime import Module, read_artifact
from tcomp.runtime.host_steps.operators import OPERATORS as HOST_OPERATORS
from tcomp.runtime.host_steps.prepared import PreparedStep
from tcomp.runtime.host_steps.regex import Pattern
from tcomp.runtime.host_steps.steps import Step, saved_array
from tcomp.runtime.loaded_model import LoadedModel
from tcomp.runtime.manifest import parse_manifest, parse_notes
from tcomp.runtime.plan import Plan, dim_values, evaluate
from tcomp.runtime.schema import load_json, read
from tests.fuzz.databases import Databases
from tests.fuzz.language_models import Configs, GgufFiles
from tests.fuzz.models import ExternalData, OnnxModels, onnx_files, operator_models, text_models
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_text
from tests.fuzz.target import Target
from tests.runtime import native_models
from tests.schedules.dice import Seeded
from tests.schedules.random_loops import imperative

GOLDEN = Path(__file__).parents[1] / "golden"


class Manifests(Target):
    """The manifest of an artifact; what a module does with one that is accepted, without its code."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        found = [manifest_of(data) for data in packed_models()]
        noted = json.loads(found[0])
        noted["errors"] = ["index out of bounds"]
        return [*found, json.dumps(noted).encode()]

    def damage(self, rng: Random, data: bytes) -> bytes:
        return damaged_json(rng, data)

    def read(self, data: bytes) -> None:
        use_manifest(parse_manifest(data))


class Notes(Target):
    """The notes of an artifact, and what a module tells of its kernels by them."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        work = {"flops": ["mul", ["dim", 0], 4], "slots": 1, "divisions": 0, "bytes": ["add", ["floordiv", ["dim", 0], 2], 4], "narrow": 0}
        return [json.dumps({"kernels": ["k"], "facts": [{"work": work, "layout": "(a,b)", "not_fused": ["why"]}]}).encode()]

    def damage(self, rng: Random, data: bytes) -> bytes:
        return damaged_json(rng, data)

    @cached_property
    def manifest(self) -> Any:
        return parse_manifest(manifest_of(packed_models()[0]))

    def read(self, data: bytes) -> None:
        use_manifest(self.manifest, parse_notes(data))


def use_manifest(manifest: Any, notes: dict[str, Any] | None = None) -> None:
    uncoded: Any = type("Uncoded", (LoadedModel,), {"threads": 1})
    uncoded.__abstractmethods__ = frozenset()  # there is no code to prepare or run
    model = uncoded(SimpleNamespace(manifest=manifest, notes=notes, where=""))
    repr(model)
    arrays = {}
    for spec, (_, dtype) in zip(model.inputs, model._admission, strict=True):
        shape = tuple(2 if isinstance(d, str) else d if d < 99 else 1 for d in spec.shape)
        arrays[spec.name] = np.zeros(shape if len(shape) < 9 else (), dtype)
    if notes is not None:
        model.facts(arrays)
    else:
        model._bind(tuple(array.shape for array in arrays.values()))


class HostSteps(Target):
    """Steps that the runtime performs itself, each on arrays of strings and numbers."""

    ARRAYS = (
        np.array([["a", "bb", ""], ["1.5", "x", "-3"]], object), np.arange(6).reshape(2, 3), np.array([1, 0]), np.array(2),
        np.array([True, False]), np.array(["7"], object),
    )  # fmt: skip

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        saved, numbers = saved_array(np.array(["a", "x"], object)), saved_array(np.array([1.5, np.nan], np.float32))
        attributes: dict[str, dict[str, Any]] = {
            "StringNormalizer": {"case": "LOWER", "is_case_sensitive": False, "stopwords": ["a"]},
            "StringSplit": {"delimiter": "", "most": 1},
            "RegexFullMatch": {"pattern": "(?i)^[a-z]{1,3}(b|[[:digit:]]+)?$"},
            "LookUp": {"keys": saved, "values": numbers, "default": saved_array(np.zeros(1, np.float32))},
            "Constant": {"value": saved}, "Cast": {"to": "float32"}, "ImageDecoder": {"pixel_format": "RGB"},
            "Reshape": {"allow_zero": False}, "Transpose": {"perm": [1, 0]}, "Split": {"axis": 0, "parts": 1},
            "Shape": {"start": 0, "end": None}, "Compress": {"axis": None},
            **{name: {"axis": 0} for name in ("Flatten", "Concat", "Gather", "GatherElements")},
        }  # fmt: skip
        return [
            json.dumps({"operator": n, "name": "s", "inputs": [f"x{i}" for i in range(op.least)], "outputs": ["y", "z"][: op.outputs or 1], "attributes": attributes.get(n, {})}).encode()
            for n, op in HOST_OPERATORS.items()
        ]  # fmt: skip

    def damage(self, rng: Random, data: bytes) -> bytes:
        return damaged_json(rng, data)

    def read(self, data: bytes) -> None:
        step = PreparedStep(read(Step, load_json(data, "a step"), "step"), ("step",))
        rng = Random(len(data))
        for _ in range(4):
            with suppress(InputError):
                step.perform({name: rng.choice(self.ARRAYS) for name in step.step.inputs})


class Artifacts(Target):
    """A whole file: damaged as bytes, or in its sections and table of sections with checksums that match again."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        return packed_models()

    def damage(self, rng: Random, data: bytes) -> bytes:
        match rng.randrange(4):
            case 0:
                return damaged_bytes(rng, data[:4096] if rng.randrange(8) == 0 else data)
            case 1:
                return resealed(damaged_bytes(rng, data[:128]) + data[128:])
        fields = list(struct.unpack_from("<8sII8Q", data))
        changed = damaged_json(rng, manifest_of(data))
        fields[7], fields[8] = len(data), len(changed)
        if rng.randrange(3) == 0:
            fields[rng.randrange(1, 11)] ^= 1 << rng.randrange(32)
        return resealed(struct.pack("<8sII8Q", *fields) + data[80:] + changed)

    def read(self, data: bytes) -> None:
        artifact = read_artifact(data)
        artifact.verify()
        for weight in artifact.manifest.weights:
            assert artifact.weight(weight.name).size == weight.size
        use_manifest(artifact.manifest)
        if artifact.code == self.codes[0] and artifact.manifest == self.manifest:
            Module(artifact, threads=1)

    @cached_property
    def codes(self) -> Sequence[bytes]:
        return [read_artifact(data).code for data in self.corpus]

    @cached_property
    def manifest(self) -> Any:
        return read_artifact(self.corpus[0]).manifest


def packed_models() -> list[bytes]:
    """Artifacts of two tiny models."""
    affine = native_models.packed(native_models.affine_code(), native_models.AFFINE_MANIFEST, [("w", native_models.W)])
    return [affine, native_models.packed(native_models.filter_code(), native_models.FILTER_MANIFEST, [])]


def manifest_of(data: bytes) -> bytes:
    *_, place, size, _, _ = struct.unpack_from("<8sII8Q", data)
    return data[place : place + size]


def resealed(data: bytes) -> bytes:
    """The file with the checksum of its header and manifest, as far as it says where that is."""
    if len(data) < 128:
        return data
    *_, place, size, _, _ = struct.unpack_from("<8sII8Q", data)
    digest = hashlib.sha256(data[:80] + data[place : place + size]).digest() if place + size <= 1 << 40 else bytes(32)
    return data[:80] + digest + data[112:]


class LaunchPlans(Target):
    """The launch plan of a CUDA artifact."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        launch = {"function": "k_0", "grid": [["floordiv", ["add", ["scalar", 0], 31], 32], 1, 1], "block": [256, 1, 1], "buffers": [0, 1],
                  "scalars": [0], "shared": 1024, "barriers": 0}  # fmt: skip
        index = {**launch, "function": "i_0", "grid": [1, 1, 1], "buffers": [0]}
        entry = {"cubin": {"sm_90a": "AAAA"}, "ptx": "AAAA"}
        call = {
            "call": "k",
            "label": "conv1",
            "buffers": [["input", 0, 0], ["workspace", 0, ["mul", ["dim", 0], 4]]],
            "scalars": [["dim", 0]],
        }
        inner = [call, {"copy": ["workspace", 0, ["mul", ["loop", "i"], 64]], "from": ["weights", 0, 0], "bytes": ["mul", ["dim", 1], 4]}]
        steps = [
            call,
            {"branch": ["workspace", 0, 8], "then": [call], "else": []},
            {"repeat": "i", "trips": ["max", ["dim", 0], 3], "body": inner, "condition": ["workspace", 0, 0]},
            {"index": ["workspace", 0, 16], "value": ["mod", ["dim", 0], 3]},
        ]
        kernels = {"k": {"launches": [launch], **entry}, "tcomp_set_index": {"launches": [index], **entry}}
        plan = {
            "kernels": kernels,
            "steps": steps,
            "workspace": ["mul", ["dim", 0], 64],
            "sizes": [["mul", ["dim", 1], 4]],
            "outputs": [[["dim", 0], 4]],
        }
        return [json.dumps(plan).encode()]

    def damage(self, rng: Random, data: bytes) -> bytes:
        return damaged_json(rng, data)

    def read(self, data: bytes) -> None:
        plan = Plan(data, 2, 1, 1)
        plan.count([3, 5])
        plan.workspace_size(dim_values([3, 5]))
        for size in (d for shape in plan.outputs for d in shape):
            evaluate(size, dim_values([3, 5]))


class Texts(Target):
    """Printed IR of one kind."""

    def __init__(
        self, parse: Callable[[str], Any], print: Callable[[Any], str], verify: Callable[[Any], None], corpus: Callable[[], list[str]]
    ):
        self.parse, self.print, self.verify, self.make = parse, print, verify, corpus

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        return [text.encode() for text in self.make()]

    def damage(self, rng: Random, data: bytes) -> bytes:
        return damaged_text(rng, data)

    def show(self, data: bytes) -> str:
        return data.decode()

    def read(self, data: bytes) -> None:
        found = self.parse(data.decode())
        shown = self.print(found)
        self.verify(found)
        assert self.print(self.parse(shown)) == shown, "what was printed reads back as something else"


def kernels() -> list[str]:
    random = [str(imperative(Seeded(f"fuzz {n}"))[0]) for n in range(60)]
    return [*random, *((GOLDEN / name).read_text() for name in ("gemm_kernel.txt", "instruction_kernel.txt", "other_kernel.txt"))]


@cache
def imported() -> tuple[Graph, ...]:
    """The graphs of some of the models below."""
    found = []
    for data in onnx_files()[::2]:
        with suppress(UnsupportedError):
            found.append(import_model(data))
    return tuple(found)


@cache
def constants() -> dict[str, np.ndarray]:
    return {content_hash(array): array for graph in imported() for array in map(np.asarray, graph.constants.values())}


def graphs() -> list[str]:
    return [*map(str, imported())]


def tensor_expressions() -> list[str]:
    return [(GOLDEN / name).read_text() for name in ("attention_te.txt", "extern_te.txt")]


def expressions() -> list[str]:
    return ["(i * 4 + j) // 8 % 3 - max(i, -5)", "select((i < 3) & (j != 2), x[i + 1], 0.5f)", "let t = i * i; u = t + j in t * u << 2",
            "sum(k in 0..7: x[k] * 2.5f)", "float32(i) / 3.0f + exp(x[0])", "bitcast(x[i], int32) ^ 77i32", "~((i <= j) | (100 < j))",
            "float32(float8_e4m3fn(x[i])) + float32(int4(i))", "select(i < 3, bitcast(3u8, uint2), uint2(x[j]))"]  # fmt: skip


def read_expression(text: str) -> Any:
    names = {"i": E.loop_var("i", 9), "j": E.dim("j", 0, 5), "x": Buffer("x", "float32", (64,))}
    return parse_expr(text, names)


def nothing(value: Any) -> None:
    """No verifier."""


TARGETS: dict[str, Target] = {
    "manifest": Manifests(),
    "notes": Notes(),
    "host-steps": HostSteps(),
    "pattern": Texts(
        Pattern,
        lambda pattern: pattern.text,
        nothing,
        lambda: ["(?i)^a+(b|[[:alpha:]_x-z]{2,3})*?$", r"\A\w+@(\d|\x{1F600}|\pL)\.\Qa.b\E\z"],
    ),
    "artifact": Artifacts(),
    "plan": LaunchPlans(),
    "kernel": Texts(parser.parse_kernel, str, verify_kernel, kernels),
    "te": Texts(parser.parse_te, print_te, verify_te, tensor_expressions),
    "program": Texts(parser.parse_program, str, verify_program, lambda: [(GOLDEN / "program.txt").read_text()]),
    "graph": Texts(lambda text: parser.parse_graph(text, OPERATORS, constants()), str, verify_graph, graphs),
    "expression": Texts(read_expression, str, nothing, expressions),
    "layout": Texts(lambda text: parser.parse_layout(text, 4), str, nothing, lambda: ["(a/16,b,c,d,a%16)", "(a,c+1+1,d+1+2,b/4,b%4)"]),
    "onnx": OnnxModels(onnx_files),
    "operators": OnnxModels(operator_models),
    "texts": OnnxModels(text_models),
    "external": ExternalData(),
    "database": Databases(),
    "gguf": GgufFiles(),
    "config": Configs(),
}
