"""The manifest of an artifact: its signature and all else that is not code or weights, as canonical JSON.

    {"format": 4, "producer": "tcomp 0.1",
     "triple": "x86_64-unknown-linux-gnu", "cpu": "skylake-avx512", "features": ["avx512f", "fma"],
     "inputs":  [{"name": "x", "dtype": "float32", "shape": ["n", 4]}],
     "outputs": [{"name": "y", "dtype": "float32", "shape": ["2*n", 4]}],
     "dims":    [{"name": "n", "min": 1, "max": 512, "data_dependent": false}],
     "threads": 2, "errors": ["index out of bounds in node gather_3"], "checks": ["n must be a multiple of 2"],
     "state": [{"input": "past", "output": "present"}], "replaced": [],
     "weights": [{"name": "w", "offset": 0, "size": 16, "crc32": "...", "sha256": "..."}],
     "code_sha256": "...", "notes_sha256": "..."}

`features` lists, by LLVM's names, the instruction-set extensions that the code uses. An output's shape is for people (its extents come
from `tcomp_plan`), except that an integer there is a promise. `max` may be null: unbounded. `threads` may be null: as many as the machine
offers. `checks` says what must hold of the dims, see `tcomp_plan`. Dims come in the order of `tcomp_call.dims`; those not data-dependent
must occur in an input's shape, or be computed by `tcomp_bind`, from values of inputs (`"values": ["s"], "what": "extent 0 of the result"`).
The checksums of a weight are those of its blocks of a mebibyte (the last may be shorter), joined, in hexadecimal digits.
`host` is there where the runtime itself computes something (`HostSteps`); `inputs` and `outputs` are those of the machine code then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from tcomp.errors import ArtifactError
from tcomp.runtime.host_steps.steps import STRING, Step
from tcomp.runtime.schema import Count, load_json, read, refuse

FORMAT = 4
MANIFEST_LIMIT = 64 << 20  # bytes: far more than any model's, far less than a hostile header could ask for
MAX_AXES = 64  # NumPy's limit

_NATIVE = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip
# Element types that NumPy lacks, with the type of their raw bits. Those narrower than a byte take one byte each.
_EXTENDED = {"bfloat16": "uint16"}
_EXTENDED |= dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), "uint8")
_EXTENDED |= dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int4", "uint4", "int2", "uint2"), "uint8")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of arrays with elements `name`. Types that NumPy lacks (bfloat16, int4, ...) are those of ml_dtypes where that is
    installed, otherwise unsigned integers holding the raw bits, one of them an element. Raises ArtifactError for an unknown name."""
    if name in _NATIVE:
        return np.dtype(name)
    if name not in _EXTENDED:
        raise ArtifactError(f"unknown element type {name!r}")
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(_EXTENDED[name])
    return np.dtype(getattr(ml_dtypes, name, _EXTENDED[name]))


