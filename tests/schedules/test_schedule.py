"""The schedule language as people use it: what it takes, what it says of itself, names that last, mistakes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import tcomp
from tcomp import te
from tcomp.errors import IRError, ScheduleError
from tcomp.ir.expr import dim
from tcomp.ir.loops import For, walk
from tcomp.schedules import Schedule
from tcomp.schedules.lowering import lower
from tcomp.schedules.schedule import PRIMITIVES, kernel_of


def product(n: Any = 8) -> tuple[te.Tensor, te.Tensor, te.Tensor, te.Expr]:
    a, b, k = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B"), te.reduce_axis(n, "k")
    return a, b, te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C"), k


def matmul(n: Any = 8) -> Schedule:
    return Schedule(product(n)[2])


# ---------------------------------------------------------------- programs


def test_a_tensor_a_list_or_a_kernel() -> None:
    a, b, c, _ = product()
    kernel = lower("C", [a, b], [c])
    for program in (c, [a, b, c], (a, b, c), kernel):
        assert str(Schedule(program)) == str(kernel)
    assert [x.name for x in Schedule([b, a, c]).kernel.buffers] == ["B", "A", "C"]
    assert Schedule(kernel).kernel is kernel is Schedule(kernel).source
    assert tcomp.Schedule is Schedule and tcomp.ScheduleError is ScheduleError


def test_placeholders_come_in_the_order_of_their_first_use() -> None:
    names = "wzayx"
    t = {n: te.placeholder((4,), name=n) for n in sorted(names)}
    first = te.compute((4,), lambda i: t["w"][i] + t["z"][i], name="first")
    second = te.compute((4,), lambda i: t["a"][i] * first[i] + t["y"][i] * t["w"][i] + t["x"][i], name="second")
    assert [b.name for b in Schedule(second).kernel.buffers] == ["a", "w", "z", "y", "x", "second"]


def test_the_name_of_a_kernel_is_that_of_the_last_result_as_an_identifier() -> None:
    x = te.placeholder((4,), name="x")
    assert Schedule(te.compute((4,), lambda i: x[i], name="a b.c/d")).kernel.name == "a_b_c_d"


@pytest.mark.parametrize("program", [None, 3, "C", [], [3], {}, "tensor", "placeholder", "order"])
def test_what_is_no_program(program: Any) -> None:
    a, b, c, _ = product()
    program = {"tensor": [a, b], "placeholder": a, "order": [c, a, b]}.get(program, program) if isinstance(program, str) else program
    with pytest.raises(IRError, match="program.*\n.*(try|where): "):
        Schedule(program)
    with pytest.raises(IRError, match="`B` is read but is not among the inputs"):
        kernel_of([a, c])


# ---------------------------------------------------------------- looking


def test_loops_and_stages() -> None:
    s = matmul(dim("n"))
    s.cache_write("C", "acc")
    s.split("C.0", 4)
    s.unroll("C.0.i")
    assert list(s.loops) == ["C.init.i", "C.init.j", "C.i", "C.j", "C.k", "C.0.o", "C.0.i", "C.1"]
    assert (s.loops["C.0.i"].extent, s.loops["C.0.i"].kind) == (4, "unrolled")
    assert str(s.loops["C.0.o"].extent) == "(n + 3) // 4" and s.loops["C.k"].kind == "serial"
    assert {name: (b.dtype, b.scope, len(b.shape)) for name, b in s.stages.items()} == {
        "acc": ("float32", "global", 2),
        "C": ("float32", "global", 2),
    }
    assert repr(s) == "<Schedule of C after 3 steps: loops C.init.i, C.init.j, C.i, C.j, C.k, C.0.o, C.0.i, C.1>"


def test_print_shows_kinds_and_scopes() -> None:
    s = matmul(4)
    s.cache_write("C", "acc")
    s.compute_at("acc", "C.1", "register")
    s.parallel("C.0")
    assert str(s) == (
        "kernel C(A: float32[4, 4], B: float32[4, 4], C: float32[4, 4]) -> (C) {\n"
        "  parallel C.0 in 0..4 {\n"
        "    for C.1 in 0..4 {\n"
        "      alloc acc: float32[1, 1] register\n"
        "      for C.init.i in 0..1 {\n"
        "        for C.init.j in 0..1 {\n"
        "          acc[C.init.i, C.init.j] = 0.0f\n"
        "        }\n"
        "      }\n"
        "      for C.i in 0..1 {\n"
        "        for C.j in 0..1 {\n"
        "          for C.k in 0..4 {\n"
        "            acc[C.i, C.j] += A[C.0 + C.i, C.k] * B[C.k, C.1 + C.j]\n"
        "          }\n"
        "        }\n"
        "      }\n"
        "      C[C.0, C.1] = acc[0, 0]\n"
        "    }\n"
        "  }\n"
        "}"
    )


@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_every_primitive_is_a_method_with_its_parameters_and_documentation(name: str) -> None:
    method, primitive = getattr(Schedule, name), PRIMITIVES[name]
    assert method.__doc__ == primitive.__doc__ and len(inspect.getdoc(method) or "") > 40
    _, *own = inspect.signature(method).parameters.values()
    _, *wanted = inspect.signature(primitive).parameters.values()
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in wanted]
    assert all(p.annotation is not p.empty for p in own)


def test_help_shows_the_documentation() -> None:
    for kind in ("vectorize", "unroll", "parallel"):
        assert getattr(Schedule, kind).__doc__


# ---------------------------------------------------------------- names


def test_names_survive_steps_on_other_loops() -> None:
    """Handles are names: nothing that happens elsewhere in the kernel changes what they mean."""
    s = matmul(24)
    s.cache_write("C", "acc")
    rows, row = s.split("C.0", 6)
    columns, column = s.split("C.1", 8)
    init, fold = str(s.loops["C.init.i"]), str(s.loops["C.k"])
    s.reorder(rows, columns, row, column)
    s.split(row, 2)
    s.unroll("C.0.i.i")
    s.fuse(rows, columns)
    s.vectorize(column)
    assert (str(s.loops["C.init.i"]), str(s.loops["C.k"])) == (init, fold)
    s.split("C.k", 4)
    s.reorder("C.k.o", "C.i", "C.j", "C.k.i", reassociate=True)
    for name, extent in {"C.0.o_o": 12, "C.0.i.o": 3, "C.0.i.i": 2, "C.1.i": 8, "C.init.j": 24, "C.k.o": 6, "C.k.i": 4}.items():
        assert s.loops[name].extent == extent
    assert s.loops["C.1.i"].kind == "vectorized" and s.loops["C.0.i.i"].kind == "unrolled"


def test_names_are_unique_whatever_is_split() -> None:
    s = matmul(64)
    for _ in range(3):
        for name in list(s.loops):
            s.split(name, 2)
    names = [x.var.name for x in walk(s.kernel.body) if isinstance(x, For)]
    assert len(set(names)) == len(names) == 5 * 8 == len(s.loops)


def test_a_name_that_is_gone_is_not_given_again_to_another_loop() -> None:
    s = matmul()
    s.split("C.i", 4)
    with pytest.raises(ScheduleError, match="there is no loop `C.i`"):
        s.unroll("C.i")
    s.fuse("C.i.o", "C.i.i")
    assert "C.i" not in s.loops and "C.i.o_i" in s.loops


def test_stages_as_tensors_and_loops_as_axes() -> None:
    a, b, c, k = product()
    s = Schedule([a, b, c])
    s.split(k, np.int64(4))
    s.cache_read(b, c.axes[1], "copy")
    s.cache_write(c, "acc")
    assert [str(step) for step in s.trace] == ['s.split("C.k", 4)', 's.cache_read("B", "C.j", "copy")', 's.cache_write("C", "acc")']
    assert [type(x) for x in s.trace[0].arguments] == [str, int]


def test_sizes_as_expressions_and_as_text() -> None:
    n = dim("n")
    steps = []
    for point in (n // 4, "n // 4"):
        s = matmul(n)
        rows, _ = s.split("C.i", 4)
        s.partition(rows, point)
        steps.append(s.trace)
    assert steps[0] == steps[1] and steps[0][1].arguments == ("C.i.o", "n // 4")


def test_arguments_that_are_the_default_are_not_recorded() -> None:
    s = matmul()
    s.cache_read("A", None, "copy", scope="global")
    s.set_kind("C.i", "serial", reassociate=False)
    s.apply("set_kind", loop="C.j", kind="serial")
    assert [str(step) for step in s.trace] == [
        's.cache_read("A", None, "copy")', 's.set_kind("C.i", "serial")', 's.set_kind("C.j", "serial")',
    ]  # fmt: skip


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "a loop that is not there": (lambda s: s.split("C.l", 4), r"`split` does not apply to kernel `C`(.|\n)*there is no loop `C\.l`"),
    "a loop nearly right": (lambda s: s.unroll("C.init.ii"), r"did you mean `C\.init\.i`\? loops: C\.init\.i, "),
    "nothing like a loop": (lambda s: s.unroll("xyz"), r"try: loops: C\.init\.i, C\.init\.j\.o, C\.init\.j\.i, C\.i, C\.j, C\.k"),
    "a stage that is not there": (lambda s: s.compute_at("D", "C.i"), "there is no buffer `D`"),
    "a stage nearly right": (lambda s: s.cache_write("CC", "acc"), r"there is no buffer `CC`(.|\n)*did you mean `C`\? buffers: A, B, C"),
    "a factor of the wrong type": (lambda s: s.split("C.i", 4.0), r"`split` takes other arguments(.|\n)*`factor` cannot be 4\.0, which is of type float"),
    "a factor that is text": (lambda s: s.split("C.i", "4"), r"`factor` cannot be '4', which is of type str\n  try: split\(loop: str \| Expr, factor: int"),
    "a factor that is a truth": (lambda s: s.split("C.i", True), "`factor` cannot be True"),
    "a factor of zero": (lambda s: s.split("C.i", 0), "factor 0 is not positive"),
    "a loop that is a number": (lambda s: s.unroll(3), "`loop` cannot be 3, which is of type int"),
    "a loop that is none": (lambda s: s.parallel(None), "`loop` cannot be None"),
    "a loop statement": (lambda s: s.split(s.loops["C.i"], 4), "`loop` cannot be .*, which is of type For"),
    "an expression for a loop": (lambda s: s.split(dim("n") + 1, 4), r"`loop` cannot be n \+ 1, which is of type Expr"),
    "a list for loops": (lambda s: s.reorder(["C.i", "C.j"]), r"`order` cannot be \['C\.i', 'C\.j'\], which is of type list"),
    "a size that is a float": (lambda s: s.partition("C.i", 1.5), "`point` cannot be 1.5, which is of type float"),
    "a size that is not an expression": (lambda s: s.partition("C.i", "four"), "`four` is not a size(.|\n)*all sizes of this kernel are integers"),
    "an unknown kind": (lambda s: s.set_kind("C.i", "fast"), "unknown loop kind; one of serial, parallel"),
    "an unknown scope": (lambda s: s.cache_read("A", None, "copy", "cache"), "unknown scope `cache`; one of global"),
    "an unknown primitive": (lambda s: s.apply("vectorise", "C.i"), "unknown schedule primitive `vectorise`"),
    "a primitive nearly right": (lambda s: s.apply("cache_reed", "C.i"), r"unknown schedule primitive `cache_reed`\n  try: did you mean `cache_read`\?"),
    "an argument too few": (lambda s: s.apply("split", "C.i"), "`split` takes other arguments(.|\n)*missing a required argument: 'factor'"),
    "an unknown option": (lambda s: s.apply("split", "C.i", 4, color=1), "got an unexpected keyword argument 'color'"),
    "a race": (lambda s: s.parallel("C.k"), "iterations of `C.k` may touch the same element of `C`: (.|\n)* at C.k=0 and then (.|\n)* at C.k=1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_leave_the_schedule_as_it_was(mistake: str) -> None:
    step, message = MISTAKES[mistake]
    s = matmul()
    s.split("C.init.j", 4)
    kernel, trace = s.kernel, s.trace
    with pytest.raises(ScheduleError, match=message):
        step(s)
    assert s.kernel is kernel and s.trace is trace


def test_an_axis_of_several_stages_is_ambiguous() -> None:
    x = te.placeholder((8,), name="x")
    p, q = te.compute((8,), lambda i: (x[i] + 1.0, x[i] * 2.0), name="pair")
    s = Schedule([x, p, q])
    with pytest.raises(ScheduleError, match=r"several loops have the axis `i`(.|\n)*name one of pair\.0\.i, pair\.1\.i"):
        s.split(p.axes[0], 4)


def test_calls_with_the_wrong_number_of_arguments_are_python_errors() -> None:
    with pytest.raises(TypeError, match=r"Schedule\.split\(\): missing a required argument: 'factor'"):
        matmul().split("C.i")  # type: ignore[call-arg]  # the missing factor is what is tested


# ---------------------------------------------------------------- several schedules of one program


def test_copies_go_on_differently() -> None:
    s = matmul()
    s.split("C.i", 4)
    t = s.copy()
    t.parallel("C.i.o")
    assert len(s.trace) == 1 and len(t.trace) == 2 and t.source is s.source and s.loops["C.i.o"].kind == "serial"


def test_a_trace_replays_on_a_program_of_other_sizes() -> None:
    s = matmul(8)
    rows, _ = s.split("C.i", 4)
    s.parallel(rows)
    t = matmul(dim("n"))
    t.replay(s.trace)
    assert t.trace == s.trace and t.loops["C.i.i"].extent == 4 and str(t.loops["C.i.o"].extent) == "(n + 3) // 4"


def test_replay_applies_all_steps_or_none() -> None:
    s = matmul()
    s.split("C.i", 4)
    s.split("C.j", 4)
    t = matmul()
    t.unroll("C.k")
    t.split("C.j", 2)
    before = t.kernel
    with pytest.raises(ScheduleError, match=r'`split` does not apply to kernel `C`\n  where: step 4, s.split\("C.j", 4\)'):
        t.replay(s.trace)
    assert t.kernel is before and len(t.trace) == 2
