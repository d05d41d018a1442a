"""The manifest of an artifact: its signature and all else that is not code or weights, as canonical JSON.

    {"format": 1, "producer": "tcomp 0.1",
     "target": {"triple": "x86_64-unknown-linux-gnu", "cpu": "skylake-avx512", "features": ["avx512f", "fma"]},
     "inputs":  [{"name": "x", "dtype": "float32", "shape": [{"dim": 0}, 4]}],
     "outputs": [{"name": "y", "dtype": "float32", "shape": ["2*n", 4]}],
     "dims":    [{"name": "n", "min": 1, "max": 512, "data_dependent": false}],
     "threads": 2, "errors": ["index out of bounds in node gather_3"],
     "weights": [{"name": "w", "offset": 0, "size": 16, "sha256": "..."}],
     "checksums": {"code": "..."}, "notes": {}}

`features` lists, by LLVM's names, the instruction-set extensions that the code uses. An output's shape is for people
(its extents come from `tcomp_plan`), except that an integer there is a promise. `max` may be null: unbounded. `threads`
may be null: as many as the machine offers. Dims come in the order of `tcomp_call.dims`; those not data-dependent must
occur in an input's shape. `notes` is free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np

from tcomp.errors import ArtifactError

FORMAT = 1
MANIFEST_LIMIT = 64 << 20  # bytes

_NATIVE = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip
# Element types that NumPy lacks, with the type of their raw bits. Those narrower than a byte take one byte each.
_EXTENDED = {"bfloat16": "uint16"}
_EXTENDED |= dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8")
_EXTENDED |= dict.fromkeys(("float4_e2m1fn", "int4", "uint4", "int2", "uint2"), "uint8")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of arrays with elements `name`.

    Types that NumPy lacks (bfloat16, ...) are those of ml_dtypes where that is installed, otherwise unsigned integers
    holding the raw bits. Raises ArtifactError for an unknown name.
    """
    if name in _NATIVE:
        return np.dtype(name)
    if name not in _EXTENDED:
        raise ArtifactError(f"unknown element type {name!r}")
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(_EXTENDED[name])
    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, _EXTENDED[name]))
    return extended


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic extent. `max` is None if unbounded. A data-dependent one becomes known only when the model runs."""

    name: str
    min: int
    max: int | None
    data_dependent: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. An extent is an int, the name of a dim (inputs), or an expression over dims (outputs)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant: where it lies in the weights section (bytes), and the SHA-256 of its contents."""

    name: str
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module's docstring; `code_sha256` is `checksums.code`."""

    producer: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    threads: int | None
    errors: tuple[str, ...]
    weights: tuple[Weight, ...]
    code_sha256: str
    notes: dict[str, Any]


