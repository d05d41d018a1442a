"""Programs: text that reads back, refusals of the verifier and of the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.errors import InputError, IRError, ParseError
from tcomp.ir import expr as E
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, calls
from tcomp.ir.simplify import as_dim
from tcomp.ir.text.parser import parse_program
from tcomp.ir.verify.program import verify_program
from tests.ir.program_interpreter import interpreted, run_program

N = E.dim("n", 1, 100)
I = E.loop_var("i", N)
OUT, IN = Ref("output", 0, 0), Ref("input", 0, 0)


def program(*steps, workspace=64, dims=(N,), outputs=((N,),)):
    return Program(dims, workspace, outputs, steps)


def work(offset):
    return Ref("workspace", 0, offset)


def test_text(golden):
    inner = Repeat(E.loop_var("j", 3), 3, (Call("a kernel", (OUT, Ref("dims", 0, 8)), (), "last\n"),), None)
    written = program(
        Call("scale", (IN, work(0)), (N, E.const(3)), "first"),
        Branch(Ref("input", 1, 2), (Copy(OUT, work(0), N * 4),), (SetIndex(work(8), N // 2 - 7),)),
        Branch(Ref("input", 1, 0), (), ()),
        Repeat(I, N, (Call("scale", (Ref("weights", 0, 64), work(I * 4)), (E.minimum(N, I), E.const(1)), "if"), inner), work(N * 8)),
        workspace=E.maximum(N * 8, 40) + 1,
        dims=(N, E.dim("in", 0)),
        outputs=((N, 2), (), (N * 2 + 1,)),
    )
    verify_program(written)
    golden("program.txt", str(written))
    again = parse_program(str(written))
    assert again == written and str(again) == str(written)
    assert [c.label for c in calls(again.steps)] == ["first", "if", "last\n"]


dims = st.lists(st.sampled_from(["n", "m", "for", "x.y", "a b"]), unique=True, max_size=3).map(
    lambda names: tuple(E.dim(x, 0, 50) for x in names)
)


@st.composite
def programs(draw):
    known = list(draw(dims))

    def size():
        e = E.const(draw(st.integers(0, 1000)))
        for v in known:
            e = e + v * draw(st.integers(0, 9))
        return as_dim(e)

    def ref():
        base = draw(st.sampled_from(["input", "output", "weights", "workspace", "dims"]))
        return Ref(base, draw(st.integers(0, 12)) if base in ("input", "output") else 0, size())

    def steps(depth):
        return tuple(step(depth) for _ in range(draw(st.integers(0, 3))))

    def step(depth):
        match draw(st.integers(0, 4 if depth else 2)):
            case 0:
                scalars = tuple(E.as_expr(size()) for _ in range(draw(st.integers(0, 2))))
                return Call(
                    draw(st.text(max_size=5)), tuple(ref() for _ in range(draw(st.integers(0, 3)))), scalars, draw(st.text(max_size=5))
                )
            case 1:
                return Copy(ref(), ref(), size())
            case 2:
                return SetIndex(ref(), E.as_expr(size()))
            case 3:
                return Branch(ref(), steps(depth - 1), steps(depth - 1))
        trips = size()
        var = E.loop_var(f"i{depth}", trips)
        known.append(var)
        inside = steps(depth - 1), ref() if draw(st.booleans()) else None
        known.remove(var)
        return Repeat(var, trips, *inside)

    return Program(tuple(known), size(), tuple((size(),) for _ in range(draw(st.integers(0, 2)))), steps(2))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_text_reads_back(written):
    again = parse_program(str(written))
    assert again == written and str(again) == str(written)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Copy(Ref("heap", 0, 0), IN, 4), "unknown memory `heap`"),
        (Copy(Ref("workspace", 1, 0), IN, 4), "there is no workspace 1"),
        (Copy(Ref("output", 1, 0), IN, 4), "there is no output 1"),
        (Copy(IN, OUT, 4), r"`input0\[0\]` is written"),
        (SetIndex(Ref("weights", 0, 0), N), r"`weights\[0\]` is written"),
        (Copy(OUT, IN, E.dim("m")), "`m` is not bound"),
        (Copy(OUT, IN, -N), "-n bytes are copied"),
        (Copy(OUT, IN, E.const(4, "int32")), "not a size"),
        (Copy(work(N), work(N + 3), 4), "overlaps itself"),
        (Copy(OUT, work(60), 8), r"`workspace\[60\]` is never inside of the memory"),
        (SetIndex(Ref("dims", 0, 8), N), r"`dims\[8\]` is never inside"),
        (SetIndex(work(-N), N), "is never inside"),
        (SetIndex(OUT, Buffer("b", "int64", (1,))[0]), "not a size"),
        (SetIndex(OUT, I), "`i` is not bound"),
        (Call("k", (OUT,), (I,), "x"), "`i` is not bound"),
        (Repeat(E.loop_var("i", 3), N, (), None), "its declared range ends below 3"),
        (Repeat(E.loop_var("n", N), N, (), None), "the name of a dim, or of a loop around"),
        (Repeat(I, N, (Repeat(I, N, (), None),), None), "the name of a dim, or of a loop around"),
        (Repeat(I, N, (), work(64)), "is never inside"),
        (Branch(Ref("input", 0, I), (), ()), "`i` is not bound"),
        (Branch(IN, (Call("k", (), (), "a"),), (Call("k", (OUT,), (), "b"),)), "kernel `k` is called with different parameters"),
    ],
)
def test_the_verifier_refuses(step, message):
    with pytest.raises(IRError, match=message):
        verify_program(program(step))


def test_the_verifier_refuses_declarations():
    with pytest.raises(IRError, match="different int64 variables"):
        verify_program(program(dims=(N, N)))
    with pytest.raises(IRError, match="`m` is not bound"):
        verify_program(program(workspace=E.dim("m")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frob x[0]", "expected `set`, found `frob`"),
        ("set heap[0] = 1", "`heap` is not a memory"),
        ("set input[0] = 1", "`input` is not a memory"),
        ("set dims1[0] = 1", "`dims1` is not a memory"),
        ("copy 1 bytes from input0[0]", "expected `to`"),
        ("set output0[0] = m", "nothing is called `m` here"),
        ("for i in 1..4 { }", "a loop starts at 0"),
        ("call k(input0[0]", r"expected `\)`"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ParseError, match=message):
        parse_program(f"program workspace 0 -> () {{\n  {text}\n}}")


_x, _y = Buffer("x", "float32", (N,)), Buffer("y", "float32", (N,))
DOUBLE = Kernel("double", (_x, _y), (_y,), (N,), loop("i", N, lambda i: store(_y, (i,), _x[i] * 2.0)))


def run(*steps, inputs=1, kernels=True):
    arrays, out = [np.ones(5, np.float32)] * inputs, np.zeros(5, np.float32)
    run_program(program(*steps), {"double": interpreted(DOUBLE)} if kernels else {}, arrays, [out], np.zeros(8, np.float32), [5])
    return out


def test_the_interpreter():
    half = Call("double", (IN, OUT), (E.const(2),), "half")
    np.testing.assert_array_equal(run(half), [2, 2, 0, 0, 0])
    np.testing.assert_array_equal(run(Copy(OUT, work(4), 4)).view(np.uint8), [0x55] * 4 + [0] * 16)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (Call("double", (IN, OUT), (N + 1,), "x"), IRError, "`x` of kernel `double` has 24 bytes, and 20 are there\n  where: call `x`"),
        (Call("double", (OUT, IN), (N,), "x"), IRError, "`double` writes to an input or to weights"),
        (Call("double", (OUT, Ref("weights", 0, 0)), (N,), "x"), IRError, "writes to an input or to weights"),
        (Call("triple", (), (), "x"), InputError, "no code for the kernel `triple`"),
        (Copy(OUT, Ref("input", 1, 0), 4), InputError, "there is no input 1"),
        (Copy(OUT, Ref("input", 0, 0), N * 5), IRError, r"25 bytes at `input0\[0\]` are at 0 of 20 bytes"),
        (SetIndex(work(N * 12), N), IRError, "are at 60 of 64 bytes"),
    ],
)
def test_the_interpreter_refuses(step, error, message):
    with pytest.raises(error, match=message):
        run(step)
