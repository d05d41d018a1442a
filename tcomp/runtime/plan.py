"""The launch plan of a CUDA artifact: parsed and checked, and executed on a device.

The format is that of the code section (`tcomp.codegen.cuda.launch_plan`): kernels with their launches, and steps. Sizes and offsets are
small expressions over the artifact's dims, evaluated here; whatever is malformed is an `ArtifactError`.
"""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

from tcomp.errors import ArtifactError
from tcomp.runtime.schema import LIMIT, Where, load_json, read, refuse

MAX_DEPTH = 64  # of nested expressions and steps: far below Python's limit of recursion
MAX_BUFFERS = 4096  # of a kernel; the same for scalars
MAX_BLOCK = 1024  # threads of a block along an axis, by CUDA
MAX_SHARED = 1 << 20  # bytes that a block may ask for: more than any GPU has

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
Values = dict[tuple[str, int | str], int]
Places = Mapping[tuple[str, int], int]
Watch = Callable[[int], None]
Names = Mapping[str, set[int | str]]  # the dims, scalars and loops that a size may mention
Array = tuple[Any, ...]
Operand = Annotated[int, range(MAX_BUFFERS + 1)]


class Device(Protocol):
    """What a plan is executed on. Addresses are those of the device."""

    def launch(self, function: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[int]) -> None:
        """Start a loaded function."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes."""

    def read_byte(self, address: int) -> int:
        """The byte at an address, once all that was started has been done."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of a kernel: see the format. `shared`: bytes of shared memory that each block asks for at the launch; `reports`:
    whether it takes the place for what is out of range, and the number of the call."""

    function: str
    grid: tuple[Size, ...]
    block: tuple[Annotated[int, range(1, MAX_BLOCK + 1)], ...]
    buffers: tuple[Operand, ...]
    scalars: tuple[Operand, ...]
    shared: Annotated[int, range(MAX_SHARED + 1)] = 0
    reports: bool = False


@dataclass(frozen=True, slots=True)
class KernelCode:
    """The launches, machine code by architecture, and portable code."""

    launches: tuple[Launch, ...]
    cubins: Mapping[str, bytes]
    ptx: bytes


