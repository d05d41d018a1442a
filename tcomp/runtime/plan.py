"""The launch plan of a CUDA artifact: parsed and checked, and executed on a device.

The format is that of the code section (`tcomp.codegen.cuda.launch_plan`): kernels with their launches, and steps. Sizes and offsets are
small expressions over the artifact's dims, evaluated here; whatever is malformed is an `ArtifactError`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tcomp.errors import ArtifactError
from tcomp.runtime.schema import LIMIT, load_json, read, refuse

if TYPE_CHECKING:
    from tcomp.runtime.cuda import CupyDevice

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
Values = Mapping[tuple[str, int | str], int]
Names = Mapping[str, set[int | str]]  # the dims, scalars and loops that a size may mention
Operand = Annotated[int, range(MAX_BUFFERS + 1)]


@dataclass(frozen=True, slots=True)
class Launch:
    """One function of a kernel: see the format. `shared`: bytes of shared memory that each block asks for at the launch."""

    function: str
    grid: tuple[Size, ...]
    block: tuple[Annotated[int, range(1, MAX_BLOCK + 1)], ...]
    buffers: tuple[Operand, ...]
    scalars: tuple[Operand, ...]
    shared: Annotated[int, range(MAX_SHARED + 1)] = 0


@dataclass(frozen=True, slots=True)
class KernelCode:
    """The launches, machine code by architecture, and portable code."""

    launches: tuple[Launch, ...]
    cubins: Mapping[str, bytes]
    ptx: bytes


@dataclass(frozen=True, slots=True)
class _Content:
    """The objects of a plan, whose parts are checked below."""

    kernels: dict[str, Any]
    steps: tuple[Any, ...]
    workspace: Any
    outputs: tuple[tuple[Any, ...], ...]


class Plan:
    """Steps over the memories of a run.

    kernels: their code by name
    workspace: Size, its bytes
    outputs: the shapes of the outputs, as Sizes
    labels: those of the calls, each in the text of the plan once
    branches: whether what is launched depends on values that the model computes
    """

    def __init__(self, code: bytes, dims: int, inputs: int, outputs: int) -> None:
        """Raises ArtifactError for code that is no plan of a model with so many dims, inputs and outputs."""
        content = read(_Content, load_json(code, "the launch plan"), "plan")
        self._memories = {"input": inputs, "output": outputs, "weights": 1, "workspace": 1}
        self.kernels = {name: _kernel(entry, name) for name, entry in content.kernels.items()}
        self.workspace, self.outputs = content.workspace, content.outputs
        self.labels: list[str] = []
        self.branches = False
        names: Names = {"dim": set(range(dims))}
        if len(self.outputs) != outputs:
            refuse(("plan", "outputs"), f"{outputs} shapes")
        for size in (self.workspace, *(d for shape in self.outputs for d in shape)):
            _check_size(size, names, "a size")
        self._steps = [self._checked(step, {**names, "loop": set()}, 0) for step in content.steps]

    def count(self, dims: Sequence[int]) -> int:
        """How many kernels a run calls if no loop ends early."""
        values: dict[tuple[str, int | str], int] = {("dim", n): d for n, d in enumerate(dims)}

        def calls(step: dict[str, Any]) -> int:
            if "branch" in step:
                return max(sum(map(calls, step["then"])), sum(map(calls, step["else"])))
            if "repeat" in step:
                values["loop", step["repeat"]] = 0
                return max(0, evaluate(step["trips"], values)) * sum(map(calls, step["body"]))
            return int("call" in step)

        return sum(map(calls, self._steps))

    def execute(
        self,
        device: CupyDevice,
        functions: Mapping[str, Any],
        dims: Sequence[int],
        place: Mapping[tuple[str, int], int],
        watch: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Run the steps. `functions` are loaded functions by name, `place` the addresses of the memories: ("input", n), ("output", n),
        ("weights", 0), ("workspace", 0). `watch` is told the number of each call (an index of `labels`) before it is made."""
        values: dict[tuple[str, int | str], int] = {("dim", n): d for n, d in enumerate(dims)}

        def address(p: list[Any]) -> int:
            return place[p[0], p[1]] + evaluate(p[2], values)

        def call(symbol: str, buffers: Sequence[int], scalars: Sequence[int]) -> None:
            known: Values = {("scalar", n): v for n, v in enumerate(scalars)}
            for launch in self.kernels[symbol].launches:
                grid = tuple(evaluate(extent, known) for extent in launch.grid)
                if min(grid) > 0:
                    arguments = [buffers[n] for n in launch.buffers] + [scalars[n] for n in launch.scalars]
                    device.launch(functions[launch.function], grid, launch.block, arguments)

        def run(steps: Sequence[dict[str, Any]]) -> None:
            for s in steps:
                if "call" in s:
                    watch(s["number"])
                    call(s["call"], [address(p) for p in s["buffers"]], [evaluate(d, values) for d in s["scalars"]])
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

    def _checked(self, value: Any, names: Names, depth: int) -> dict[str, Any]:
        """A step, with the numbers of its calls. `names` are what its sizes may mention."""
        where = f"a step at depth {depth}"
        s = dict(read(dict, value, where))
        if depth > MAX_DEPTH:
            refuse((where,), f"no more than {MAX_DEPTH} nested steps")

        def steps(key: str, names: Names) -> list[dict[str, Any]]:
            return [self._checked(step, names, depth + 1) for step in read(tuple[Any, ...], s.get(key), where, key)]

        if "call" in s:
            kernel = self.kernels.get(read(str, s["call"], where, "call")) or refuse((where, "call"), "the name of a kernel")
            buffers, scalars = (read(tuple[Any, ...], s.get(key), where, key) for key in ("buffers", "scalars"))
            for place in buffers:
                self._check_place(place, names)
            for size in scalars:
                _check_size(size, names, where)
            for launch in kernel.launches:
                if max(launch.buffers, default=-1) >= len(buffers) or max(launch.scalars, default=-1) >= len(scalars):
                    refuse((where, "call"), "as many buffers and scalars as its launches take")
                for size in launch.grid:
                    _check_size(size, {"scalar": set(range(len(scalars)))}, where)
            s["number"] = len(self.labels)
            self.labels.append(str(s.get("label", s["call"])))
        elif "branch" in s:
            self._check_place(s["branch"], names)
            self.branches = True
            s |= {"then": steps("then", names), "else": steps("else", names)}
        elif "repeat" in s:
            _check_size(s.get("trips"), names, where)
            inside = {**names, "loop": names["loop"] | {read(str, s["repeat"], where, "repeat")}}
            s["body"] = steps("body", inside)
            if s.setdefault("condition", None) is not None:
                self._check_place(s["condition"], inside)
                self.branches = True
        elif "copy" in s:
            self._check_place(s["copy"], names)
            self._check_place(s.get("from"), names)
            _check_size(s.get("bytes"), names, where)
        elif "index" in s and "tcomp_set_index" in self.kernels:
            self._check_place(s["index"], names)
            _check_size(s.get("value"), names, where)
        else:
            refuse((where,), "a call, branch, repeat, copy, or an index with a kernel tcomp_set_index")
        return s

    def _check_place(self, p: Any, names: Names) -> None:
        formed = type(p) is list and len(p) == 3 and type(p[0]) is str and type(p[1]) is int
        if not formed or not 0 <= p[1] < self._memories.get(p[0], 0):
            refuse(("place",), "[memory, index, offset] of a memory that the model has")
        _check_size(p[2], names, "place")


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
    _check_size(size, {"dim": set(range(len(dims)))}, "a size")
    return evaluate(size, {("dim", n): d for n, d in enumerate(dims)})


