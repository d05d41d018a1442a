"""The arguments of a native call, as memory that the code reads; kept between calls, since making them takes longer than a small model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError
from tcomp.runtime.native_code import Call
from tcomp.runtime.workspace import Workspace

ALIGNED = 1 << 10  # bytes: for a few cache lines, alignment gains less than the half microsecond that it takes
OWN_BYTES = 1 << 16  # of workspace that a frame keeps for itself; what is larger is shared with others
# Where a NumPy array has the address of its elements: behind the header of a Python object, as compiled extensions have it from NumPy's
# headers. Ten times faster than asking the array (`array.ctypes.data`, `array.__array_interface__`), which a call does for each argument.
_DATA = object.__basicsize__
_BYTE = np.dtype(np.uint8)


class Plan(NamedTuple):
    """What is known once the shapes of the inputs are: dims, bytes of workspace, (shape, dtype, bytes) of the outputs, and whether nothing
    is to be done since they are empty."""

    dims: list[int]
    workspace: int
    outputs: list[tuple[tuple[int, ...], np.dtype[Any], int]]
    empty: bool = False


class Frame:
    """The arguments of one call at a time, of one model."""

    __slots__ = ("__weakref__", "_pack", "_places", "_workspace", "address", "alive", "call", "dims", "owner", "plan", "stopped", "thread")

    def __init__(self, weights: npt.NDArray[np.uint8], inputs: int, outputs: int, dims: int, pool: int | None) -> None:
        self._places = (ctypes.c_void_p * (inputs + outputs))()
        self._pack = Struct(f"{inputs + outputs}P").pack_into
        self.dims = (ctypes.c_int64 * dims)()
        self.plan: Plan | None = None
        self.stopped, self.thread = "", 0  # why the run was stopped, and where it runs
        self.owner: object = None  # whose `cancel` stops it
        self.alive: object = None  # what the code has addresses of, in a frame that is bound
        self._workspace: Workspace | None = None
        places = ctypes.addressof(self._places)
        self.call = Call(
            places, places + inputs * ctypes.sizeof(ctypes.c_void_p), address_of(weights), None, ctypes.addressof(self.dims), pool
        )
        self.address = ctypes.addressof(self.call)

    def prepare(self, plan: Plan) -> None:
        """Get ready for calls by this plan; those with large workspaces get one each time. Raises InputError if there is no memory."""
        self.plan = None  # if there is no memory, the next call must not take this frame for prepared
        if plan.workspace <= OWN_BYTES:
            if self._workspace is None or self._workspace.size < plan.workspace:
                self._workspace = Workspace(plan.workspace)
            self.call.workspace = self._workspace.address
        self.dims[:] = [*plan.dims]
        self.plan = plan

    def fill(self, places: list[int]) -> None:
        """Set the addresses of all inputs, then of all outputs."""
        self._pack(self._places, 0, *places)


def _data_pointer(array: npt.NDArray[Any]) -> int:
    return _pointer_at(id(array) + _DATA).value or 0  # empty arrays of other libraries have no address


def _asked(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


_pointer_at, _probe = ctypes.c_void_p.from_address, np.arange(3)
# Where the elements of an array begin. Asked for, where objects have another layout.
address_of = _data_pointer if _data_pointer(_probe) == _asked(_probe) else _asked


def new_arrays(wanted: Iterable[tuple[tuple[int, ...], np.dtype[Any], int]]) -> list[npt.NDArray[Any]]:
    """Uninitialised arrays of these shapes, types and sizes in bytes, aligned to 64 bytes from ALIGNED bytes on. Raises InputError if there
    is no memory."""
    arrays = []
    try:
        for shape, dtype, size in wanted:
            if size < ALIGNED:
                arrays.append(np.empty(shape, dtype))
            else:
                room = np.empty(size + 63, _BYTE)
                arrays.append(np.ndarray(shape, dtype, room, -address_of(room) & 63))
    except (MemoryError, ValueError) as problem:
        raise InputError("no memory for the outputs", why=str(problem), hint="run with smaller inputs") from None
    return arrays
