"""A compiled model as a WebAssembly package: the module, its weights, an ES module that runs it with types for TypeScript, and a page.

The module is the model alone: `tcomp_run`, `tcomp_plan` and, where values of inputs give sizes, `tcomp_bind` of include/tcomp.h, on 32-bit
pointers that take the lower half of a word. The ES module (wasm/module.mjs) plans its memory: weights, then what a run needs.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

from tcomp.codegen.archive import members
from tcomp.errors import InputError, TargetError, printable
from tcomp.runtime import Artifact
from tcomp.runtime.manifest import Manifest, TensorSpec
from tcomp.shipping.c_interface import allowed, check_alone, comment
from tcomp.shipping.c_package import check_version
from tcomp.shipping.folders import new_folder
from tcomp.shipping.linker import check_linker, link_wasm
from tcomp.target import CpuTarget

WEIGHTS_LIMIT = 3 << 30  # bytes: a module addresses 4 GiB, and a run needs some
_ARRAYS = {
    "int8": "Int8Array", "int16": "Int16Array", "uint16": "Uint16Array", "int32": "Int32Array", "uint32": "Uint32Array",
    "int64": "BigInt64Array", "uint64": "BigUint64Array", "float32": "Float32Array", "float64": "Float64Array", "float16": "Uint16Array",
    "bfloat16": "Uint16Array", "complex64": "Float32Array", "complex128": "Float64Array",
}  # fmt: skip


def write_wasm_package(artifact: Artifact, folder: Path, name: str, version: str = "1.0") -> list[Path]:
    """Write a package of the model under the name `name` (see `c_interface.package_name`) into a new folder; returns its files. Raises
    TargetError for a model that was not compiled for wasm32, or without a linker; InputError for a folder that exists, a bad version, or
    weights beyond what a module addresses."""
    m = artifact.manifest
    if not m.triple.startswith("wasm32"):
        what = f"the model cannot be packaged for WebAssembly: it was compiled for {m.triple}"
        raise TargetError(what, hint="compile the model with --target wasm32")
    check_alone(m, "WebAssembly")
    check_linker(CpuTarget.baseline(m.triple).platform)
    check_version(version)
    if artifact.weights.nbytes > WEIGHTS_LIMIT:
        raise InputError(f"{artifact.weights.nbytes >> 20} MiB of weights are more than WebAssembly addresses", hint="take a smaller model")
    binds = ["tcomp_bind"] * any(d.what for d in m.dims)
    module = link_wasm(members(artifact.code), ["tcomp_run", "tcomp_plan", *binds, "__heap_base"])
    texts = {f"{name}.mjs": _text("module.mjs", m, name, artifact.weights.nbytes), "index.html": _text("page.html", m, name, 0)}
    contents: dict[str, str | bytes | memoryview] = {
        f"{name}.wasm": module,
        **({f"{name}.weights": artifact.weights.data} if artifact.weights.nbytes else {}),
        **texts,
        f"{name}.d.ts": _types(m, name),
        "package.json": json.dumps(_npm(name, version), indent=2) + "\n",
        "README.md": _readme(m, name),
    }
    with new_folder(folder) as root:
        for path, content in contents.items():
            (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return [folder / path for path in contents]


def described(m: Manifest, weights: int) -> dict[str, object]:
    """What the ES module knows of a model."""
    return {
        "inputs": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in m.inputs],
        "outputs": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in m.outputs],
        "dims": [
            {
                "name": d.name,
                "min": d.min,
                "max": d.max,
                "late": d.data_dependent,
                "given": not d.data_dependent and not d.what,
                "what": d.what,
            }
            for d in m.dims
        ],
        "binds": any(d.what for d in m.dims),
        "counted": any(d.data_dependent for d in m.dims),
        "errors": m.errors,
        "checks": m.checks,
        "weights": weights,
    }


def _text(template: str, m: Manifest, name: str, weights: int) -> str:
    """A file of this package's folder `wasm` with what is particular to a model put in."""
    text = (files("tcomp.shipping") / "wasm" / template).read_text(encoding="utf-8")
    values = {
        "NAME": name,
        "PRODUCER": re.sub(r"[^\w .+-]", "", m.producer),
        "EXAMPLE": ", ".join(f"{_key(t.name)}: {_example(t)}" for t in m.inputs),
        "MODEL": json.dumps(described(m, weights), ensure_ascii=True),
    }
    return re.sub(r"\$(NAME|PRODUCER|EXAMPLE|MODEL)\b", lambda match: values[match[1]], text)


