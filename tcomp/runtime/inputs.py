"""From whatever a caller passes as an input to a dense array of the right element type."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError
from tcomp.runtime.manifest import TensorSpec

Array: TypeAlias = npt.NDArray[Any]


def admit(value: object, spec: TensorSpec, dtype: np.dtype[Any]) -> Array:
    """`value` as a C-contiguous, aligned ndarray of exactly `dtype`; its shape is not checked.

    Arrays (NumPy's, or of any library with DLPack or `__array__`) must have the right element type and are copied only
    if they are not contiguous or not aligned. Python numbers and nested lists of them are converted if every value
    survives: integers exactly, floats up to rounding but not to infinity. Raises InputError naming the input.
    """
    if isinstance(value, np.ndarray | np.generic):
        array: Array = np.asarray(value)
    elif isinstance(value, bool | int | float | complex | list | tuple):
        return _convert(value, spec, dtype)
    else:
        array = _import(value, spec)
    if array.dtype != dtype:
        why = f"expected {spec.dtype}{'' if dtype.name == spec.dtype else f' (as {dtype.name})'}, got {array.dtype}"
        hint = f"convert it, for example with .astype({dtype.name!r})"
        raise InputError(f"input {spec.name!r} has the wrong element type", why=why, hint=hint)
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C")


def _import(value: Any, spec: TensorSpec) -> Array:
    """An array of another library, without a copy where that is possible."""
    problem: Exception | None = None
    for attribute, convert in (("__dlpack__", np.from_dlpack), ("__array__", np.asarray)):
        if hasattr(value, attribute):
            try:
                return convert(value)
            except Exception as error:  # noqa: BLE001  libraries raise what they like: a tensor on a device, one that needs a gradient
                problem = problem or error
    why = str(problem) if problem else f"expected {spec} as an ndarray, or an object with __dlpack__ or __array__"
    raise InputError(f"input {spec.name!r} is not an array", where=f"{type(value).__module__}.{type(value).__qualname__}", why=why)


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
            if given.dtype.kind in "iu":
                survives = (array.astype(given.dtype) == given) & ((array < 0) == (given < 0))
            else:
                survives = np.isfinite(array.astype(np.complex128)) | ~np.isfinite(given.astype(np.complex128))
        if np.all(survives):
            return array
    why = f"expected {spec.dtype}, got Python values of type {given.dtype}"
    hint = "pass an array of the right element type"
    raise InputError(f"input {spec.name!r} cannot be converted without loss", why=why, hint=hint)


def random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Normally distributed numbers; integers and booleans are 0 or 1, which is a valid index, mask and token nearly everywhere."""
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape, np.float32).astype(dtype)
