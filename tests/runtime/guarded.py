"""Memory between inaccessible pages, and machine code run in it: what a kernel reads or writes outside of its buffers is a fault.

A fault does not end the process: a handler of SIGSEGV writes down which buffer it was, makes that page accessible, and lets the instruction
run again. Faults elsewhere are left to whoever handled them before.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Dim
from tcomp.ir.graph import Graph
from tcomp.passes import memory_plan
from tcomp.runtime.arrays import admit
from tcomp.runtime.loaded_model import LoadedModel
from tcomp.runtime.module import Module
from tcomp.runtime.native_code import Call

PAGE = mmap.PAGESIZE
GUARD = 64 * PAGE  # bytes on both sides: further than a vector, a row or a tile goes
POISON = 0xA5  # what lies between a buffer and its guard, as far as alignment asks for that
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NONE, _BOTH = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE


class Memory:
    """`size` bytes that end at the guard behind them, or start at the one before them (`at_start`), aligned to `align` bytes."""

    def __init__(self, name: str, size: int, align: int = 1, at_start: bool = False) -> None:
        self.name, self.size, room = name, size, -(-size // PAGE) * PAGE
        self.map = mmap.mmap(-1, room + 2 * GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.before, self.after = base, base + GUARD + room
        self.address = base + GUARD if at_start else (self.after - size) // align * align
        whole = np.frombuffer(self.map, np.uint8)[GUARD : GUARD + room]
        first = self.address - base - GUARD
        self.data, self.slack = whole[first : first + size], (whole[:first], whole[first + size :])
        for part in self.slack:
            part[:] = POISON
        for guard in (self.before, self.after):
            self.protect(guard, GUARD, _NONE)

    def protect(self, address: int, size: int, access: int) -> None:
        if _LIBC.mprotect(address, size, access):
            raise OSError(ctypes.get_errno(), "mprotect")

    def hit(self, address: int) -> str:
        """What an access that failed was to, if it was to a guard of this memory."""
        for guard, side in ((self.before, "before"), (self.after, "behind")):
            if guard <= address < guard + GUARD:
                self.protect(address // PAGE * PAGE, PAGE, _BOTH)
                near = self.address - address if side == "before" else address - self.address - self.size + 1
                return f"{near} bytes {side} {self.name} ({self.size} bytes)"
        return ""

    def spoiled(self) -> list[str]:
        """Where something was written between the buffer and its guards."""
        return [f"a write beside {self.name} ({self.size} bytes), in its padding" for part in self.slack if np.any(part != POISON)]

    def close(self) -> None:
        """Accessible again, and freed with its last view."""
        for guard in (self.before, self.after):
            self.protect(guard, GUARD, _BOTH)


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc on 64-bit Linux."""

    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64 * 16), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@contextmanager
def faults(memories: Sequence[Any]) -> Iterator[list[str]]:
    """The accesses outside of memories while the block runs: filled as they happen."""
    found: list[str] = []
    before = _Action()

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_uint64.from_address(info + 16).value  # si_addr
        what = next(filter(None, (m.hit(address) for m in memories)), "")
        if not what:
            _LIBC.sigaction(signal.SIGSEGV, ctypes.byref(before), None)  # it happens again, and is handled by that
            return
        verb = "an access"
        if platform.machine() == "x86_64":  # bit 1 of the error code, register 19 of the context
            verb = "a write" if ctypes.c_uint64.from_address(context + 40 + 19 * 8).value & 2 else "a read"
        found.append(f"{verb} {what}")

    handler = _HANDLER(handle)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=4)  # SA_SIGINFO
    _LIBC.sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(before))
    try:
        yield found
    finally:
        _LIBC.sigaction(signal.SIGSEGV, ctypes.byref(before), None)
        found += [what for m in memories for what in m.spoiled()]


@contextmanager
def between_guards(arrays: Mapping[str, np.ndarray], at_start: bool = False) -> Iterator[tuple[list[np.ndarray], list[str]]]:
    """(copies of named arrays that lie between guards, the accesses outside of them); copies are only good inside of the block."""
    memories = [Memory(name, a.nbytes, a.itemsize, at_start) for name, a in arrays.items()]
    copies = [m.data.view(a.dtype).reshape(a.shape) for m, a in zip(memories, arrays.values(), strict=True)]
    for copy, array in zip(copies, arrays.values(), strict=True):
        copy[...] = array
    try:
        with faults(memories) as found:
            yield copies, found
    finally:
        for memory in memories:
            memory.close()


# ---------------------------------------------------------------- models


class Regions(list[tuple[str, int, int, int]]):
    """(name, start, offset, size) of every value in a workspace laid out by `spread`: its guard starts at `start`, bytes from the start of
    the workspace; between its end and the next guard lie less bytes than an element has."""

    size = 0


