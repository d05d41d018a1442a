"""Traces as data: they print as Python, store as JSON, replay to the same loops, and refuse what they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tcomp.errors import ScheduleError
from tcomp.ir import te
from tcomp.ir.expr import dim
from tcomp.schedules import Schedule, trace as T
from tcomp.schedules.schedule import prove
from tcomp.schedules.trace import Step, Trace
from tests.schedules.dice import Seeded
from tests.schedules.fuzzing import make
from tests.schedules.random_schedules import draw_step


def matmul(n: Any = 6) -> Schedule:
    a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
    k = te.reduce_axis(n, "k")
    return Schedule(te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C"))


def tiled() -> Schedule:
    s = matmul(dim("n"))
    rows, _ = s.split("C.i", 4)
    s.partition(rows, dim("n") // 4)
    s.split("C.j", 8)
    s.vectorize("C.j.i")
    s.cache_read("B", None, "copy", "global")
    s.note('a "quoted" note\nof two lines, \N{GREEK SMALL LETTER ALPHA}')
    return s


# ---------------------------------------------------------------- text and data


def test_a_trace_prints_as_python() -> None:
    assert str(tiled().trace).splitlines() == [
        's.split("C.i", 4)',
        's.partition("C.i.o", "n // 4")',
        's.split("C.j", 8)',
        's.set_kind("C.j.i", "vectorized")',
        's.cache_read("B", None, "copy")',
        r's.note("a \"quoted\" note\nof two lines, \u03b1")',
    ]


def test_the_printed_python_makes_the_same_loops() -> None:
    s, again = tiled(), matmul(dim("n"))
    exec(str(s.trace), {"s": again})  # noqa: S102  that the text is Python is what is tested
    assert str(again) == str(s) and again.trace == s.trace


def test_json() -> None:
    s = matmul()
    s.split("C.i", 4)
    s.vectorize("C.i.i")
    assert s.trace.to_json() == '{"version": 1, "steps": [\n  ["split", ["C.i", 4]],\n  ["set_kind", ["C.i.i", "vectorized"]]\n]}\n'
    assert Trace().to_json() == '{"version": 1, "steps": []}\n' and Trace.from_json(Trace().to_json()) == Trace()


def test_json_there_and_back() -> None:
    trace = tiled().trace + [Step("f", ((1, (True, None)), -(2**62)), (("tail", "peel"), ("sizes", ())))]
    assert Trace.from_json(trace.to_json()) == trace
    assert Trace.from_json(trace.to_json().encode()) == trace
    assert Trace.from_json(json.dumps(json.loads(trace.to_json()))) == trace  # however it is laid out
    assert str(trace[-1]) == 's.f((1, (True, None)), -4611686018427387904, tail="peel", sizes=())'


def test_a_schedule_as_json_is_whole() -> None:
    s = tiled()
    again = Schedule.from_json(s.to_json())
    assert str(again) == str(s) and str(again.source) == str(s.source) and again.trace == s.trace
    assert again.to_json() == s.to_json()
    assert Trace.from_json(s.to_json()) == s.trace


def test_a_trace_is_an_immutable_sequence() -> None:
    trace = tiled().trace
    assert len(trace) == 6 and trace[0] == Step("split", ("C.i", 4)) and list(trace[1:3]) == list(trace)[1:3]
    assert isinstance(trace[:2], Trace) and trace[:2] + trace[2:] == trace and hash(trace[:2] + trace[2:]) == hash(trace)
    assert trace != trace[:-1] and Step("split", ("C.i", 4)) in trace and repr(trace) == "<Trace of 6 steps>"
    with pytest.raises(AttributeError):
        trace.steps = ()


def test_diff() -> None:
    s, t = tiled(), tiled()
    assert s.trace.diff(t.trace) == ""
    t = matmul(dim("n"))
    t.split("C.i", 4)
    t.partition("C.i.o", "n // 4")
    t.split("C.j", 16)
    assert s.trace[:4].diff(t.trace, "a", "b").splitlines() == [
        "--- a",
        "+++ b",
        "@@ -1,4 +1,3 @@",
        ' s.split("C.i", 4)',
        ' s.partition("C.i.o", "n // 4")',
        '-s.split("C.j", 8)',
        '-s.set_kind("C.j.i", "vectorized")',
        '+s.split("C.j", 16)',
    ]


@pytest.mark.parametrize("seed", range(40))
def test_random_traces_repeat(seed: int) -> None:
    """By replay, by JSON alone, by JSON with the printed kernel, by executing the printed Python: the same loops to the byte; and isl
    accepts what was accepted."""
    dice = Seeded(f"trace {seed}")
    subject = make(dice)
    s = Schedule(subject.kernel)
    for _ in range(12):
        step = draw_step(dice, s.kernel)
        try:
            s.apply(step.primitive, *step.arguments, **dict(step.options))
        except ScheduleError:
            pass
    assert str(Schedule(subject.kernel).replay(s.trace)) == str(s)
    assert str(Schedule(subject.kernel).replay(Trace.from_json(s.trace.to_json()))) == str(s)
    again = Schedule.from_json(s.to_json())
    assert str(again) == str(s) and again.trace == s.trace and again.to_json() == s.to_json()
    typed = Schedule(subject.kernel)
    exec(str(s.trace), {"s": typed})  # noqa: S102
    assert str(typed) == str(s) and typed.trace == s.trace
    proof = prove(subject.kernel, s.trace)
    assert proof.ok, proof.refused


# ---------------------------------------------------------------- what is not a trace

STEPS = '{"version": 1, "steps": [%s]}'


NO_TRACES: list[tuple[str | bytes, str]] = [
    ("", "this is not a trace\n  why: it is not valid JSON"),
    ("{", "not valid JSON"),
    (b"\xff\xfe\x00", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('{"version": 1, "steps": [["split", ["C.i", ' + "9" * 5000 + "]]]}", "not valid JSON"),
    ("[]", r'not of the form \{"version": 1, "steps": \[...\]\}'),
    ('{"version": 1}', "not of the form"),
    ('{"version": 1, "steps": {}}', "not of the form"),
    ('{"steps": []}', "a trace of version None is not read"),
    ('{"version": 2, "steps": []}', "a trace of version 2 is not read\n  why: this is version 1"),
    ('{"version": true, "steps": []}', "a trace of version True is not read"),
    ('{"version": 1, "steps": [], "code": ""}', "a trace has no field 'code'"),
    ('{"version": 1, "steps": [], "kernel": 3}', "the kernel of a trace is its printed text"),
    (STEPS % '["clean", []], "clean"', r'malformed\n  where: step 2: "clean"\n  why: it is not of the form'),
    (STEPS % '["clean"]', r'malformed\n  where: step 1: \["clean"\]'),
    (STEPS % '["clean", [], []]', "malformed"),
    (STEPS % '["clean", [], {}, 1]', "malformed"),
    (STEPS % "[1, []]", "malformed"),
    (STEPS % '["split", ["C.i", 1.5]]', r"where: step 1: .*\n  why: 1\.5 is none of: text, an integer of 64 bits"),
    (STEPS % '["split", ["C.i", NaN]]', "NaN is none of"),
    (STEPS % f'["split", ["C.i", {1 << 63}]]', "9223372036854775808 is none of"),
    (STEPS % '["split", [{"a": 1}]]', r'\{"a": 1\} is none of'),
    (STEPS % ('["split", [' + "[" * 10 + "]" * 10 + "]]"), "is none of"),
    (STEPS % '["import os; f", []]', "`import os; f` is not a name of a primitive or an option"),
    (STEPS % '["split", [], {"a=1)#": 1}]', r"`a=1\)#` is not a name"),
]


@pytest.mark.parametrize(("text", "message"), NO_TRACES, ids=range(len(NO_TRACES)))
def test_json_that_is_no_trace(text: str | bytes, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Trace.from_json(text)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, message in (
        ("JSON_LIMIT", Trace().to_json(), "a trace of 28 bytes is not read"),
        ("STEP_LIMIT", STEPS % ", ".join(['["clean", []]'] * 11), "a trace of 11 steps is not read"),
        ("TEXT_LIMIT", STEPS % '["note", ["hello world"]]', '"hello world" is none of'),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(T, name, 10)
            with pytest.raises(ScheduleError, match=message):
                Trace.from_json(text)


# ---------------------------------------------------------------- traces that do not apply


def tampered(change: Callable[[list[Any]], Any]) -> Trace:
    s = matmul()
    s.split("C.i", 4)
    s.parallel("C.i.o")
    record = json.loads(s.trace.to_json())
    change(record["steps"])
    return Trace.from_json(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda steps: steps[0].__setitem__(0, "splti"),
            r"unknown schedule primitive `splti`\n  where: step 1, s.splti\(.*\n  try: did you mean `split`",
        ),
        (
            lambda steps: steps[0][1].pop(),
            r"`split` takes other arguments\n  where: step 1, .*\nkernel `C`\n  why: missing a required argument: 'factor'",
        ),
        (lambda steps: steps[0][1].extend([1] * 9), "`split` takes other arguments\n  where: step 1"),
        (lambda steps: steps[0].append({"color": 1}), "why: got an unexpected keyword argument 'color'"),
        (lambda steps: steps[0].append({"kernel": 1}), "why: got an unexpected keyword argument 'kernel'"),
        (lambda steps: steps[0][1].__setitem__(1, "4"), r"`factor` cannot be '4', which is of type str"),
        (lambda steps: steps[0][1].__setitem__(1, True), "`factor` cannot be True, which is of type bool"),
        (lambda steps: steps[0][1].__setitem__(1, 0), r"`split` does not apply to kernel `C`\n  where: step 1, s.split\(\"C.i\", 0\)"),
        (lambda steps: steps[0][1].__setitem__(0, 3), "`loop` cannot be 3, which is of type int"),
        (lambda steps: steps[0][1].__setitem__(0, ["C.i"]), r"`loop` cannot be \('C.i',\), which is of type tuple"),
        (lambda steps: steps.reverse(), r"where: step 1, s.set_kind\(\"C.i.o\", \"parallel\"\)[^`]*(.|\n)*there is no loop `C.i.o`"),
        (lambda steps: steps[1][1].__setitem__(0, "C.k"), r"where: step 2, (.|\n)*may touch the same element of `C`"),
        (lambda steps: steps.append(["partition", ["C.j", "import os"]]), "`import os` is not a size\n  where: step 3"),
        (
            lambda steps: steps.append(["partition", ["C.j", "m // 2"]]),
            r"`m // 2` is not a size(.|\n)*all sizes of this kernel are integers",
        ),
        (lambda steps: steps.append(["partition", ["C.j", "("]]), r"`\(` is not a size"),
        (lambda steps: steps.append(["partition", ["C.j", "1.5"]]), "`1.5` is not a size"),
        (lambda steps: steps.append(["partition", ["C.j", "9" * 500]]), "is not a size"),
        (lambda steps: steps.append(["split", ["C.j", 1 << 62]]), "is more than 2147483648"),
    ],
)
def test_tampered_traces(change: Callable[[list[Any]], Any], message: str) -> None:
    """Each names the step and what is wrong with it, and leaves the schedule as it was."""
    trace, s = tampered(change), matmul()
    before = s.kernel
    with pytest.raises(ScheduleError, match=message):
        s.replay(trace)
    assert s.kernel is before and not s.trace
    proof = prove(before, trace)
    assert not proof.ok and proof.refused is not None and proof.proved < proof.steps == len(trace)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (None, "does not say which kernel it starts from"),
        ("kernel C(", "the kernel of this trace is malformed"),
        ("", "the kernel of this trace is malformed"),
        ("kernel C(A: float32[4]) -> (A) {\n  B[0] = 1.0f\n}", "the kernel of this trace is malformed"),
        ("kernel C(A: float32[4]) -> (A) {\n  for i in 0..5 {\n    A[i, i] = 1.0f\n  }\n}", "the kernel of this trace is malformed"),
    ],
)
def test_a_schedule_without_its_kernel(kernel: str | None, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(matmul().trace.to_json(kernel))


# ---------------------------------------------------------------- proofs


def test_proofs_ask_isl_about_every_step() -> None:
    s = matmul(dim("n"))
    s.reorder("C.k", "C.i", reassociate=True)
    s.parallel("C.init.i")
    proof = prove(s.source, s.trace)
    assert proof.ok and proof.proved == proof.steps == 2 and proof.questions == 2 and proof.seconds >= proof.isl_seconds > 0


def test_a_proof_ends_with_the_step_that_is_refused() -> None:
    s = matmul()
    s.split("C.i", 2)
    s.split("C.k", 2)
    trace = s.trace + [Step("set_kind", ("C.k.o", "parallel")), Step("clean")]
    proof = prove(s.source, trace)
    assert not proof.ok and (proof.proved, proof.steps) == (2, 4)
    assert proof.refused is not None and "step 3" in proof.refused.where and proof.refused.witness is not None