def to_saved(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array as NumPy's files can hold it: elements of types that NumPy lacks become bits of no type."""
    return array.view(f"V{array.itemsize}") if array.dtype.isbuiltin == 2 else array  # 2: a type that a library has added


def from_saved(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """What `to_saved` was given, an array with elements `name`; any other array as it is."""
    if name not in _EXTENDED:
        return array
    dtype = numpy_dtype(name)
    return array.view(dtype) if array.dtype == f"V{dtype.itemsize}" else array


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic extent. `max` is None if unbounded. A data-dependent one becomes known only when the model runs. One that is computed
    before (`tcomp_bind`), from other dims and the values of the inputs named in `values`, says in `what` what it is, for messages."""

    name: str
    min: Count
    max: Count | None
    data_dependent: bool = False
    values: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output. An extent is an int, the name of a dim (inputs), or an expression over dims (outputs)."""

    name: str
    dtype: str
    shape: tuple[Count | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant: where it lies in the weights section (bytes), and the checksums of its blocks."""

    name: str
    offset: Count
    size: Count
    crc32: str
    sha256: str


@dataclass(frozen=True, slots=True)
class HostSteps:
    """What the runtime itself computes, before and after the machine code, in NumPy (see `runtime.host_steps`): strings and encoded images.
    `inputs` and `outputs` are those of the model. Inputs of the machine code are inputs of the model or results of steps `before` it;
    outputs of the model are inputs, results of steps, or outputs of the machine code."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    before: tuple[Step, ...]
    after: tuple[Step, ...]

    @property
    def computing(self) -> tuple[Step, ...]:
        """The steps that compute something: all but constants."""
        return tuple(step for step in (*self.before, *self.after) if step.operator != "Constant")


@dataclass(frozen=True, slots=True)
class StatePair:
    """Of `state`: an output that is an input with new rows behind it. Where both have the same address, the code writes the new rows only.
    Of `replaced`: an output of the type of an input, which is that input of the next run."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module's docstring. The types of the fields are what `parse_manifest` checks."""

    format: int
    producer: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    threads: Annotated[int, range(1, 4097)] | None
    errors: tuple[str, ...]
    weights: tuple[Weight, ...]
    code_sha256: str
    notes_sha256: str
    checks: tuple[str, ...]
    state: tuple[StatePair, ...] = ()
    replaced: tuple[StatePair, ...] = ()
    host: HostSteps | None = None

    @property
    def model_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model, those of host steps included."""
        return self.inputs if self.host is None else self.host.inputs

    @property
    def model_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the model, those of host steps included."""
        return self.outputs if self.host is None else self.host.outputs


def dump_json(value: object, what: str) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Raises ArtifactError, naming `what` it is, for values that JSON lacks."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise ArtifactError(f"{what} cannot be written as JSON", why=str(problem)) from None


def parse_notes(data: bytes) -> dict[str, Any]:
    """The notes in `data`: any JSON object. Raises ArtifactError."""
    return read(dict[str, Any], load_json(data, "the notes"), "notes")


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in `data`, checked field by field. Raises ArtifactError naming the field that is wrong."""
    root = load_json(data, "the manifest")
    version = root.get("format", FORMAT) if isinstance(root, dict) else FORMAT
    if version != FORMAT:
        raise ArtifactError(f"the manifest has format {version}, this runtime reads format {FORMAT}", hint="compile the model again")
    if isinstance(root, dict):
        root.setdefault("checks", [])  # artifacts of tcomp 0.1 may lack them
    manifest = read(Manifest, root, "manifest")
    for kind in ("dims", "weights", "inputs", "outputs"):
        entries = getattr(manifest, kind)
        if len({entry.name for entry in entries}) < len(entries):
            raise ArtifactError(f"two {kind} of the manifest have the same name")
    for field, pairs in (("state", manifest.state), ("replaced", manifest.replaced)):
        for number, pair in enumerate(pairs):
            given, continued = (
                [t for t in tensors if t.name == name] for tensors, name in ((manifest.inputs, pair.input), (manifest.outputs, pair.output))
            )
            if not given or not continued or (given[0].dtype, len(given[0].shape)) != (continued[0].dtype, len(continued[0].shape)):
                refuse(("manifest", field, number), "an input, and an output of its type and rank")
    dims = {dim.name: dim for dim in manifest.dims}
    for kind, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        for number, tensor in enumerate(tensors):
            where = "manifest", kind, number
            if tensor.dtype not in _NATIVE and tensor.dtype not in _EXTENDED:
                refuse((*where, "dtype"), f"a known element type, not {tensor.dtype!r}")
            if len(tensor.shape) > MAX_AXES:
                refuse((*where, "shape"), f"at most {MAX_AXES} extents")
            for axis, extent in enumerate(tensor.shape if kind == "inputs" else ()):
                if isinstance(extent, str) and (extent not in dims or dims[extent].data_dependent or dims[extent].what):
                    refuse((*where, "shape", axis), "a dim that is not data-dependent")
    for kind, tensors in (("inputs", manifest.host.inputs), ("outputs", manifest.host.outputs)) if manifest.host is not None else ():
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ArtifactError(f"two {kind} of the manifest's host steps have the same name")
        for number, tensor in enumerate(tensors):
            if tensor.dtype != STRING and tensor.dtype not in _NATIVE and tensor.dtype not in _EXTENDED:
                refuse(("manifest", "host", kind, number, "dtype"), f"a known element type, not {tensor.dtype!r}")
    for number, dim in enumerate(manifest.dims):
        if dim.max is not None and dim.max < dim.min:
            refuse(("manifest", "dims", number, "max"), f"at least {dim.min}, the least extent")
        if unknown := [name for name in dim.values if all(name != tensor.name for tensor in manifest.inputs)]:
            refuse(("manifest", "dims", number, "values"), f"names of inputs, not {unknown[0]!r}")
        if not dim.data_dependent and not dim.what and not any(dim.name in tensor.shape for tensor in manifest.inputs):
            raise ArtifactError(f"dim {dim.name!r} of the manifest is neither data-dependent nor an extent of an input")
    return manifest