def _check_size(size: Any, names: Names, where: str, depth: int = 0) -> None:
    if type(size) is int and abs(size) <= LIMIT:
        return
    if type(size) is not list or depth > MAX_DEPTH or not size or type(size[0]) is not str:
        refuse((where,), "a size")
    if size[0] in _OPERATORS:
        if len(size) != 3:
            refuse((where,), "an operator with two operands")
        for operand in size[1:]:
            _check_size(operand, names, where, depth + 1)
    elif len(size) != 2 or not isinstance(size[1], int | str) or size[1] not in names.get(size[0], set()):
        refuse((where,), "a size over known dims")


def _kernel(entry: Any, name: str) -> KernelCode:
    fields = read(dict, entry, "kernels", name)
    launches = read(tuple[Launch, ...], fields.get("launches"), "kernels", name, "launches")
    if any(len(launch.block) != 3 or len(launch.grid) != 3 for launch in launches):
        refuse(("kernels", name, "launches"), "three extents of grid and block")
    cubins = read(dict, fields.get("cubin"), "kernels", name, "cubin")
    try:
        return KernelCode(launches, {arch: base64.b64decode(text, validate=True) for arch, text in cubins.items()},
                          base64.b64decode(fields["ptx"], validate=True))  # fmt: skip
    except (KeyError, TypeError, ValueError) as problem:  # binascii's errors are among these
        raise ArtifactError("the machine code of the artifact is damaged", where=name, why=str(problem)) from None
