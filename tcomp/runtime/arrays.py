"""Arrays that a caller gives: inputs admitted or refused, outputs checked before they are written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError
from tcomp.runtime.frame import address_of
from tcomp.runtime.manifest import TensorSpec

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

_WRITABLE = 0x501  # NumPy's flags C_CONTIGUOUS, ALIGNED and WRITEABLE


def admit(value: object, spec: TensorSpec, dtype: np.dtype[Any], copy: bool = True) -> Array:
    """`value` as a C-contiguous, aligned ndarray of exactly `dtype`; its shape is not checked. Arrays (NumPy's, or of any library with
    DLPack or `__array__`) must have the right element type and are copied only if they are not contiguous or not aligned, or, unless
    `copy`, refused. Python numbers and nested lists of them are converted if every value survives: integers exactly, floats up to rounding
    but not to infinity, those of 8 bits and fewer exactly. Raises InputError naming the input."""
    if not isinstance(value, np.ndarray | np.generic) and isinstance(value, bool | int | float | complex | list | tuple):
        return _convert(value, spec, dtype)
    array: Array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else _import(value, spec)
    if _is_masked(value):
        hint = "fill it first, for example with .filled(0), or pass its .data"
        raise InputError(f"input {spec.name!r} is a masked array", why="models know no masks", hint=hint)
    if array.dtype != dtype:
        why = f"expected {spec.dtype}{'' if dtype.name == spec.dtype else f' (as {dtype.name})'}, got {array.dtype}"
        hint = f"convert it, for example with .astype({dtype.name!r})"
        raise InputError(f"input {spec.name!r} has the wrong element type", why=why, hint=hint)
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    fits = len(array.shape) == len(spec.shape) and all(
        n in (m, n * isinstance(m, str)) for n, m in zip(array.shape, spec.shape, strict=True)
    )
    return _contiguous(array, spec, copy) if fits else array  # the shape will be refused, without a copy of what may be large


def _is_masked(value: object) -> bool:
    return type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray)


def _contiguous(array: Array, spec: TensorSpec, copy: bool) -> Array:
    if not copy:
        raise InputError(f"input {spec.name!r} is not C-contiguous and aligned", why="what is bound is used where it lies")
    problem = f"it has {array.nbytes} bytes, more than the memory of this machine"
    if array.nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        try:
            return np.array(array, order="C")
        except MemoryError as error:
            problem = str(error)
    raise InputError(f"input {spec.name!r} cannot be copied to contiguous memory", why=problem, hint="run with smaller inputs")


def _import(value: Any, spec: TensorSpec, role: str = "input", protocols: Sequence[str] = ("__dlpack__", "__array__")) -> Array:
    """An array of another library, without a copy where that is possible."""
    problem: Exception | None = None
    for protocol in protocols:
        if hasattr(value, protocol):
            try:
                array: Array = (np.from_dlpack if protocol == "__dlpack__" else np.asarray)(value)
            except Exception as error:  # noqa: BLE001  libraries raise what they like: a tensor on a device, one that needs a gradient
                problem = problem or error
            else:
                return array
    why = str(problem) if problem else f"expected {spec} as an ndarray, or an object with {' or '.join(protocols)}"
    hint = "run takes arrays by name: model.run({...})" if isinstance(value, dict) else ""
    where = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InputError(f"{role} {spec.name!r} is not an array", where=where, why=why, hint=hint)


def _convert(value: object, spec: TensorSpec, dtype: np.dtype[Any]) -> Array:
    try:
        given: Array = np.asarray(value)
    except (ValueError, OverflowError) as problem:
        raise InputError(f"input {spec.name!r} is not a rectangular list of numbers", why=str(problem)) from None
    if given.size == 0 and given.dtype == np.float64:  # an empty list says nothing about its type
        return np.empty(given.shape, dtype)
    # Kinds of types, each holding the ones before; element types that NumPy does not know count as floats. Where the names differ, the
    # elements are the bits of a type that NumPy lacks.
    rank = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if dtype.name == spec.dtype and rank.get(given.dtype.kind, 4) <= rank.get(dtype.kind, 2):
        with np.errstate(all="ignore"):
            array = given.astype(dtype)
            if dtype.itemsize == 1 and dtype.isbuiltin == 2:  # of few bits, where rounding would be no small matter
                wide, numbers = array.astype(np.float64), given.astype(np.float64)
                survives = (wide == numbers) | (np.isnan(wide) & np.isnan(numbers))
            elif given.dtype.kind in "iu":
                survives = (array.astype(given.dtype) == given) & ((array < 0) == (given < 0))
            else:
                survives = np.isfinite(array.astype(np.complex128)) | ~np.isfinite(given.astype(np.complex128))
        if np.all(survives):
            return array
    what, why = f"input {spec.name!r} cannot be converted without loss", f"expected {spec.dtype}, got Python values of type {given.dtype}"
    raise InputError(what, why=why, hint="pass an array of the right element type")


def given_outputs(
    out: Mapping[str, object],
    specs: Sequence[TensorSpec],
    wanted: Sequence[tuple[Shape, np.dtype[Any], int]],
    inputs: Sequence[Array],
    continued: Mapping[str, int] = MappingProxyType({}),
) -> list[Array | None]:
    """The arrays that the caller gave for outputs of these shapes, types and sizes; None for those not given. Raises InputError if one
    cannot be written as it is, or overlaps an input or another output; but those `continued` (output -> number of an input) may begin
    where that input does."""
    if type(out) is not dict and not isinstance(out, Mapping):
        raise InputError("`out` must be a mapping from names of outputs to arrays", why=f"it is a {type(out).__name__}")
    found: list[Array | None] = []
    taken = [(start := address_of(array), start + array.nbytes) for array in inputs]
    for spec, (shape, dtype, size) in zip(specs, wanted, strict=True):
        if spec.name not in out:
            found.append(None)
            continue
        value: Any = out[spec.name]
        if not isinstance(value, np.ndarray):
            value = _import(value, spec, "output", ("__dlpack__",))
        fits = value.dtype is dtype or value.dtype == dtype
        if not fits or value.shape != shape or value.flags.num & _WRITABLE != _WRITABLE or _is_masked(value):
            raise _unusable(spec, value, dtype, shape)
        begin = address_of(value)
        end = begin + size
        for number, (other, other_end) in enumerate(taken if size else ()):
            if begin < other_end and other < end and (begin != other or number != continued.get(spec.name)):
                what = f"the array for output {spec.name!r} overlaps an input, or the array for another output"
                raise InputError(what, hint="give each its own memory")
        taken.append((begin, end))
        found.append(value)
    if len(out) > len(taken) - len(inputs):
        unknown = [str(name) for name in out if name not in {spec.name for spec in specs}]
        raise InputError(f"`out` names unknown outputs: {', '.join(unknown)}", hint=f"the model has {', '.join(map(str, specs))}")
    return found


def _unusable(spec: TensorSpec, array: Array, dtype: np.dtype[Any], shape: Shape) -> InputError:
    if array.dtype != dtype or array.shape != shape:
        why = f"expected {dtype}{[*shape]}, got {array.dtype}{[*array.shape]}"
    elif _is_masked(array):
        why = "it is a masked array"
    else:
        flags = {"C-contiguous": array.flags.c_contiguous, "aligned to its element size": array.flags.aligned}
        why = "it is not " + next((name for name, fits in flags.items() if not fits), "writeable")
    return InputError(
        f"the array for output {spec.name!r} cannot be written", why=why, hint=f"make one by np.empty({shape}, {dtype.name!r})"
    )
