"""Random programs of one's own, right and wrong ones: tensor expressions and Python functions whose indices are shifted, reversed,
strided, transposed, wrapped around, guarded or looked up. Which ones are wrong is found by running every iteration in Python.

`python -m tests.own_programs --wrong 200 --right 10000` judges so many: every wrong one is refused, or raises `IndexError` in a call; no
right one is refused, and none has a guard but where an index depends on data. With `--cost`, what guards cost: the instructions that right
programs execute with and without them are counted, at sizes at which a run takes some 10 microseconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tcomp
from tcomp import te
from tcomp.errors import IRError, OutOfRangeError, ProgramError
from tcomp.frontends.python import Program
from tcomp.functions import InPlace
from tcomp.ir import expr as E, loops as L
from tcomp.ir.loops import Kernel
from tcomp.ir.polyhedral.in_range import safe_tensors
from tests.instructions import instructions
from tests.schedules.dice import Dice, Seeded

SIZES = [{"n": n, "m": m} for n, m in ((4, 4), (9, 3), *itertools.product((1, 2, 3, 6), (1, 2, 5, 9)))]
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of the sizes above, for what guards cost
MAX_ELEMENTS = 1 << 31  # of an array; most are of no use, and nothing is stored there
LEAST = 1e-5  # seconds of a run that counts
MANY = 1.01  # times the instructions: such runs are timed
REFUSALS = ("is outside of", "is never in range", "Python counts it from the end")
Numbers = Mapping[str, int]
Run = Callable[[], Any]


class Outside(Exception):
    """An access is out of range."""


@dataclass(frozen=True, eq=False)
class Case:
    """A program: `reference` computes the result for some sizes in Python, or raises `Outside`; `prove` gives the number of guards that the
    compiler puts in, `build` a function of sizes that computes the result natively. `data`: an index depends on data or on a `while`, or is
    not affine. `compare` gives a run with the guards and one without them, where it can be made to take long enough."""

    text: str
    sizes: Sequence[Numbers]
    reference: Callable[[Numbers], np.ndarray]
    prove: Callable[[], int]
    build: Callable[[], Callable[[Numbers], np.ndarray]]
    data: bool = False
    compare: Callable[[], tuple[Run, Run] | None] = lambda: None

    def outside(self) -> list[bool]:
        """For each of the sizes, whether the program leaves an array."""
        return [_raises(Outside, lambda s=s: self.reference(s)) for s in self.sizes]


def _raises(kind: type[Exception], function: Callable[[], Any]) -> bool:
    try:
        function()
    except kind:
        return True
    return False


def judge(case: Case, native: bool) -> str:
    """What the compiler makes of a program: refused, raises, guarded or proved. Raises `AssertionError` where that is wrong."""
    outside = case.outside()
    try:
        guards = case.prove()
        run = case.build() if native or any(outside) else None
    except (IRError, ProgramError) as error:
        assert any(text in str(error) for text in REFUSALS), f"{error}\n{case.text}"
        assert any(outside), f"a right program is refused: {error}\n{case.text}"
        return "refused"
    assert not guards or case.data or any(outside), f"a guard where a proof exists\n{case.text}"
    for sizes, out in zip(case.sizes, outside, strict=True) if run is not None else ():
        if out:
            assert _raises(IndexError, lambda s=sizes: run(s)), f"{sizes} leave an array unnoticed\n{case.text}"
        else:
            np.testing.assert_array_equal(run(sizes), case.reference(sizes), err_msg=case.text)
    return "raises" if any(outside) else "guarded" if guards else "proved"


def cases(seed: str, wrong: bool) -> Iterator[Case]:
    """Programs without end, all of them wrong or all of them right."""
    for number in itertools.count():
        dice = Seeded(f"{seed} {wrong} {number}")
        made = [expression(dice) for _ in range(20)] + programs(dice, 20)
        yield from (case for case in made if any(case.outside()) == wrong)


# ---------------------------------------------------------------- tensor expressions

Index = Callable[[Sequence[Any]], Any]  # of loop variables: integers, or expressions


def index(dice: Dice, count: int) -> tuple[str, Index]:
    """An index over `count` loop variables, as text and as a function."""
    p, q, a, b, c, d = (dice.number(low, high) for low, high in ((0, count - 1), (0, count - 1), (1, 3), (-2, 2), (-2, 3), (2, 4)))
    match dice.number(0, 6):
        case 0 | 1:
            return f"v{p} + {c}", lambda v: v[p] + c
        case 2:
            return f"v{p} * {a} + v{q} * {b} + {c}", lambda v: v[p] * a + v[q] * b + c
        case 3:
            return f"{c} - v{p}", lambda v: c - v[p]
        case 4:
            return f"(v{p} + {c}) // {d}", lambda v: (v[p] + c) // d
        case 5:
            return f"(v{p} * {a} + v{q} + {c}) % {d}", lambda v: (v[p] * a + v[q] + c) % d
    return f"v{p} * {d} + (v{q} + {c}) % {d}", lambda v: v[p] * d + (v[q] + c) % d


def expression(dice: Dice) -> Case:
    """A tensor of a sum of accesses, each in range of its array by itself; then perhaps something is changed."""
    outer = [dice.number(1, 7) for _ in range(dice.number(1, 2))]
    inner = [dice.number(1, 4) for _ in range(dice.number(0, 1))]
    points = [*itertools.product(*map(range, outer + inner))]
    shapes, accesses, texts = [], [], []
    for _ in range(dice.number(1, 3)):
        dims = [index(dice, len(outer + inner)) for _ in range(dice.number(1, 2))]
        lows, highs = [[f([f_(v) for _, f_ in dims][d] for v in points) for d in range(len(dims))] for f in (min, max)]
        slack, guarded = dice.number(0, 1), dice.one_in(3)
        shape = [max(1, high - low + 1 + slack - (dice.number(1, 3) if guarded else 0)) for low, high in zip(lows, highs, strict=True)]
        shift = [-low for low in lows]
        if dice.one_in(4):
            shift[dice.number(0, len(shift) - 1)] += dice.pick(-2, -1, 1, 2)
        elif dice.one_in(5):
            shape.reverse()
        shapes.append(shape)
        beyond = dice.pick(0, 0, 0, 1)  # a guard that lets one element too many pass
        accesses.append(([f for _, f in dims], shift, guarded, beyond))
        texts.append(
            f"A{len(shapes)}{shape}[{', '.join(f'{t} + {s}' for (t, _), s in zip(dims, shift, strict=True))}] {guarded=} {beyond=}"
        )
    staged = dice.one_in(4)

    def value(v: Sequence[Any], read: Callable[[int, list[Any]], Any], select: Callable[..., Any]) -> Any:
        total: Any = 0.0
        for number, (functions, shift, guarded, beyond) in enumerate(accesses):
            at = [f(v) + s for f, s in zip(functions, shift, strict=True)]
            if guarded:
                inside: Any = True
                for i, n in zip(at, shapes[number], strict=True):
                    inside = (0 <= i) & (i < n + beyond) & inside
                total = total + select(inside, lambda n=number, at=at: read(n, at))
            else:
                total = total + read(number, at)
        return total

    given = [np.arange(1, 1 + int(np.prod(s)), dtype=np.float32).reshape(s) % 17 for s in shapes]

    def element(number: int, at: list[int]) -> float:
        if not all(0 <= i < n for i, n in zip(at, shapes[number], strict=True)):
            raise Outside
        return float(given[number][tuple(at)])

    def reference(sizes: Numbers) -> np.ndarray:
        result = np.zeros(outer, np.float32)
        for v in points:
            result[v[: len(outer)]] += value(v, element, lambda inside, read: read() if inside else 0.0)
        return result

    def tensors() -> tuple[list[te.Tensor], te.Tensor]:
        placed = [te.placeholder(s, name=f"A{n}") for n, s in enumerate(shapes)]
        used = [te.compute(t.shape, lambda *i, t=t: t[i] * 1.0, f"{t.name}s") for t in placed] if staged else placed
        axes = [te.reduce_axis(n, f"k{d}") for d, n in enumerate(inner)]

        def body(*i: E.Expr) -> E.Expr:
            total = value([*i, *axes], lambda n, at: used[n][tuple(at)], lambda inside, read: te.select(inside, read(), 0.0))
            return te.sum(total, axes) if axes else total

        return placed, te.compute(outer, body, "C")

    def prove() -> int:
        _, result = tensors()
        return sum(a is not b for a, b in zip(safe_tensors([result])[0], [result], strict=True))

    def build() -> Callable[[Numbers], np.ndarray]:
        placed, result = tensors()
        f = tcomp.build([*placed, result], threads=1)
        return lambda sizes: f(*given)

    return Case(f"expression {outer} {inner} {staged=}: " + " + ".join(texts), [{}], reference, prove, build)


# ---------------------------------------------------------------- Python functions

RANGES = (
    "n",
    "n",
    "m",
    "1, n",
    "1, n - 1",
    "n - 1",
    "n - 1, -1, -1",
    "0, n, 2",
    "n // 2",
    "{0}",
    "{0}, n",
    "{0} + 1, n",
    "n + 1",
    "3, n + 3",
)
PLACES = (
    "{0}", "{0}", "{0} - 1", "{0} + 1", "n - 1 - {0}", "n - {0}", "{0} // 2", "({0} + 1) % n", "({0} + {1}) % n", "2 * {0}", "{0} + {1}",
    "min({0}, n - 1)", "max({0} - 1, 0)", "min(max({0} + {1}, 0), n - 1)", "{0} - 3", "{0} % m", "{0} * {1}", "0", "n - 1",
)  # fmt: skip
GUARDS = (
    "{0} > 0",
    "{0} + 1 < n",
    "{0} > 0 and {0} < n - 1",
    "{0} < n",
    "{0} < m and {0} < n",
    "{0} % 2 == 0",
    "n == m",
    "n <= m",
    "A[0] > 4.0",
)
SHAPES = ("n", "n", "n + 1", "2 * n", "n + 3", "m")


def function(dice: Dice, name: str) -> tuple[str, bool]:
    """The text of a function, and whether an index depends on data, or is a product of loop variables."""
    lines, names, data = list[str](), ["0"], False
    depth = dice.number(1, 2)
    for level in range(depth):
        bounds = dice.pick(*RANGES).format(names[-1])
        lines.append(f"{'    ' * (level + 1)}for v{level} in range({bounds}):")
        names.append(f"v{level}")
    names = names[1:]
    indent = "    " * (depth + 1)

    def place() -> str:
        return dice.pick(*PLACES).format(names[-1], dice.pick(*names))

    guard = dice.one_in(3)
    if guard:
        lines.append(f"{indent}if {dice.pick(*GUARDS).format(dice.pick(*names))}:")
        data, indent = "A[" in lines[-1], indent + "    "
    match dice.number(0, 6):
        case 0:
            lines.append(f"{indent}C[{names[-1]}] += A[B[{place()}]]")
            data = True
        case 1:
            lines += [
                f"{indent}j = {place()}",
                f"{indent}while j > 0 and A[j - 1] > 3.0:",
                f"{indent}    C[j] = A[j - 1]",
                f"{indent}    j -= 1",
            ]
            data = True
        case 2:
            lines += [f"{indent}i = {place()}", f"{indent}C[i] = A[{place()}] + 1.0", f"{indent}T[{names[0]}, {names[-1]}] = C[i]"]
        case _:
            lines.append(f"{indent}C[{place()}] {dice.pick('=', '+=')} A[{place()}] * 0.5 + A[{place()}]")
    shapes = f'A="float64[{dice.pick(*SHAPES)}]", B="int64[n]", C="float64[{dice.pick(*SHAPES)}]", T="float64[{dice.pick("n, m", "m, n")}]"'
    return "\n".join([f"@tcomp.program({shapes})", f"def {name}(n, m, A, B, C, T):", *lines]) + "\n", data or bool(
        re.search(r"v\d \* v\d", str(lines))
    )


class Strict:
    """An array without negative indices."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def place(self, at: Any) -> tuple[int, ...]:
        at = at if isinstance(at, tuple) else (at,)
        if not all(0 <= i < n for i, n in zip(at, self.array.shape, strict=True)):
            raise Outside
        return at

    def __getitem__(self, at: Any) -> Any:
        return self.array[self.place(at)]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.array[self.place(at)] = value