@contextmanager
def spread() -> Iterator[Regions]:
    """Models compiled within keep every value of the workspace in pages of its own, with a guard before and behind, where all sizes are
    known; no value is written over another. The regions are those of the model compiled last, none where sizes are symbolic."""
    pipeline: Any = importlib.import_module("tcomp.pipeline")
    plan_memory, regions = memory_plan.plan_memory, Regions()

    def plan(graph: Graph, temporaries: Mapping[Any, Sequence[Dim]], in_place: Any) -> memory_plan.Plan:
        regions.clear()
        planned = plan_memory(graph, temporaries, None)
        sizes = [
            *(memory_plan.byte_size(v) for v in planned.offset),
            *(size for node in planned.temporaries for size in temporaries.get(node, ())),
        ]
        if not all(isinstance(size, int) for size in sizes):
            return plan_memory(graph, temporaries, in_place)
        end = 0

        def place(name: str, size: Dim, align: int) -> int:
            nonlocal end
            assert isinstance(size, int)
            start, end = end, end + GUARD + -(-size // PAGE) * PAGE
            regions.append((name, start, (end - size) // align * align, size))
            return regions[-1][2]

        offset = {v: place(f"`{v.name}` in the workspace", memory_plan.byte_size(v), itemsize(v.dtype)) for v in planned.offset}
        scratch = {
            node: [
                place(f"temporary {n} of `{node.name}`", size, memory_plan.ALIGNMENT) for n, size in enumerate(temporaries.get(node, ()))
            ]
            for node in planned.temporaries
        }
        regions.size = end
        return memory_plan.Plan(dict(offset), {node: list(places) for node, places in scratch.items()}, end, None, planned.storage)

    pipeline.plan_memory = plan
    try:
        yield regions
    finally:
        pipeline.plan_memory = plan_memory


class _Workspace:
    """A workspace laid out by `spread`."""

    def __init__(self, memory: Memory, regions: Regions) -> None:
        self.memory, self.regions, self.closed = memory, list(regions), list[int]()
        for _, start, offset, size in self.regions:
            memory.protect(memory.address + start, GUARD, _NONE)
            memory.data[start + GUARD : offset] = POISON
            memory.data[offset + size : -(-(offset + size) // PAGE) * PAGE] = POISON

    def hit(self, address: int) -> str:
        at = address - self.memory.address
        for n, (name, start, _, size) in enumerate(self.regions):
            if start <= at < start + GUARD:
                self.memory.protect(address // PAGE * PAGE, PAGE, _BOTH)
                behind = self.regions[n - 1] if n else None
                nearer = behind is not None and at - start < GUARD // 2
                if nearer and behind is not None:
                    return f"{at - behind[2] - behind[3] + 1} bytes behind {behind[0]} ({behind[3]} bytes)"
                return f"{start + GUARD - at} bytes before {name} ({size} bytes)"
        return self.memory.hit(address)

    def spoiled(self) -> list[str]:
        found = []
        for name, start, offset, size in self.regions:
            parts = self.memory.data[start + GUARD : offset], self.memory.data[offset + size : -(-(offset + size) // PAGE) * PAGE]
            if any(np.any(part != POISON) for part in parts):
                found.append(f"a write beside {name} ({size} bytes), in its padding")
        return found

    def close(self) -> None:
        self.memory.protect(self.memory.before, self.memory.after + GUARD - self.memory.before, _BOTH)


def run_guarded(
    model: LoadedModel, inputs: Mapping[str, Any], at_start: bool = False, regions: Regions | None = None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """(outputs, faults) of one call of a model whose inputs, outputs, weights, workspace and dims all lie between guards; alignment is that
    of the elements, which is less than callers give. The model has one thread, or calls no threads: there is no pool.
    Raises `InputError` as a run does."""
    assert isinstance(model, Module)
    values = [admit(inputs[spec.name], *admission) for spec, admission in zip(model.inputs, model._admission, strict=True)]
    plan = model._make_plan((*[value.shape for value in values], *[values[n].tobytes() for n in model._deciding]), values)
    code, weights = model._code, model.artifact.weights
    placed = [Memory(f"input `{spec.name}`", v.nbytes, v.itemsize, at_start) for spec, v in zip(model.inputs, values, strict=True)]
    for memory, value in zip(placed, values, strict=True):
        memory.data[:] = value.reshape(-1).view(np.uint8)
    results = [
        Memory(f"output `{s.name}`", size, d.itemsize, at_start) for s, (_, d, size) in zip(model.outputs, plan.outputs, strict=True)
    ]
    constants = Memory("the weights", weights.size, 8, at_start)
    constants.data[:] = weights
    workspace = Memory("the workspace", plan.workspace, 64 if not regions else PAGE, at_start)
    dims = Memory("dims", 8 * max(1, len(plan.dims)), 8, at_start)
    dims.data.view(np.int64)[: len(plan.dims)] = plan.dims
    tables = [(ctypes.c_void_p * len(group))(*(m.address for m in group)) for group in (placed, results)]
    call = Call(*map(ctypes.addressof, tables), constants.address, workspace.address, dims.address)
    parts = [*placed, *results, constants, dims, _Workspace(workspace, regions) if regions else workspace]
    names = model.artifact.notes.get("kernels", [])
    try:
        with faults(parts) as found:
            status = code.run(ctypes.addressof(call))
        if status:
            model._fail(status, call.index, call.extent)
        outputs = [m.data.view(d).reshape(shape).copy() for m, (shape, d, _) in zip(results, plan.outputs, strict=True)]
        if model._grows:
            outputs = model._slice(outputs, plan, dims.data.view(np.int64)[: len(plan.dims)].tolist())
    finally:
        for part in parts:
            part.close()
    where = f" (kernels {', '.join(map(str, names))})"[:300] if found else ""
    return dict(zip(model._output_names, outputs, strict=True)), [fault + where for fault in found]
