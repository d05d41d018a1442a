"""The launch plan of a CUDA artifact: parsed and checked, and executed on a device.

The format is that of the code section: kernels with their launches, and steps. Sizes and offsets are
small expressions over the artifact's dims, evaluated here; whatever is malformed is an `ArtifactError`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tcomp.errors import ArtifactError

_DEPTH = 64  # of nested expressions and steps
_LIMIT = 1 << 62
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "truncdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0,
    "truncmod": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1) if b else 0,
    "min": min,
    "max": max,
}
Size = Any  # an int, or a list: ["dim", n], ["scalar", n], ["loop", name], [operator, Size, Size]
Values = Mapping[tuple[str, int | str], int]


class Device(Protocol):
    """What a plan is executed on. Addresses are integers; operations happen in order."""

    def launch(self, function: Any, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[int]) -> None:
        """Launch a loaded function."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes on the device."""

    def read_byte(self, address: int) -> int:
        """The byte at an address, once all earlier operations have ended."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of a kernel: see the format. `shared`: bytes of shared memory that each block asks for at the launch."""

    function: str
    grid: tuple[Size, ...]
    block: tuple[int, int, int]
    buffers: tuple[int, ...]
    scalars: tuple[int, ...]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class KernelCode:
    """Machine code by architecture, portable code, and the launches."""

    launches: tuple[Launch, ...]
    cubins: Mapping[str, bytes]
    ptx: bytes


