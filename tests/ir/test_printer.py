"""The printed form and its parser: round trips, golden listings, refusals."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tcomp.errors import ParseError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.graph import IF, KERNEL, Graph, GraphBuilder, Node, Operator, Value, canonical_graph_text, content_hash
from tcomp.ir.layout import Layout
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.te import print_te
from tcomp.ir.text.expression_parser import parse_expr
from tcomp.ir.text.parser import parse_graph, parse_kernel, parse_program, parse_te
from tcomp.ir.verify.graph import verify_graph
from tcomp.ir.verify.loops import verify_kernel, verify_te
from tests.ir.index_programs import CONDITIONS, INDICES, VARIABLES
from tests.ir.value_programs import BODIES, INPUTS, tensor

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = {v.name: v for v in VARIABLES} | {n: t for n, t in INPUTS.items()}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(INDICES)
def test_index_expressions_round_trip(e):
    assert parse_expr(str(e), NAMES) is e


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CONDITIONS)
def test_conditions_round_trip(e):
    assert parse_expr(str(e), NAMES) is e


@settings(max_examples=60, deadline=None, derandomize=True)
@given(BODIES)
def test_tensor_expressions_round_trip(body):
    names = {**INPUTS, "i": E.loop_var("i", 3), "j": E.loop_var("j", 4)}
    assert parse_expr(str(body), names) is body
    text = print_te([tensor(body)])
    assert print_te(parse_te(text)) == text


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (E.const(3), "3"),
        (E.const(-3, "int8"), "-3i8"),
        (E.const(2**64 - 1, "uint64"), "18446744073709551615u64"),
        (E.const(-(2**63)), "-9223372036854775808"),
        (E.const(0.1, "float32"), "0.1f"),
        (E.const(-0.0, "float64"), "-0.0"),
        (E.const(1e30, "float16"), "1e+30f16"),
        (E.const(1.5, "bfloat16"), "1.5bf16"),
        (E.const(float("-inf"), "float32"), "float32(-inf)"),
        (E.const(float("nan"), "float64"), "nan"),
        (E.const(False, "bool"), "false"),
    ],
)
def test_constants(e, text):
    assert str(e) == text
    assert parse_expr(text) is e


def test_parentheses_are_minimal():
    a, b, c = (E.var(n) for n in "abc")
    names = {"a": a, "b": b, "c": c}
    for text in [
        "a + b * c", "(a + b) * c", "a - (b - c)", "a - b - c", "-a // b", "-(a // b)", "a // (b % c)", "~a & b | c ^ a",
        "a << b + c", "(a << b) + c", "(a < b) == (b <= c)", "select(a < b & c, min(a, b), max(-b, 3))", "(a == b) & ~(b < c)",
        "bitcast(float64(a), uint64)", "truncdiv(a, truncmod(b, c))", "fma(float32(a), 2.0f, exp(float32(b)))", "ldexp(float32(a), 2.0f)",
    ]:  # fmt: skip
        assert str(parse_expr(text, names)) == text


def test_text_is_linear_in_the_size_of_the_program():
    x = te.placeholder((4,), name="X")
    e = x[E.loop_var("i", 4)]
    for _ in range(100):
        e = te.tanh(e * 0.5 + 1.0) * e
    text = str(e)
    assert len(text) < 20_000
    assert parse_expr(text, {"X": x, "i": E.loop_var("i", 4)}) is e
    chain = x[0]
    for n in range(3000):
        chain = chain + float(n)
    assert parse_expr(str(chain), {"X": x}) is chain


def test_names_are_unique_and_odd_names_quoted():
    a, b = L.Buffer("x/y:0", "float32", (4,)), L.Buffer("x/y:0", "float32", (4,))
    i, j = E.loop_var("for", 4), E.loop_var("for", 3)
    body = L.For(i, 4, L.For(j, 3, L.Store(a, (i,), b[j])))
    text = str(L.Kernel("a`b\\c\n", (a, b), (a,), (), body))
    assert "`x/y:0_1`[for_1]" in text and "`for` in 0..4" in text
    again = parse_kernel(text)
    assert str(again) == text and again.name == "a`b\\c\n"


# ---------------------------------------------------------------- listings


def gemm_kernel():
    m = E.dim("M", 1, 512)
    a, b, c = L.Buffer("A", "float32", (m, 64)), L.Buffer("B", "float32", (64, 8)), L.Buffer("C", "float32", (m, 8))
    acc = L.Buffer("acc", "float32", (8,), "register")
    total = standard_reducers("float32")["sum"]

    def row(i):
        update = L.loop(
            "j2", 8, lambda j: L.Accumulate(acc, (j,), a[i, E.loop_var("k", 64)] * b[E.loop_var("k", 64), j], total), L.VECTORIZED
        )
        work = [
            L.loop("j", 8, lambda j: L.store(acc, (j,), 0.0), L.VECTORIZED),
            L.For(E.loop_var("k", 64), 64, update),
            L.If(i < m - 1, L.loop("j3", 8, lambda j: L.store(c, (i, j), te.maximum(acc[j], 0.0)), L.UNROLLED), L.store(c, (i, 0), acc[0])),
        ]
        return L.Allocate(acc, L.block(*work))

    return L.Kernel("gemm", (a, b, c), (c,), (m,), L.loop("i", m, row, L.PARALLEL), ("relu(A @ B)",))


def other_kernel():
    """Every statement and declaration that the other one lacks."""
    smooth = te.comm_reducer(lambda x, y: te.select(x < y, y * 0.5 + x, x), lambda _: -1.0, "smooth")
    reducer = smooth(E.var("x", dtype="float32"), E.loop_var("k", 2)).attr[0]
    x, n = L.Buffer("X", "float32", (16, 16)), L.Buffer("N", "int64", ())
    shared = L.Buffer("tile", "float32", (16,), "shared")

    def block(i):
        j = E.var("t", 0, 20)  # a range that its extent does not tell
        inner = L.For(j, 16, L.store(shared, (j,), x[i, E.minimum(j, 15)]), "thread.x")
        return L.block(L.Allocate(shared, L.block(inner, L.Accumulate(x, (i, E.const(0)), shared[3], reducer))), L.store(n, (), n[()] + 1))

    loop = L.While(n[()] < 3, L.loop("b", 16, block, "block.x"))
    return L.Kernel("other", (x, n), (x, n), (), loop)


def attention_te():
    s = E.dim("s", 1, 128)
    q, k, v = (te.placeholder((4, s, 8), name=n) for n in "QKV")
    d, t, u = te.reduce_axis(8, "d"), te.reduce_axis(s, "t"), te.reduce_axis(s, "u")
    scores = te.compute(
        (4, s, s), lambda h, i, j: te.select(j <= i, te.sum(q[h, i, d] * k[h, j, d], axis=d) * 0.35, float("-inf")), "scores"
    )
    top = te.compute((4, s), lambda h, i: te.max(scores[h, i, t], axis=t), "top")
    weight = te.compute((4, s, s), lambda h, i, j: te.exp(scores[h, i, j] - top[h, i]), "weight")
    out = te.compute((4, s, 8), lambda h, i, c: te.sum(weight[h, i, t] * v[h, t, c], axis=t) / te.sum(weight[h, i, u], axis=u), "out")
    return [out]


def extern_te():
    x = te.placeholder((6,), name="X")

    def program(inputs, outputs):
        step = L.loop("i", 6, lambda i: L.store(outputs[0], (i,), inputs[0][i] + te.select(i > 0, outputs[0][i - 1], 0.0)))
        return L.block(step, L.store(outputs[1], (), 6))

    running, _ = te.externs([((6,), "float32"), ((), "int32")], [x], program, "scan")
    gelu = te.compute((6,), lambda i: running[i] * 0.5 * (1.0 + te.erf(running[i] * 0.70710678)), "gelu")
    both = te.compute((6,), lambda i: (gelu[i] * gelu[i], te.cast(i, "float32")), "both")
    return list(both)


def residual_graph():
    n = E.dim("batch size", 1, 8)
    builder = GraphBuilder("net")
    x = builder.input("x", "float32", (n, 16, 9, 9))
    scale = builder.constant(np.array([0.1, -0.0, 2, 3e-8], np.float32), "/scale")
    table = builder.constant(np.arange(20, dtype=np.int64), "table")
    flags = builder.constant(np.array([True, False]), "flags")
    (y,) = builder.add(OPS["relu"], [x], {}, "relu 1")
    (z,) = builder.add(OPS["add"], [y, x])
    attrs = {"factor": float("inf"), "axes": ((1,), (), -2), "mode": 'a"b\n', "count": n * 2 + 1, "flag": True, "none": None}
    (s,) = builder.add(OPS["scale"], [z, scale, None], attrs, "scaled")
    (g,) = builder.add(OPS["pick"], [table, flags])
    body = GraphBuilder("body")
    a = body.input("a", "float32", (n, 16, 9, 9))
    (b,) = body.add(OPS["relu"], [a])
    (c,) = body.add(OPS["add"], [b, a])
    blocked = Value("blocked", "float32", (n, 16, 9, 9), Layout.blocked((0, 1, 2, 3), 1, 8))
    inner = body.build([c])
    relaid = Graph("body", inner.inputs, (Value(c.name, c.dtype, c.shape, blocked.layout),), inner.nodes)
    last = Node(inner.nodes[-1].op, inner.nodes[-1].inputs, relaid.outputs, {}, "")
    builder.append(Node(KERNEL, (s,), (blocked,), {}, "k", (Graph("body", inner.inputs, relaid.outputs, (inner.nodes[0], last)),)))
    chosen = Value("chosen", "float32", (n, 16, 9, 9))
    builder.append(Node(IF, (g, x), (chosen,), {}, "", (body.build([c]), body.build([b]))))
    return builder.build([blocked, chosen])


OPS = {
    "relu": Operator("relu", lambda x: te.compute(x.shape, lambda *i: te.maximum(x[i], 0.0))),
    "add": Operator("add", lambda x, y: te.compute(x.shape, lambda *i: x[i] + y[i])),
    "scale": Operator("scale", lambda x, c, bias, factor, **_: te.compute(x.shape, lambda *i: x[i] * c[i[1] % 4] * factor)),
    "pick": Operator("pick", lambda t, f: te.compute((), lambda: f[t[1]])),
}


@pytest.mark.parametrize("build", [gemm_kernel, other_kernel])
def test_kernels(build, golden):
    kernel = build()
    verify_kernel(kernel)
    text = str(kernel)
    golden(f"{build.__name__}.txt", text)
    again = parse_kernel(text)
    verify_kernel(again)
    assert str(again) == text


@pytest.mark.parametrize("build", [attention_te, extern_te])
def test_tensor_expressions(build, golden):
    outputs = build()
    verify_te(outputs)
    text = print_te(outputs)
    golden(f"{build.__name__}.txt", text)
    again = parse_te(text)
    verify_te(again)
    assert print_te(again) == text


def test_graphs(golden):
    graph = residual_graph()
    verify_graph(graph)
    text = str(graph)
    golden("residual_graph.txt", text)
    again = parse_graph(text, OPS, {content_hash(a): a for a in graph.constants.values()})
    verify_graph(again)
    assert str(again) == text
    for old, new in zip(graph.constants.values(), again.constants.values(), strict=True):
        assert old.dtype == new.dtype and old.tobytes() == new.tobytes()
    assert again.nodes[2].attrs == graph.nodes[2].attrs


def kernel_body(prefix, extra=False):
    builder = GraphBuilder(prefix)
    v = builder.input(prefix + "in", "float32", (E.dim("n"), 8))
    if extra:
        builder.constant(np.ones(3, np.float32), "unused")
    for n in range(10):
        (v,) = builder.add(OPS["relu" if n % 2 else "add"], [v] if n % 2 else [v, v], {}, f"{prefix}{n}")
    return builder.build([v])


def test_canonical_text_forgets_names_only():
    text = canonical_graph_text(kernel_body("a"))
    assert text == canonical_graph_text(kernel_body("layer.", extra=True))
    assert canonical_graph_text(parse_graph(text, OPS)) == text
    shorter = kernel_body("a")
    assert text != canonical_graph_text(Graph("a", shorter.inputs, (shorter.nodes[-2].outputs[0],), shorter.nodes))


# ---------------------------------------------------------------- refusals


def kernel_text(body, head="A: float32[4]"):
    return f"kernel k({head}) -> (A) {{\n  {body}\n}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kernel_text("A[0] = B[1]"), "nothing is called `B` here\n  where: line 2, column 10\n      A\\[0\\] = B\\[1\\]\n             \\^"),
        (kernel_text("A[0] ="), "expected a name, found `}`"),
        (kernel_text("A[0] = 1 + 1.0f"), "`add` of int64 and float32"),
        (kernel_text("A[0, 1] = A[0, 1]"), "has 1 dimensions and was indexed with 2"),
        (kernel_text("A[0] = " + "(" * 100_000), "nested too deeply"),
        (kernel_text("A[0] = frob(1)"), "there is no function `frob`"),
        (kernel_text("A[0] = exp(1.0f, 2.0f)"), "`exp` takes 1 operands and was given 2"),
        (kernel_text("A[0] = 99999999999999999999"), "does not fit in int64"),
        (kernel_text("A[0] = 1" + "0" * 500), "more than 400 digits"),
        (kernel_text("A[9223372036854775808] = 0.0f"), "9223372036854775808 does not fit in int64"),
        (kernel_text("A[0 - 128i8] = 0.0f"), "128 does not fit in int8"),
        (kernel_text('instruction i(B: float32[1]) -> (B) { operand B[1] needs "avx2" takes }'), "expected a number, found `}`"),
        (kernel_text("A[0] = 1.5i32"), "a fraction of type int32"),
        (kernel_text("A[0] sun= 1.0f"), "there is no reducer `sun` of float32"),
        (kernel_text("for i in 1..4 { }"), "a loop starts at 0"),
        (kernel_text("for i in 0..1.5f { }"), "an extent is int64, not float32"),
        (kernel_text("A[0] = 1.0f", head="A: float33[4]"), "expected a dtype, found `float33`"),
        (kernel_text("A[0] = $"), "a character that starts nothing"),
        (kernel_text("A[0] = `a\\q`"), "a malformed escape"),
        (kernel_text("A[0] = 1.0f") + " x", "expected the end of the text"),
        ("kernel k(A: float32[4]) -> (A) {", "expected a name, found the end of the text"),
        ("kernel k(A: float32[4]) -> (B) { }", "nothing is called `B` here"),
    ],
)
def test_bad_kernels_are_refused(text, message):
    with pytest.raises(ParseError, match=message):
        parse_kernel(text)


def graph_text(line, outputs="%x"):
    return f"graph g(%x: float32[4]) -> ({outputs}) {{\n  {line}\n}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (graph_text("%y: float32[4] = frob(%x)"), "there is no operator `frob`"),
        (graph_text("%y: float32[4] = relu(%z)"), "no value `%z` is known here"),
        (graph_text("%y: float32[4] = relu(%y)"), "no value `%y` is known here"),
        (graph_text("%x: float32[4] = relu(%x)"), "`%x` is defined twice"),
        (graph_text("", "%y"), "no value `%y` is known here"),
        (graph_text('const %c: float32[9] = sha256 "00"'), "the constant 00 is not among those given"),
        (graph_text("const %c: float32[3] = [1.0, 2.0]"), "`%c` needs 3 numbers"),
        (graph_text("const %c: int8[2] = [1, 200]"), "`%c` needs integers in -128..127"),
        (graph_text("const %c: int8[99999999999999] = [1]"), "needs 99999999999999 numbers"),
        (graph_text("%y: float32[4] (a,c) = relu(%x)"), "`c` is not an axis of 1 dimensions"),
        (graph_text("%y: float32[n] = relu(%x)"), "nothing is called `n` here"),
        (graph_text("%y: float32[4] = relu(%x, k=exp)"), "nothing is called `exp` here"),
    ],
)
def test_bad_graphs_are_refused(text, message):
    with pytest.raises(ParseError, match=message):
        parse_graph(text, OPS)


def test_damaged_text_is_read_or_refused_but_nothing_else():
    rng = random.Random(0)
    readers = {
        "gemm_kernel": parse_kernel,
        "other_kernel": parse_kernel,
        "attention_te": parse_te,
        "extern_te": parse_te,
        "program": parse_program,
        "residual_graph": lambda text: parse_graph(text, OPS, {content_hash(np.arange(20)): np.arange(20)}),
    }
    pieces = {name: re.findall(r"\s+|[A-Za-z_0-9.]+|`[^`]*`|.", (GOLDEN / f"{name}.txt").read_text()) for name in readers}
    odd = ["0", "-1", "9" * 30, "inf", "1e999", "\x00", "é", "(", "`", "let", "%", '"', "\\", "1.5f", "float32", "..", "{", "}"]
    refused = 0
    for _ in range(400):
        name = rng.choice(list(readers))
        damaged = list(pieces[name])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randint(0, 1)] = rng.choice([[], [rng.choice(odd)], [rng.choice(damaged)]])
        try:
            readers[name]("".join(damaged))
        except ParseError as error:
            refused += 1
            assert error.where.startswith("line ")
    assert refused > 200