class Plan:
    """Steps over the memories of a run.

    kernels: their code by name
    outputs: the shapes of the outputs, as Sizes
    labels: those of the calls, each in the text of the plan once
    branches: whether what is launched depends on values that the model computes
    reports: whether kernels report values that are out of range
    """

    def __init__(self, code: bytes, dims: int, inputs: int, outputs: int) -> None:
        """Raises ArtifactError for code that is not a plan of a model with so many dims, inputs and outputs."""
        content = read(dict, load_json(code, "the launch plan"), "plan")
        self._memories = {"input": inputs, "output": outputs, "weights": 1, "workspace": 1}
        kernels: dict[str, Any] = read(dict, content.get("kernels"), "plan", "kernels")
        self.kernels = {name: _kernel(entry, name) for name, entry in kernels.items()}
        self.reports = any(launch.reports for kernel in self.kernels.values() for launch in kernel.launches)
        self._workspace, self._sizes = content.get("workspace"), read(Array, content.get("sizes"), "plan", "sizes")
        self.outputs = read(tuple[tuple[Any, ...], ...], content.get("outputs"), "plan", "outputs")
        self.labels: list[str] = []
        self.branches = False
        names: Names = {"dim": set(range(dims))}
        if len(self.outputs) != outputs:
            refuse(("plan", "outputs"), f"{outputs} shapes")
        self._checks = read(Array, content.get("checks", []), "plan", "checks")
        for size in (self._workspace, *self._sizes, *self._checks, *(d for shape in self.outputs for d in shape)):
            _check_size(size, names, ("plan",))
        self._steps = self._checked(content.get("steps"), {**names, "loop": set()}, "plan", "steps")

    def workspace_size(self, values: Values) -> int:
        """Bytes of workspace; below 0 if no run may happen, as `tcomp_plan` says why."""
        try:
            sizes = [evaluate(size, values) for size in (self._workspace, *self._sizes)]
            failed = (-3 - n for n, check in enumerate(self._checks) if evaluate(check, values))
            return -1 if min(sizes) < 0 else next(failed, sizes[0])
        except ArtifactError:
            return -2

    def count(self, dims: Sequence[int]) -> int:
        """How many kernels a run calls if no loop ends early."""
        values = dim_values(dims)

        def calls(step: dict[str, Any]) -> int:
            if "branch" in step:
                return max(sum(map(calls, step["then"])), sum(map(calls, step["else"])))
            if "repeat" in step:
                values["loop", step["repeat"]] = 0
                return max(0, evaluate(step["trips"], values)) * sum(map(calls, step["body"]))
            return int("call" in step)

        return sum(map(calls, self._steps))

    def execute(
        self, device: Device, functions: Mapping[str, Any], dims: Sequence[int], place: Places, watch: Watch = lambda number: None
    ) -> None:
        """Run the steps. `functions` are loaded functions by name, `place` the addresses of the memories: ("input", n), ("output", n),
        ("weights", 0), ("workspace", 0), and ("report", 0) if the plan `reports`. `watch` gets the number of each call (an index of
        `labels`) before it is made."""
        values = dim_values(dims)

        def address(p: list[Any]) -> int:
            return place[p[0], p[1]] + evaluate(p[2], values)

        def call(symbol: str, buffers: Sequence[int], scalars: Sequence[int], number: int = 0) -> None:
            known: Values = {("scalar", n): v for n, v in enumerate(scalars)}
            for launch in self.kernels[symbol].launches:
                grid = tuple(evaluate(extent, known) for extent in launch.grid)
                if min(grid) > 0:
                    arguments = [buffers[n] for n in launch.buffers] + [scalars[n] for n in launch.scalars]
                    arguments += [place["report", 0], number] if launch.reports else []
                    device.launch(functions[launch.function], grid, launch.block, arguments)

        def run(steps: Sequence[dict[str, Any]]) -> None:
            for s in steps:
                if "call" in s:
                    watch(s["number"])
                    call(s["call"], [address(p) for p in s["buffers"]], [evaluate(d, values) for d in s["scalars"]], s["number"])
                elif "branch" in s:
                    run(s["then"] if device.read_byte(address(s["branch"])) else s["else"])
                elif "repeat" in s:
                    for iteration in range(evaluate(s["trips"], values)):
                        values["loop", s["repeat"]] = iteration
                        run(s["body"])
                        if s["condition"] is not None and not device.read_byte(address(s["condition"])):
                            break
                elif "copy" in s:
                    if (size := evaluate(s["bytes"], values)) > 0:
                        device.copy(address(s["copy"]), address(s["from"]), size)
                else:
                    call("tcomp_set_index", [address(s["index"])], [evaluate(s["value"], values)])

        run(self._steps)

    def _checked(self, value: Any, names: Names, *where: str | int) -> list[dict[str, Any]]:
        """Steps, with the numbers of their calls. `names` are what their sizes may mention."""
        if len(where) > 2 * MAX_DEPTH:
            refuse(where[:2], f"no more than {MAX_DEPTH} nested steps")
        steps = read(Array, value, *where)
        return [self._checked_step(read(dict, step, *where, n), names, *where, n) for n, step in enumerate(steps)]

    def _checked_step(self, s: dict[str, Any], names: Names, *where: str | int) -> dict[str, Any]:
        places: Sequence[Any] = ()
        sizes: Sequence[Any] = ()
        match s:
            case {"call": symbol}:
                kernel = self.kernels.get(read(str, symbol, *where, "call")) or refuse((*where, "call"), "the name of a kernel")
                places, sizes = (read(Array, s.get(key), *where, key) for key in ("buffers", "scalars"))
                for launch in kernel.launches:
                    if max(launch.buffers, default=-1) >= len(places) or max(launch.scalars, default=-1) >= len(sizes):
                        refuse((*where, "call"), "as many buffers and scalars as its launches take")
                    for size in launch.grid:
                        _check_size(size, {"scalar": set(range(len(sizes)))}, where)
                s["number"] = len(self.labels)
                self.labels.append(str(s.get("label", symbol)))
            case {"branch": place}:
                places, self.branches = [place], True
                s |= {key: self._checked(s.get(key), names, *where, key) for key in ("then", "else")}
            case {"repeat": name}:
                _check_size(s.get("trips"), names, where)
                names = {**names, "loop": names["loop"] | {read(str, name, *where, "repeat")}}
                s["body"] = self._checked(s.get("body"), names, *where, "body")
                if s.setdefault("condition", None) is not None:
                    places, self.branches = [s["condition"]], True
            case {"copy": target}:
                places, sizes = [target, s.get("from")], [s.get("bytes")]
            case {"index": target} if "tcomp_set_index" in self.kernels:
                places, sizes = [target], [s.get("value")]
            case _:
                refuse(where, "a call, branch, repeat, copy, or an index with a kernel tcomp_set_index")
        for place in places:
            match place:
                case [str(memory), int(number), offset] if type(number) is int and 0 <= number < self._memories.get(memory, 0):
                    _check_size(offset, names, where)
                case _:
                    refuse(where, f"[memory, index, offset] of a memory that the model has, not {reprlib.repr(place)}")
        for size in sizes:
            _check_size(size, names, where)
        return s