def programs(dice: Dice, count: int) -> list[Case]:
    """Some functions; all stand in one file, as the compiler reads their text."""
    made, folder = [function(dice, f"program{n}") for n in range(count)], tempfile.TemporaryDirectory()
    path = Path(folder.name, "own.py")
    path.write_text("import tcomp\n\n\n" + "\n\n".join(text for text, _ in made))
    spec = importlib.util.spec_from_file_location("own_programs_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["folder"] = folder  # as long as one of the functions exists
    return [program(getattr(module, f"program{n}"), *made[n], dice) for n in range(count)]


def program(made: Program, text: str, data: bool, dice: Dice) -> Case:
    sizes = [dice.pick(*SIZES)] if dice.one_in(3) else SIZES
    stray = dice.pick(0, 0, 1, -1)  # what is added to the last index that B holds
    try:
        kernel: Kernel | ProgramError = made.kernel(**(sizes[0] if len(sizes) == 1 else {}))
    except ProgramError as error:
        kernel = error

    def arrays(sizes: Numbers) -> dict[str, np.ndarray]:
        found = {}
        for name, declared in made.arrays.items():
            shape = [evaluate_int(d, sizes) for d in declared.dims]
            found[name] = np.zeros(shape) if name == "T" else np.arange(int(np.prod(shape)), dtype=declared.dtype).reshape(shape) * 5 % 11
        found["B"] = np.arange(sizes["n"])[::-1].copy()
        found["B"][-1] += stray
        return found

    def reference(sizes: Numbers) -> np.ndarray:
        given = arrays(sizes)
        made(**sizes, **{name: Strict(a) for name, a in given.items()})
        return given["C"]

    def proved() -> Kernel:
        if isinstance(kernel, ProgramError):
            raise kernel
        return kernel

    def prove() -> int:
        return guards(proved())

    def build() -> Callable[[Numbers], np.ndarray]:
        f = tcomp.build(proved(), threads=1)

        def run(sizes: Numbers) -> np.ndarray:
            given = arrays(sizes)
            f(*given.values(), **untold(f, sizes))
            return given["C"]

        return run

    def compare() -> tuple[Run, Run] | None:
        for scale in SCALES:
            large = {name: n * scale for name, n in sizes[0].items()}
            elements = [prod(evaluate_int(d, large) for d in a.dims) for a in made.arrays.values()]
            if max(elements) > MAX_ELEMENTS:
                return None
            fixed, given = large if len(sizes) == 1 else {}, arrays(large)
            given["A"][:1] = 5  # or nothing would be done where that is the condition
            try:
                run = bound(tcomp.build(made.kernel(**fixed), threads=1), given, large)
                if least(run)[0] < LEAST:
                    continue
                with unguarded():
                    plain = bound(tcomp.build(made.kernel(**fixed), threads=1), given, large)
                return run, plain
            except (ProgramError, OutOfRangeError) as error:  # a program of constant sizes that is right for these alone
                assert isinstance(error, OutOfRangeError) or any(text in str(error) for text in REFUSALS), error
                return None
        return None

    return Case(f"{text}{sizes=} {stray=}", sizes, reference, prove, build, data, compare)


def untold(f: InPlace, sizes: Numbers) -> Numbers:
    """The sizes that no shape tells."""
    told = {v.name for b in f.kernel.buffers for d in b.shape if isinstance(d, E.Expr) for v in E.variables(d)}
    return {v.name: sizes[v.name] for v in f.kernel.scalars if v.name not in told}


def bound(f: InPlace, given: Mapping[str, np.ndarray], sizes: Numbers) -> Callable[[], Any]:
    """A call without the checks that Python makes."""
    module, carriers = f._chosen([a.shape for a in given.values()], (), dict(untold(f, sizes)))
    run = module.bind({spec.name: a for spec, a in zip(module.inputs, (*given.values(), *carriers), strict=True)}).run
    run()
    return run


@contextmanager
def unguarded() -> Iterator[None]:
    """Within, programs are built as they are."""
    with pytest.MonkeyPatch.context() as patch:
        for user in ("tcomp.frontends.python.program", "tcomp.functions"):
            patch.setattr(import_module(user), "safe_kernel", lambda kernel: (kernel, ()))
        yield


def least(*runs: Run, rounds: int = 5) -> list[float]:
    """The least seconds for a call of each; they take turns."""
    found = [float("inf")] * len(runs)
    for _ in range(rounds):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            found[number] = min(found[number], time.perf_counter() - start)
    return found


def guards(kernel: Kernel) -> int:
    """How many indices of a kernel are checked when it runs."""
    return sum(e.op == "checked" for s in L.walk(kernel.body) for e in E.walk(*L.expressions(s)))


def evaluate_int(node: ast.expr, sizes: Numbers) -> int:
    return int(eval(compile(ast.Expression(node), "", "eval"), {}, dict(sizes)))  # of the shapes written above


# ---------------------------------------------------------------- the full run


def cost_of_guards(right: Iterator[Case]) -> None:
    """Prints how many more instructions programs execute with their guards than without, and how much longer those take that execute 1 %
    more."""
    ratios, guarded = list[float](), 0
    for case in right:
        if case.data and case.prove():
            guarded += 1
            if (runs := case.compare()) is not None:
                with_guards, without = map(instructions, runs)
                ratios.append(with_guards / without)
                if ratios[-1] > MANY:
                    a, b = least(*runs, rounds=2000)
                    counts = f"{with_guards} instructions with, {without} without guards; {a * 1e6:.2f} us with, {b * 1e6:.2f} without"
                    print(f"{ratios[-1]:.3f}: {counts}: {a / b:.3f}\n{case.text}", flush=True)
    spread = ", ".join(f"{q} % below {np.percentile(ratios, q):.3f}" for q in (10, 25, 50, 75, 90, 100))
    print(f"{len(ratios)} of {guarded} guarded programs take long enough: geomean {np.exp(np.log(ratios).mean()):.3f}, {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", type=int, default=200)
    parser.add_argument("--right", type=int, default=10_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--native", type=int, default=20, help="of the right programs, one in so many is run")
    parser.add_argument("--start", type=int, default=0, help="the number of the first right program of --cost")
    parser.add_argument("--cost", action="store_true", help="only count instructions of the right programs with and without guards")
    arguments = parser.parse_args()
    if arguments.cost:
        return cost_of_guards(itertools.islice(cases(arguments.seed, False), arguments.start, arguments.start + arguments.right))
    for wrong, count in ((True, arguments.wrong), (False, arguments.right)):
        started, found = time.perf_counter(), Counter[str]()
        for number, case in enumerate(itertools.islice(cases(arguments.seed, wrong), count)):
            found[f"{case.text.split()[0].strip('@').split('(')[0]} {judge(case, number % arguments.native == 0)}"] += 1
        print("wrong" if wrong else "right", count, dict(found), f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