def _key(name: str) -> str:
    """A property of an object, as JavaScript says it; names in models are of unknown origin."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else json.dumps(name, ensure_ascii=True)


def _example(t: TensorSpec) -> str:
    array = f"new {_array(t.dtype)}(...)"
    return array if _fixed(t) else f"{{ data: {array}, dims: [{', '.join(comment(str(d)) for d in t.shape)}] }}"


def _array(dtype: str) -> str:
    return _ARRAYS.get(dtype, "Uint8Array")


def _fixed(t: TensorSpec) -> bool:
    return all(isinstance(d, int) for d in t.shape)


def _types(m: Manifest, name: str) -> str:
    """NAME.d.ts."""

    def member(t: TensorSpec, output: bool) -> str:
        array = _array(t.dtype)
        plain = f"{array} | " if _fixed(t) and not output else ""
        return f"  /** {comment(str(t))} */\n  {_key(t.name)}: {plain}Tensor<{array}>;"

    sizes = [f" * {comment(d.name)}: {allowed(d)}" for d in m.dims if not d.data_dependent and not d.what]
    return f"""\
/** Values in row-major order, and the extents of the axes. float16 and bfloat16 are passed as their bits, complex numbers as two values. */
export interface Tensor<A> {{
  data: A;
  dims: number[];
}}

export interface Inputs {{
{chr(10).join(member(t, False) for t in m.inputs)}
}}

export interface Outputs {{
{chr(10).join(member(t, True) for t in m.outputs)}
}}

export interface Described {{
  name: string;
  dtype: string;
  shape: (number | string)[];
}}

/**
 * A loaded model. It keeps its memory; one run at a time, as there is one thread. Free sizes:
{chr(10).join(sizes or [" * none"])}
 */
export interface Model {{
  readonly inputs: Described[];
  readonly outputs: Described[];
  /** Runs the model. Throws a TypeError or a RangeError for inputs that do not fit, an Error if the model stops. */
  run(inputs: Inputs): Outputs;
}}

/** Loads the model: `code` and `weights` are URLs or bytes, by default `{name}.wasm` and `{name}.weights` beside this module. */
export function load(source?: {{ code?: Source; weights?: Source }}): Promise<Model>;
type Source = string | URL | ArrayBuffer | ArrayBufferView;
"""


def _npm(name: str, version: str) -> dict[str, object]:
    parts = (version.split(".") + ["0", "0"])[:3]
    return {
        "name": name.lower(),
        "version": ".".join(str(int(p)) for p in parts),
        "type": "module",
        "main": f"./{name}.mjs",
        "types": f"./{name}.d.ts",
    }


def _readme(m: Manifest, name: str) -> str:
    relaxed = "relaxed-simd" in m.features
    needs = "SIMD" + " and relaxed SIMD, whose results may differ in the last bits between processors" * relaxed
    tensors = [f"{kind:6} {printable(str(t))}" for kind, group in (("input", m.inputs), ("output", m.outputs)) for t in group]
    return f"""\
# {name}

A neural network as a WebAssembly module, compiled by {printable(m.producer)}. It runs in Node and in pages, on one thread, and needs an
engine with {needs}. Nothing else is needed.

```
{chr(10).join(tensors)}
```

```js
import {{ load }} from "./{name}.mjs";
const model = await load();
const outputs = model.run({{ {", ".join(f"{_key(t.name)}: {_example(t)}" for t in m.inputs)} }});
```

`outputs` has for each output its values (`data`) and extents (`dims`). `{name}.d.ts` describes the types.

`index.html` is a page that gives a model a picture; a file `labels.txt` beside it, a line for each class, names what it finds. Pages
load modules from a server only: `python -m http.server` here, then http://localhost:8000. `?picture=FILE` in the address takes a file
beside it.

A model is code: use it only if you trust who made it.
"""
