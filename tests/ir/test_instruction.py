"""Instructions as data: their text, what makes one malformed, and which nests are their meaning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tcomp.errors import IRError, ParseError
from tcomp.ir import expr as E, te
from tcomp.ir.instruction import Fragment, Instruction, Operand, VectorOp, WarpOp, match
from tcomp.ir.interpreters.loops import run_kernel
from tcomp.ir.loops import Accumulate, Buffer, Call, For, Kernel, Stmt, block, loop, store, walk
from tcomp.ir.text.parser import parse_instruction, parse_kernel
from tcomp.ir.verify.loops import verify_kernel
from tcomp.schedules.instructions import (
    fma_tile,
    mma,
    mma_fill,
    mma_store,
    sdot,
    tdpbf16ps,
    tdpbusd,
    vpdpbusd,
    vpmaddwd,
    vpmaddwd_bytes,
    wgmma,
)

GOLDEN = Path(__file__).parents[1] / "golden"
SHIPPED = [fma_tile(6, 4), fma_tile(1, 1, 2, "neon", "float64"), vpdpbusd(3, 2, 2), vpdpbusd(1, 1, 1, 256), vpmaddwd(2, 2, 1, 256), vpmaddwd_bytes(2, 2), sdot(2, 2), tdpbusd(17, 20, 24, 3, 3), tdpbf16ps(1, 1, 1), *map(mma, ("float16", "float32", "int8")), mma_fill(), mma_store("int32"), wgmma("float16", 24), wgmma("float32", 8), wgmma("uint8", 32)]  # fmt: skip


def called(i: Instruction) -> Kernel:
    return replace(i.meaning, name="k", body=Call(i, i.meaning.body))


@pytest.mark.parametrize("i", SHIPPED, ids=lambda i: i.name)
def test_text_round_trips(i: Instruction) -> None:
    text = str(i)
    again = parse_instruction(text)
    assert str(again) == text
    assert (again.operands, again.emission, again.features, again.cycles, again.uops, again.reassociates) == (
        i.operands, i.emission, i.features, i.cycles, i.uops, i.reassociates,
    )  # fmt: skip
    if any("global" not in o.scopes for o in i.operands):
        return
    kernel = called(i)
    verify_kernel(kernel)
    assert str(parse_kernel(str(kernel))) == str(kernel)
    assert match(i, i.meaning.body).loops == {x.var: x.var for x in i.loops if x.extent != 1}


def test_golden() -> None:
    i = vpdpbusd(1, 1)
    a, b, c = Buffer("A", "uint8", (8, 64)), Buffer("B", "int8", (16, 32, 4)), Buffer("C", "int32", (8, 32))

    def nest(name: str) -> Stmt:
        def update(r: E.Expr, j: E.Expr, k: E.Expr) -> Stmt:
            def body(lane: E.Expr, g: E.Expr) -> Stmt:
                value = E.cast(a[r, k * 4 + g], "int32") * E.cast(b[k, j * 16 + lane, g], "int32")
                return Accumulate(c, (r, j * 16 + lane), value, i.leaf.reducer)

            return Call(i, loop(f"{name}l", 16, lambda lane: loop(f"{name}g", 4, lambda g: body(lane, g))))

        return loop(f"{name}r", 8, lambda r: loop(f"{name}j", 2, lambda j: loop(f"{name}k", 16, lambda k: update(r, j, k))))

    kernel = Kernel("bytes", (a, b, c), (c,), (), block(nest("x"), nest("y")))  # one declaration serves both
    verify_kernel(kernel)
    text = str(kernel) + "\n"
    assert text == (GOLDEN / "instruction_kernel.txt").read_text()
    assert str(parse_kernel(text)) + "\n" == text


def test_names_that_are_words_of_the_text() -> None:
    b = Buffer("call", "int32", (4,))
    c = Buffer("instruction", "int32", (4,))
    kernel = Kernel("k", (b, c), (b, c), (), block(*(loop(f"i{n}", 4, lambda i, x=x: store(x, (i,), 1)) for n, x in enumerate((c, b)))))
    assert str(parse_kernel(str(kernel))) == str(kernel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("call `fma_tile(1, 1, 1, avx512, float32)` {", "call other {"), "no instruction is called `other` here"),
        (('needs "avx512f"', "needs 3"), "expected a string"),
        (("operand a[_, _]", "operand b[_, _]"), "the operands are in the order of the buffers, next is `a`"),
        (("emits vector", "emits scalar"), "expected `vector`, `tile` or `warp`"),
        (("lanes 16", "lanes 0"), "is not an instruction: the lanes do not divide"),
        (("group 1", "group 0"), "is not an instruction: the lanes do not divide"),
        (('"llvm.fma.v16f32"', '"llvm.fma()\\n"'), "that of its code not of letters, digits, dots and colons"),
        (("`fma_tile(1, 1, 1, avx512, float32)`(acc", "`fma\\n`(acc"), "its name is not of the form"),
        (("lanes 16", "lanes 7"), "is not an instruction: the lanes do not divide"),
        (("operand b[_, 1]", "operand b[_, 2]"), "`b` does not lie side by side along `j`"),
        (("(a, b, acc) lanes", "(a, b, c) lanes"), "its emission takes an operand that it does not have"),
        (("(a, b, acc) lanes", "(a, acc) lanes"), "does not take each operand once"),
    ],
)
def test_malformed_text(change: tuple[str, str], message: str) -> None:
    text = str(called(fma_tile(1, 1)))
    assert change[0] in text
    with pytest.raises(ParseError, match=message):
        parse_kernel(text.replace(*change))


def test_a_body_that_is_not_the_meaning_is_malformed() -> None:
    text = str(called(fma_tile(2, 1)))
    head, body = text.split("call", 1)
    for before, after in ((" += ", " max= "), ("0..16", "0..8"), ("a[r, k] * b[k, j]", "a[r, k] + b[k, j]")):
        with pytest.raises(IRError, match="the loops are not what"):
            verify_kernel(parse_kernel(f"{head}call{body.replace(before, after)}"))


A, B, ACC = Buffer("a", "float32", (2, 4)), Buffer("b", "float32", (4, 16)), Buffer("acc", "float32", (2, 16))
SUM = te.sum(E.var("x", dtype="float32"), te.reduce_axis(2)).attr[0]


def meaning(
    body: Stmt | None = None, buffers: tuple[Buffer, ...] = (ACC, A, B), outputs: tuple[Buffer, ...] = (ACC,), kind: str = "serial", depth: int = 4
) -> Kernel:  # fmt: skip
    if body is None:
        body = loop(
            "k", depth, lambda k: loop("r", 2, lambda r: loop("j", 16, lambda j: Accumulate(ACC, (r, j), A[r, k] * B[k, j], SUM), kind))
        )
    return Kernel("meaning", buffers, outputs, (), body)


FMA = VectorOp("llvm.fma.v16f32", ("a", "b", "acc"), 16)
ANY = (Operand((None, 1)), Operand((None, None)), Operand((None, 1)))


@pytest.mark.parametrize(
    ("kernel", "operands", "emission", "why"),
    [
        (meaning(kind="vectorized"), ANY, FMA, "not one store in serial loops of constant extent"),
        (meaning(block()), ANY, FMA, "not one store in serial loops"),
        (meaning(depth=3), ANY, FMA, "does not run over the dimension that it indexes"),
        (meaning(loop("j", 16, lambda j: store(ACC, (0, j), 0.0))), ANY, FMA, "an index is not a loop of its own"),
        (
            meaning(loop("r", 2, lambda r: loop("j", 16, lambda j: store(ACC, (r, j), ACC[r, j] + 1)))),
            ANY,
            FMA,
            "reads a buffer in two places",
        ),
        (meaning(buffers=(ACC, A)), ANY, FMA, "its buffers are not the operands"),
        (meaning(outputs=(A,)), ANY, FMA, "its buffers are not the operands"),
        (meaning(), ANY[:2], FMA, "not one stride for each dimension"),
        (meaning(), (Operand((1,)), *ANY[1:]), FMA, "not one stride for each dimension"),
        (meaning(), (Operand((None, 2)), *ANY[1:]), FMA, "`acc` does not lie side by side along `j`"),
        (meaning(), ANY, replace(FMA, lanes=32), "the lanes do not divide"),
        (meaning(), ANY, replace(FMA, group=4), "its innermost loop is not the group"),
        (meaning(), ANY, WarpOp("x", ("acc", "a", "b")), "the threads of a warp do not divide `acc`"),
        (meaning(), (Operand((None, 1), fragment=Fragment((E.const(0),), 1)), *ANY[1:]), WarpOp("x", ("acc",)), "do not divide `acc`"),
    ],
)
def test_malformed_instructions(kernel: Kernel, operands: tuple[Operand, ...], emission: VectorOp | WarpOp, why: str) -> None:
    with pytest.raises(IRError, match=why):
        Instruction("x", kernel, operands, emission, ("fma",), 1.0, 1)


@pytest.mark.parametrize(
    ("i", "change", "why"),
    [
        (
            mma_store(),
            {"operands": (mma_store().operands[0], replace(mma_store().operands[1], fragment=mma("int8").operands[1].fragment))},
            "divide `acc`",
        ),
        (mma_fill(), {"emission": WarpOp("mma.sync", ("acc",))}, "the code of a warp adds products of two operands"),
        (mma("int8"), {"emission": WarpOp("", ("acc",))}, "without code, a thread copies its elements"),
        (
            mma_fill(),
            {"operands": (replace(mma_fill().operands[0], fragment=Fragment((E.var("x"), E.const(0)), 4)),)},
            "not given by the thread",
        ),
        (mma_fill(), {"name": "x\ny"}, "its name is not of the form"),
        (mma_fill(), {"emission": WarpOp('"', ("acc",))}, "not of letters, digits, dots and colons"),
        (wgmma("int8", 8), {"operands": (*wgmma("int8", 8).operands[:2], Operand((None, 8, None, 1), ("shared",)))}, "do not divide `b`"),
        (
            wgmma("int8", 8),
            {"operands": (wgmma("int8", 8).operands[0], Operand((None, 16, None, 1)), wgmma("int8", 8).operands[2])},
            "do not divide `a`",
        ),
        (wgmma("int8", 8), {"operands": (Operand((None,) * 4), *wgmma("int8", 8).operands[1:])}, "do not divide `acc`"),
        (wgmma("int8", 8), {"emission": WarpOp("", ("acc", "a", "b"))}, "do not divide `a`"),
        (
            mma("int8"),
            {"operands": (*mma("int8").operands[:2], Operand((None, None), fragment=Fragment((E.const(0), E.const(0)), 2, 128)))},
            "`b` is divided among 128 threads, `acc` among 32",
        ),
        (mma_fill(), {"emission": WarpOp("c;", ("acc",))}, "not of letters, digits, dots and colons"),
    ],
)
def test_malformed_instructions_of_gpus(i: Instruction, change: dict, why: str) -> None:
    with pytest.raises(IRError, match=why):
        replace(i, **change)


@pytest.mark.parametrize("i", [i for i in SHIPPED if isinstance(i.emission, WarpOp)], ids=lambda i: i.name)
def test_fragments_cover_each_element_once(i: Instruction) -> None:
    from tcomp.ir.instruction import ELEMENT

    for b, o in zip(i.meaning.buffers, i.operands, strict=True):
        if o.fragment is None:
            assert i.background and o.scopes == ("shared",)
            continue
        found = np.zeros([int(n) for n in b.shape], int)
        for lane in range(i.threads):
            for e in range(o.fragment.count):
                found[tuple(E.evaluate_int(x, {o.fragment.lane: lane, ELEMENT: e}) for x in o.fragment.indices)] += 1
        assert (found == 1).all()


def test_analyses_see_the_meaning() -> None:
    """A call is to every pass what its body is: loops, stores, values in the interpreter."""
    i = fma_tile(2, 1, 4)
    kernel = called(i)
    assert [type(s) for s in walk(kernel.body)] == [Call, For, For, For, Accumulate]
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-4, 5, [int(n) for n in b.shape]).astype(np.float32) for b in kernel.buffers]
    want = arrays[0] + arrays[1] @ arrays[2]
    run_kernel(kernel, dict(zip(kernel.buffers, arrays, strict=True)))
    np.testing.assert_array_equal(arrays[0], want)