def dump_manifest(manifest: dict[str, Any]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Raises ArtifactError for values that JSON lacks."""
    try:
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ArtifactError("the manifest cannot be written as JSON", why=str(problem)) from None


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in `data`, checked field by field. Raises ArtifactError naming the field that is wrong."""
    if len(data) > MANIFEST_LIMIT:
        raise ArtifactError(f"the manifest has {len(data)} bytes, more than the {MANIFEST_LIMIT} allowed")
    try:
        root = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        raise ArtifactError("the manifest is not valid JSON", why=str(problem)) from None
    top = _Fields(root, "manifest")
    if (version := top.integer("format")) != FORMAT:
        raise ArtifactError(f"the manifest has format {version}, this runtime reads format {FORMAT}", hint="compile the model again")
    target = top.fields("target")
    dims = tuple(_dim(entry) for entry in top.entries("dims"))
    inputs = tuple(_tensor(entry, dims) for entry in top.entries("inputs"))
    outputs = tuple(_tensor(entry, None) for entry in top.entries("outputs"))
    weights = tuple(_weight(entry) for entry in top.entries("weights"))
    for kind, named in (("dims", dims), ("weights", weights), ("inputs", inputs), ("outputs", outputs)):
        if len({entry.name for entry in named}) < len(named):
            raise ArtifactError(f"two {kind} of the manifest have the same name")
    bound = {extent for tensor in inputs for extent in tensor.shape}
    for dim in dims:
        if not dim.data_dependent and dim.name not in bound:
            raise ArtifactError(f"dim {dim.name!r} of the manifest is neither data-dependent nor an extent of an input")
    threads = None if top.value("threads") is None else top.integer("threads", 1, 4096)
    notes = top.value("notes")
    if not isinstance(notes, dict):
        _wrong("manifest.notes", "an object")
    return Manifest(
        producer=top.text("producer"),
        triple=target.text("triple"),
        cpu=target.text("cpu"),
        features=target.texts("features"),
        inputs=inputs,
        outputs=outputs,
        dims=dims,
        threads=threads,
        errors=top.texts("errors"),
        weights=weights,
        code_sha256=top.fields("checksums").text("code"),
        notes=notes,
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _wrong(where: str, expected: str) -> NoReturn:
    raise ArtifactError(f"the manifest is malformed: expected {expected}", where=where)


class _Fields:
    """A JSON object under inspection; `where` is its path."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _wrong(where, "an object")
        self.values, self.where = value, where

    def value(self, key: str) -> Any:
        if key not in self.values:
            _wrong(f"{self.where}.{key}", "a value")
        return self.values[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        return value if isinstance(value, str) else _wrong(f"{self.where}.{key}", "a string")

    def integer(self, key: str, least: int = -(1 << 62), most: int = 1 << 62) -> int:
        value = self.value(key)
        if type(value) is not int or not least <= value <= most:
            _wrong(f"{self.where}.{key}", f"an integer in [{least}, {most}]")
        return int(value)

    def array(self, key: str) -> list[Any]:
        value = self.value(key)
        return value if isinstance(value, list) else _wrong(f"{self.where}.{key}", "an array")

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.array(key)
        return tuple(values) if all(isinstance(value, str) for value in values) else _wrong(f"{self.where}.{key}", "strings")

    def fields(self, key: str) -> _Fields:
        return _Fields(self.value(key), f"{self.where}.{key}")

    def entries(self, key: str) -> list[_Fields]:
        return [_Fields(value, f"{self.where}.{key}[{index}]") for index, value in enumerate(self.array(key))]


def _dim(entry: _Fields) -> Dim:
    least = entry.integer("min", 0)
    most = None if entry.value("max") is None else entry.integer("max", least)
    dependent = entry.value("data_dependent")
    if not isinstance(dependent, bool):
        _wrong(f"{entry.where}.data_dependent", "true or false")
    return Dim(entry.text("name"), least, most, dependent)


def _weight(entry: _Fields) -> Weight:
    return Weight(entry.text("name"), entry.integer("offset", 0), entry.integer("size", 0), entry.text("sha256"))


def _tensor(entry: _Fields, dims: tuple[Dim, ...] | None) -> TensorSpec:
    """An input if `dims` are given (its symbolic extents are {"dim": index}), else an output (they are text)."""
    dtype, shape = entry.text("dtype"), list[int | str]()
    if dtype not in _NATIVE and dtype not in _EXTENDED:
        _wrong(f"{entry.where}.dtype", f"a known element type, not {dtype!r}")
    for axis, extent in enumerate(entry.array("shape")):
        where = f"{entry.where}.shape[{axis}]"
        if type(extent) is int and 0 <= extent <= 1 << 62:
            shape.append(extent)
        elif dims is None:
            shape.append(extent if isinstance(extent, str) else _wrong(where, "an extent or an expression"))
        else:
            dim = dims[_Fields(extent, where).integer("dim", 0, len(dims) - 1)]
            shape.append(_wrong(where, "a dim that is not data-dependent") if dim.data_dependent else dim.name)
    if len(shape) > 64:  # NumPy's limit
        _wrong(f"{entry.where}.shape", "at most 64 extents")
    return TensorSpec(entry.text("name"), dtype, tuple(shape))
