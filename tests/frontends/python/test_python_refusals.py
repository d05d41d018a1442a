# mypy: disable-error-code="name-defined"
# ruff: noqa: B020, B905, F821, F841, PLC3002, PLW0120 (these functions are wrong on purpose)
"""What a loop program cannot be is refused with the line, the reason, and what to write instead."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tcomp.errors import ProgramError
from tcomp.frontends.python import Program, program

limits = [1, 2]
CASES: list[tuple[Callable[..., None], str, str]] = []  # function, the line that is refused, what the message says


def refused(line: str, message: str) -> Callable[[Callable[..., None]], None]:
    """A function on x: float64[n], A: float64[n, n] and c: int32[n] that is refused at `line`."""
    return lambda function: CASES.append((function, line, message))


@refused("return x[0]", "`return` cannot stand in a loop program.*write results into arrays")
def returns(n, x, A, c):
    return x[0]


@refused("break", "`break` cannot.*use `while`")
def breaks(n, x, A, c):
    for i in range(n):
        if x[i] > 0:
            break


@refused("continue", "`continue` cannot.*under `if not")
def continues(n, x, A, c):
    for i in range(n):
        if x[i] > 0:
            continue
        x[i] = 1


@refused("for v in x:", "a loop over something else than a range.*for v in range")
def loops_over_an_array(n, x, A, c):
    for v in x:
        c[0] = v


@refused("for i, j in zip(range(n), range(n)):", "a loop over several variables")
def loops_over_pairs(n, x, A, c):
    for i, j in zip(range(n), range(n)):
        x[i] = x[j]


@refused("for i in range(0, n, n):", "the step of a range is not a constant")
def symbolic_step(n, x, A, c):
    for i in range(0, n, n):
        x[i] = 1


@refused("for i in range(0, n, 0):", "the step of a range is 0")
def zero_step(n, x, A, c):
    for i in range(0, n, 0):
        x[i] = 1


@refused("for i in range(x[0]):", r"`x\[0\]` is float64 instead of an integer.*int\(x\) converts")
def float_range(n, x, A, c):
    for i in range(x[0]):
        x[i] = 1


@refused("for i in range(n):", "`else` of a loop")
def loop_else(n, x, A, c):
    for i in range(n):
        x[i] = 1
    else:
        x[0] = 2


@refused("for i in range(i):", "the variable `i` of an outer loop is used again")
def same_variable(n, x, A, c):
    for i in range(n):
        for i in range(i):
            x[i] = 1


@refused("i += 1", "the loop variable `i` is assigned")
def assigns_variable(n, x, A, c):
    for i in range(n):
        i += 1
        x[i] = 1


@refused("x[0] = i", "the loop variable `i` is used outside of its loop")
def variable_after_loop(n, x, A, c):
    for i in range(n):
        x[i] = 1
    x[0] = i


@refused("x[i / 2] = 1", r"`i / 2` is float64 instead of an integer.*`//` divides integers")
def float_index(n, x, A, c):
    for i in range(n):
        x[i / 2] = 1


@refused("x[-1] = 0", "the index -1 of `x`.*counts it from the end.*write n - 1")
def negative_index(n, x, A, c):
    x[-1] = 0


@refused("A[0] = 1", "`A` has 2 dimensions and is indexed with 1")
def too_few_indices(n, x, A, c):
    A[0] = 1


@refused("A[0][1] = 1", r"an element of an element.*A\[i, j\]")
def chained_indices(n, x, A, c):
    A[0][1] = 1


@refused("x[1:] = 0", "a slice cannot.*write a loop")
def slices(n, x, A, c):
    x[1:] = 0


@refused("x[0] = A", "the array `A` is used as a number")
def array_as_number(n, x, A, c):
    x[0] = A


@refused("x = A", "the parameter `x` is assigned.*assign an element")
def assigns_array(n, x, A, c):
    x = A


@refused("n = 3", "the parameter `n` is assigned.*use another name")
def assigns_size(n, x, A, c):
    n = 3
    x[0] = n


@refused("x[0] = y[0]", "`y` is not an array.*the arrays here are x, A, c.*@program")
def unknown_array(n, x, A, c):
    x[0] = y[0]


@refused("x[0] = unknown", "the name `unknown` is not known")
def unknown_name(n, x, A, c):
    x[0] = unknown


@refused("x[0] = limits[0]", "`limits` is not an array")
def list_of_the_module(n, x, A, c):
    x[0] = limits[0]


@refused("x[0] = np.sort(x)[0]", "only arrays can be indexed")
def indexed_call(n, x, A, c):
    x[0] = np.sort(x)[0]


@refused("x[0] = itertools.count(3)", "the function `count` is not known here.*known are abs, min")
def unknown_function(n, x, A, c):
    x[0] = itertools.count(3)


@refused("x[0] = x.sum()", r"the function `x.sum` is not known")
def array_method(n, x, A, c):
    x[0] = x.sum()


@refused("x[0] = np.sqrt(x[0], dtype=np.float32)", "with keywords")
def keywords(n, x, A, c):
    x[0] = np.sqrt(x[0], dtype=np.float32)


@refused("x[0] = np.sqrt(x[0], x[1])", "`sqrt` with 2 arguments")
def too_many_arguments(n, x, A, c):
    x[0] = np.sqrt(x[0], x[1])


@refused("print(x[0])", "an expression whose value is not used")
def prints(n, x, A, c):
    print(x[0])


@refused("if c[0]:", "the condition is a int32 instead of a truth value.*x != 0")
def number_as_condition(n, x, A, c):
    if c[0]:
        x[0] = 1


@refused("x[0] = x[1] and x[2]", "an operand of `and` is a float64")
def numbers_in_and(n, x, A, c):
    x[0] = x[1] and x[2]


@refused("if x[0] is x[1]:", "`is` cannot stand.*compare numbers")
def same_object(n, x, A, c):
    if x[0] is x[1]:
        x[0] = 1


@refused("if n is None:", "`None` is not a number")
def identity(n, x, A, c):
    if n is None:
        x[0] = 1


@refused("if 0 < n in (1, 2):", "a tuple cannot stand")
def membership(n, x, A, c):
    if 0 < n in (1, 2):
        x[0] = 1


@refused("c[0] = x[0]", r"a float is stored in an array of integers.*int\(x\)")
def float_into_integers(n, x, A, c):
    c[0] = x[0]


@refused("x[0] = c[0] ** c[1]", "a power of integers")
def integer_power(n, x, A, c):
    x[0] = c[0] ** c[1]


@refused("x[0] = (x[0] > 1) + (x[1] > 1)", r"`add` of truth values.*int\(x\)")
def sum_of_truths(n, x, A, c):
    x[0] = (x[0] > 1) + (x[1] > 1)


@refused("x[0] = 1 // 0", "`floordiv` of 1 and 0")
def division_by_zero(n, x, A, c):
    x[0] = 1 // 0


@refused('x[0] = "a"', "`'a'` is not a number")
def string(n, x, A, c):
    x[0] = "a"


@refused("x[0] = 123456789012345678901234567890", "more than 64 bits")
def huge_integer(n, x, A, c):
    x[0] = 123456789012345678901234567890


@refused("x[0] = sum(v for v in range(n))", "a generator cannot stand.*write a loop")
def generator(n, x, A, c):
    x[0] = sum(v for v in range(n))


@refused("x[0] = (lambda v: v)(1)", "a lambda cannot stand.*write out what it computes")
def lambdas(n, x, A, c):
    x[0] = (lambda v: v)(1)


@refused("A @= A", "the parameter `A` is assigned")
def matrix_product(n, x, A, c):
    A @= A


@refused("def inner():", "a function inside the function")
def nested(n, x, A, c):
    def inner():
        pass


@refused("with x:", "`with` cannot stand")
def contexts(n, x, A, c):
    with x:
        pass


@refused("a = b = x[0]", "several targets in one assignment")
def several_targets(n, x, A, c):
    a = b = x[0]
    x[0] = a + b


@refused("x[0], x[1] = x[0], x[1], x[2]", "3 values for 2 targets")
def unequal_swap(n, x, A, c):
    x[0], x[1] = x[0], x[1], x[2]


@refused("total += x[i]", "`total` may be read before it is assigned.*assign `total` first")
def read_before_assigned(n, x, A, c):
    for i in range(n):
        total += x[i]


@refused("x[0] = last", "`last` may be read before it is assigned")
def assigned_in_a_loop_that_may_not_run(n, x, A, c):
    for i in range(n):
        last = x[i]
    x[0] = last


@refused("t = np.empty(n)", "the array `t` is made in a loop and has no constant size.*before the loops")
def symbolic_array_in_a_loop(n, x, A, c):
    for i in range(n):
        t = np.empty(n)
        t[i] = 0


@refused("t = np.empty(100000)", "the array `t` is too large for a loop.*800000 bytes")
def large_array_in_a_loop(n, x, A, c):
    for i in range(n):
        t = np.empty(100000)
        t[i] = 0


@refused("t = np.empty(n, np.complex64)", "unknown dtype `complex64`")
def complex_array(n, x, A, c):
    t = np.empty(n, np.complex64)
    t[0] = 0


@refused("t = np.zeros(n)", "the array `t` is made a second time")
def array_made_twice(n, x, A, c):
    t = np.empty(n)
    t = np.zeros(n)
    x[0] = t[0]


@pytest.mark.parametrize(("function", "line", "message"), CASES, ids=[f.__name__ for f, _, _ in CASES])
def test_refused(function: Callable[..., None], line: str, message: str) -> None:
    declared = program(x="float64[n]", A="float64[n, n]", c="int32[n]")(function)
    with pytest.raises(ProgramError, match=f"(?s){message}") as error:
        declared.kernel()
    lines, first = inspect.getsourcelines(function)
    found = [first + k for k, text in enumerate(lines) if text.strip() == line]
    assert error.value.where in [f"{__file__}:{k}: {line}" for k in found]


def some(n, x, *rest):
    pass


def one(n, x):
    x[n] = 1


def real(scale: float, x):
    x[0] = scale


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: program(x="float64[n]")(some), r"`some` takes `\*rest`"),
        (lambda: program(y="float64[n]")(one), "`y` is not a parameter of `one`.*its parameters are n, x"),
        (lambda: program(x="float[n]")(one), "unknown dtype `float`.*float64"),
        (lambda: program(x="float64[n")(one), r'cannot be read.*one: x="float64\[n"'),
        (lambda: program(x="float64[n / 2]")(one).kernel(), r"`n / 2` is not an extent"),
        (lambda: program(x="float64[n // 0]")(one).kernel(), "`n // 0` divides by what may not be positive"),
        (lambda: program(x="float64[n - 5]")(one).kernel(n=2), "an extent of `x` is -3"),
        (lambda: program(x="float64[n]")(one).kernel(m=2), "`m` is not a size of `one`.*its sizes are n"),
        (lambda: program(x="float64[n]")(one).kernel(n=2.5), "`n` of `one` is 2.5 instead of an integer.*annotate it"),
        (lambda: program(x="float64[n]")(one).kernel(n=2), r"index 0 of `x` is 2, its extent is 2.*test_python_refusals.py"),
        (lambda: program(x="float64[n]")(real).kernel(), r"`scale` of `real` needs a value.*kernel\(scale="),
        (lambda: program(x="float64[n]")(lambda n, x: None).kernel(), "is not a plain function.*decorate a `def`"),
    ],
    ids=range(12),
)
def test_wrong_declarations(make: Callable[[], Program], message: str) -> None:
    with pytest.raises(ProgramError) as error:
        make()
    assert re.search(f"(?s){message}", str(error.value)), str(error.value)


def test_a_function_typed_at_a_prompt() -> None:
    text = """
import sys
from tcomp import TcompError, program
@program(x="float64[n]")
def clear(n, x):
    for i in range(n):
        x[i] = 0.0
a = [1, 2]
clear(2, a)
try:
    clear.kernel()
except TcompError as error:
    print(a, error)
"""
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=True)
    assert "[0.0, 0.0] the source of `clear` cannot be read" in done.stdout and "write the function in a file" in done.stdout


def test_a_huge_expression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def huge(n, x):\n    x[0] = " + "- " * 1000 + "x[0]\n"
    (tmp_path / "huge_program.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import huge_program  # type: ignore[import-not-found]  # it was just written

    with pytest.raises(ProgramError, match="nested too deeply"):
        program(x="float64[n]")(huge_program.huge).kernel()