def dim_values(dims: Sequence[int]) -> Values:
    """What sizes over the dims are evaluated with."""
    return {("dim", n): d for n, d in enumerate(dims)}


def evaluate(size: Size, values: Values) -> int:
    """The value of a size expression (checked before)."""
    if type(size) is int:
        return size
    if size[0] not in _OPERATORS:
        return values[size[0], size[1]]
    result = _OPERATORS[size[0]](evaluate(size[1], values), evaluate(size[2], values))
    if abs(result) > LIMIT:
        raise ArtifactError("a size of the launch plan is beyond all memory", why=f"{size} is {result}")
    return result


def size_of(size: Any, dims: Sequence[int]) -> int:
    """The value of an unchecked size expression over the artifact's dims. Raises ArtifactError if it is malformed."""
    _check_size(size, {"dim": set(range(len(dims)))}, ("a size",))
    return evaluate(size, dim_values(dims))


def _check_size(size: Any, names: Names, where: Where, depth: int = 0) -> None:
    match size:
        case int() if type(size) is int and abs(size) <= LIMIT:
            return
        case [str(operator), left, right] if operator in _OPERATORS and depth <= MAX_DEPTH:
            _check_size(left, names, where, depth + 1)
            _check_size(right, names, where, depth + 1)
        case [str(kind), int() | str() as name] if name in names.get(kind, ()):
            return
        case _:
            refuse(where, f"a size over known dims: a number, [dim, n], or [operator, size, size], not {reprlib.repr(size)}")


def _kernel(entry: Any, name: str) -> KernelCode:
    fields = read(dict, entry, "kernels", name)
    launches = read(tuple[Launch, ...], fields.get("launches"), "kernels", name, "launches")
    if any(len(launch.block) != 3 or len(launch.grid) != 3 for launch in launches):
        refuse(("kernels", name, "launches"), "three extents of grid and block")
    cubins = read(dict, fields.get("cubin"), "kernels", name, "cubin")
    decode = partial(base64.b64decode, validate=True)
    try:
        return KernelCode(launches, {arch: decode(text) for arch, text in cubins.items()}, decode(fields["ptx"]))
    except (KeyError, TypeError, ValueError) as problem:  # binascii's errors are among these
        raise ArtifactError("the machine code of the artifact is damaged", where=name, why=str(problem)) from None