class Plan:
    """Steps over the memories of a run."""

    def __init__(self, code: bytes, dims: int, inputs: int, outputs: int) -> None:
        """Raises ArtifactError for code that is no plan of a model with so many dims, inputs and outputs."""
        try:
            root = json.loads(code.decode())
        except (ValueError, RecursionError) as problem:
            raise ArtifactError("the code of the artifact is no launch plan", why=str(problem)) from None
        self._counts = {"input": inputs, "output": outputs, "weights": 1, "workspace": 1}
        self._dims = dims
        top = _Record(root, "plan")
        kernels = top.get("kernels", dict)
        self.kernels = {str(name): _kernel(_Record(entry, f"kernel {name}")) for name, entry in kernels.items()}
        self.steps = top.get("steps", list)
        self.workspace: Size = top.get("workspace", object)
        self.outputs: list[list[Size]] = top.get("outputs", list)
        names: set[int | str] = set(range(dims))
        _check_size(self.workspace, {"dim": names}, "workspace")
        if len(self.outputs) != outputs:
            _wrong("outputs", f"{outputs} shapes")
        for shape in self.outputs:
            for d in shape if isinstance(shape, list) else _wrong("outputs", "lists"):
                _check_size(d, {"dim": names}, "outputs")
        self._check_steps(self.steps, {"dim": names, "loop": set()}, 0)

    @property
    def branches(self) -> bool:
        """Whether what is launched depends on values that the model computes."""

        def any_in(steps: list[Any]) -> bool:
            return any("branch" in s or ("repeat" in s and (s["condition"] is not None or any_in(s["body"]))) for s in steps)

        return any_in(self.steps)

    def count(self, dims: Sequence[int]) -> int:
        """How many kernels a run calls if no loop ends early."""
        values: dict[tuple[str, int | str], int] = {("dim", n): d for n, d in enumerate(dims)}

        def total(steps: list[Any]) -> int:
            found = 0
            for s in steps:
                if "call" in s:
                    found += 1
                elif "branch" in s:
                    found += max(total(s["then"]), total(s["else"]))
                elif "repeat" in s:
                    values["loop", s["repeat"]] = 0
                    found += max(0, evaluate(s["trips"], values)) * total(s["body"])
            return found

        return total(self.steps)

    def execute(
        self,
        device: Device,
        functions: Mapping[str, Any],
        dims: Sequence[int],
        place: Mapping[tuple[str, int], int],
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """Run the steps. `functions` are loaded functions by name, `place` the addresses of the memories: ("input", n), ("output", n),
        ("weights", 0), ("workspace", 0). `watch` is told the number of each call in program order, before it is made."""
        _Run(self, device, functions, place, {("dim", n): d for n, d in enumerate(dims)}, watch).steps(self.steps, 0)

    # ---- checks ----------------------------------------------------------------------------------

    def _check_steps(self, steps: Any, names: dict[str, set[int | str]], depth: int) -> None:
        if not isinstance(steps, list) or depth > _DEPTH:
            _wrong("steps", "a list, not nested too deeply")
        for value in steps:
            s = _Record(value, "step")
            if "call" in s.value:
                kernel = self.kernels.get(s.get("call", str)) or _wrong("call", "the name of a kernel")
                for p in s.get("buffers", list):
                    self._check_place(p, names)
                for d in s.get("scalars", list):
                    _check_size(d, names, "call")
                for launch in kernel.launches:
                    if any(n >= len(value["buffers"]) for n in launch.buffers) or any(n >= len(value["scalars"]) for n in launch.scalars):
                        _wrong("call", "as many buffers and scalars as its launches take")
                    for g in launch.grid:
                        _check_size(g, {"scalar": set(range(len(value["scalars"])))}, "grid")
            elif "branch" in s.value:
                self._check_place(s.value["branch"], names)
                self._check_steps(s.get("then", list), names, depth + 1)
                self._check_steps(s.get("else", list), names, depth + 1)
            elif "repeat" in s.value:
                _check_size(s.get("trips", object), names, "trips")
                inside = {**names, "loop": names["loop"] | {s.get("repeat", str)}}
                self._check_steps(s.get("body", list), inside, depth + 1)
                if s.value.get("condition") is not None:
                    self._check_place(s.value["condition"], inside)
                else:
                    s.value["condition"] = None
            elif "copy" in s.value:
                self._check_place(s.value["copy"], names)
                self._check_place(s.get("from", list), names)
                _check_size(s.get("bytes", object), names, "copy")
            elif "index" in s.value:
                self._check_place(s.value["index"], names)
                _check_size(s.get("value", object), names, "index")
                if "tcomp_set_index" not in self.kernels:
                    _wrong("index", "a kernel tcomp_set_index")
            else:
                _wrong("step", "a call, branch, repeat, copy or index")

    def _check_place(self, p: Any, names: Mapping[str, set[int | str]]) -> None:
        if not isinstance(p, list) or len(p) != 3 or not isinstance(p[0], str) or type(p[1]) is not int:
            _wrong("place", "[memory, index, offset]")
        if not 0 <= p[1] < self._counts.get(p[0], 0):
            _wrong("place", "a memory that the model has")
        _check_size(p[2], names, "place")


class _Run:
    """One execution of a plan."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        functions: Mapping[str, Any],
        place: Mapping[tuple[str, int], int],
        values: dict[tuple[str, int | str], int],
        watch: Callable[[int], None] | None,
    ) -> None:
        self.plan, self.device, self.functions, self.place, self.values, self.watch = plan, device, functions, place, values, watch

    def steps(self, steps: list[Any], number: int) -> int:
        """Runs steps of which the first call has this number; returns the number after the last."""
        for s in steps:
            if "call" in s:
                if self.watch is not None:
                    self.watch(number)
                self.call(s["call"], [self.address(p) for p in s["buffers"]], [evaluate(d, self.values) for d in s["scalars"]])
                number += 1
            elif "branch" in s:
                taken = self.device.read_byte(self.address(s["branch"])) != 0
                between, after = number + _calls(s["then"]), number + _calls(s["then"]) + _calls(s["else"])
                self.steps(s["then"] if taken else s["else"], number if taken else between)
                number = after
            elif "repeat" in s:
                number = self.repeat(s, number)
            elif "copy" in s:
                size = evaluate(s["bytes"], self.values)
                if size > 0:
                    self.device.copy(self.address(s["copy"]), self.address(s["from"]), size)
            else:
                self.call("tcomp_set_index", [self.address(s["index"])], [evaluate(s["value"], self.values)])
        return number

    def repeat(self, s: dict[str, Any], number: int) -> int:
        for iteration in range(evaluate(s["trips"], self.values)):
            self.values["loop", s["repeat"]] = iteration
            self.steps(s["body"], number)
            if s["condition"] is not None and self.device.read_byte(self.address(s["condition"])) == 0:
                break
        return number + _calls(s["body"])

    def call(self, symbol: str, buffers: Sequence[int], scalars: Sequence[int]) -> None:
        known: Values = {("scalar", n): v for n, v in enumerate(scalars)}
        for launch in self.plan.kernels[symbol].launches:
            x, y, z = (evaluate(g, known) for g in launch.grid)
            if min(x, y, z) > 0:
                arguments = [buffers[n] for n in launch.buffers] + [scalars[n] for n in launch.scalars]
                self.device.launch(self.functions[launch.function], (x, y, z), launch.block, arguments)

    def address(self, p: list[Any]) -> int:
        return self.place[p[0], p[1]] + evaluate(p[2], self.values)


def _calls(steps: list[Any]) -> int:
    """The calls of a profile: each call in the text of the plan once."""
    return sum(
        1 if "call" in s else _calls(s["then"]) + _calls(s["else"]) if "branch" in s else _calls(s["body"]) if "repeat" in s else 0
        for s in steps
    )


def labels(steps: list[Any]) -> list[str]:
    """The labels of the calls, in the order of their numbers."""
    found: list[str] = []
    for s in steps:
        if "call" in s:
            found.append(str(s.get("label", s["call"])))
        for part in ("then", "else", "body"):
            found += labels(s.get(part, []))
    return found


def evaluate(size: Size, values: Values) -> int:
    """The value of a size expression (checked before)."""
    if type(size) is int:
        return size
    if size[0] in _OPERATORS:
        result = _OPERATORS[size[0]](evaluate(size[1], values), evaluate(size[2], values))
        if abs(result) > _LIMIT:
            raise ArtifactError("a size of the launch plan is beyond all memory", why=f"{size} is {result}")
        return result
    return values[size[0], size[1]]


def size_of(size: Any, dims: Sequence[int]) -> int:
    """The value of an unchecked size expression over the artifact's dims. Raises ArtifactError if it is malformed."""
    _check_size(size, {"dim": set(range(len(dims)))}, "a size")
    return evaluate(size, {("dim", n): d for n, d in enumerate(dims)})


# ---------------------------------------------------------------- reading


def _wrong(where: str, expected: str) -> NoReturn:
    raise ArtifactError(f"the launch plan of the artifact is malformed: {where} should be {expected}")


class _Record:
    """A JSON object whose fields are checked on access."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _wrong(where, "an object")
        self.value: dict[str, Any] = value
        self.where = where

    def get(self, key: str, kind: type) -> Any:
        if key not in self.value or not isinstance(self.value[key], kind):
            _wrong(f"{self.where}.{key}", f"of type {kind.__name__}")
        return self.value[key]

    def integers(self, key: str, most: int) -> tuple[int, ...]:
        values = self.get(key, list)
        if any(type(v) is not int or not 0 <= v <= most for v in values):
            _wrong(f"{self.where}.{key}", "small numbers")
        return tuple(values)

    def integer(self, key: str, most: int) -> int:
        value = self.get(key, int)
        if type(value) is not int or not 0 <= value <= most:
            _wrong(f"{self.where}.{key}", "a small number")
        return value


def _check_size(size: Any, names: Mapping[str, set[int | str]], where: str, depth: int = 0) -> None:
    if type(size) is int and abs(size) <= _LIMIT:
        return
    if not isinstance(size, list) or depth > _DEPTH or not size or not isinstance(size[0], str):
        _wrong(where, "a size")
    if size[0] in _OPERATORS:
        if len(size) != 3:
            _wrong(where, "an operator with two operands")
        _check_size(size[1], names, where, depth + 1)
        _check_size(size[2], names, where, depth + 1)
    elif len(size) != 2 or not isinstance(size[1], int | str) or size[1] not in names.get(size[0], set()):
        _wrong(where, "a size over known dims")


def _kernel(entry: _Record) -> KernelCode:
    launches = []
    for value in entry.get("launches", list):
        r = _Record(value, f"{entry.where}.launches")
        block, grid = r.integers("block", 1024), r.get("grid", list)
        if len(block) != 3 or len(grid) != 3 or not all(block):
            _wrong(r.where, "three extents of grid and block")
        (shared,) = _Record({"shared": [r.get("shared", int)]}, r.where).integers("shared", 1 << 20)
        launches.append(
            Launch(r.get("function", str), tuple(grid), block, r.integers("buffers", 4096), r.integers("scalars", 4096), shared)
        )
    try:
        cubins = {str(arch): base64.b64decode(text, validate=True) for arch, text in entry.get("cubin", dict).items()}
        return KernelCode(tuple(launches), cubins, base64.b64decode(entry.get("ptx", str), validate=True))
    except (binascii.Error, TypeError, ValueError) as problem:
        raise ArtifactError("the machine code of the artifact is damaged", where=entry.where, why=str(problem)) from None
