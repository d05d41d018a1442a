"""The verifiers: programs that must be refused, with the message that says why."""

from dataclasses import replace

import numpy as np
import pytest

from tcomp.errors import IRError
from tcomp.ir import expr as E, loops as L, te
from tcomp.ir.expr import _make, reduce
from tcomp.ir.graph import IF, KERNEL, LOOP, Graph, GraphBuilder, Node, Operator, Value
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.reducers import standard_reducers
from tcomp.ir.verify.expressions import verify_expr
from tcomp.ir.verify.graph import verify_graph
from tcomp.ir.verify.loops import verify_kernel, verify_te

X = te.placeholder((4, 5), name="X")
P = te.placeholder((4,), "int32", "P")
I, J, N, M = E.loop_var("i", 4), E.loop_var("j", 5), E.dim("n"), E.dim("m")
ZERO, ONE = E.const(0), E.const(1)
SUM = standard_reducers("float32")["sum"]


def refused(check, argument, message):
    with pytest.raises(IRError, match=message):
        check(argument)


# ---------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("e", "message"),
    [
        (_make("add", "float32", (X[I, J], I)), r"`add` of \(float32, int64\) gives float32"),
        (_make("lt", "int64", (I, J)), r"`lt` of \(int64, int64\) gives int64"),
        (E.binary("div", I, 2), "`div` is not defined for int64"),
        (E.binary("and", X[I, J], X[I, J] + 1.0), "`and` is not defined for float32"),
        (E.binary("add", I < 2, J < 2), "`add` is not defined for bool"),
        (E.unary("exp", P[I]), "`exp` is not defined for int32"),
        (E.unary("popcount", X[I, J]), "`popcount` is not defined for float32"),
        (_make("fma", "float32", (X[I, J],)), r"`fma` of \(float32\) gives float32"),
        (_make("select", "float32", ()), r"`select` of \(\) gives float32"),
        (_make("neg", "int64", (X[I, J],)), r"`neg` of \(float32\) gives int64"),
        (_make("frob", "int64", (I,)), "unknown operator `frob`"),
        (_make("const", "int8", (), 300), "the constant 300 is not of int8"),
        (_make("const", "float33", (), 1.0), "unknown dtype `float33`"),
        (_make("select", "float32", (I, X[I, J], X[I, J])), r"`select` of \(int64, float32, float32\)"),
        (E.bitcast(X[I, J], "int64"), "bitcast of float32 to int64"),
        (E.fma(P[I], P[I], P[I]), "`fma` is not defined for int32"),
        (_make("read", "float32", (I,), X), "`X` has 2 dimensions and is read with 1 indices"),
        (_make("read", "float32", (I, P[I]), X), "an index of `X` is int32"),
        (_make("read", "int32", (I, J), X), "a read of `X` is int32 instead of float32"),
        (X[I + 4, J], "index 0 of `X` is i \\+ 4, its extent is 4"),
        (X[0, -1 - J], "index 1 of `X`"),
        (_make("reduce", "int32", (P[I],), (SUM, (E.loop_var("k", 2),))), "the reducer `sum` of float32 reduces int32"),
        (reduce(SUM, X[I, J], [J, J]), "reduction axes must be different variables"),
        (reduce(replace(SUM, combine=SUM.lhs + E.var("z", dtype="float32")), X[I, J], [J]), "depends on something outside"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_expressions(e, message):
    refused(lambda bad: verify_expr(bad, "here"), e, message)


def test_guards_are_respected():
    verify_expr(E.select(I < 0, X[I + 4, J], 0.0))
    verify_expr(te.sum(X[E.loop_var("k", 0) + 9, J], axis=E.loop_var("k", 0)))


# ---------------------------------------------------------------- tensor expressions


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (te.Tensor("T", (4,), "float32", (I, J), X[I, J]), "2 different axes for 1 dimensions"),
        (te.Tensor("T", (6,), "float32", (J,), X[0, J]), "`j` runs below 6, its declared range ends below 5"),
        (te.Tensor("T", (5,), "float64", (J,), X[0, J]), "the body is float32, the tensor float64"),
        (te.Tensor("T", (4,), "float32", (I,), X[I, J]), "the variable `j` is not bound"),
        (te.Tensor("T", (5,), "float32", (J,), reduce(SUM, X[0, J], [J])), "an axis of the tensor is reduced over as well"),
        (te.Tensor("T", (4,), "float32", (I,), L.Buffer("B", "float32", (4,))[I]), "reads the buffer `B`"),
        (te.Tensor("T", (M,), "float32", (E.loop_var("q", N),), E.const(1.0, "float32")), "`q` runs below m"),
    ],
)
def test_tensor_expressions(t, message):
    refused(verify_te, [t], message)


def test_externs():
    extern = te.extern(((4,), "float32"), [P], lambda i, o: L.store(o[0], (0,), E.cast(i[0][0], "float32")))
    verify_te([extern])
    wrong = te.Tensor("T", (5,), "float32", extern=extern.extern)
    refused(verify_te, [wrong], "does not fit")
    writes = te.extern(((4,), "float32"), [P], lambda i, o: L.store(i[0], (0,), 1))
    refused(verify_te, [writes], "`in0` is written but not an output")


# ---------------------------------------------------------------- loop programs

A, B = L.Buffer("A", "float32", (8,)), L.Buffer("B", "float32", (N,))
REGISTERS = L.Buffer("R", "float32", (4,), "register")


def kernel(body, buffers=(A, B), outputs=(A,), scalars=(N,)):
    return L.Kernel("k", buffers, outputs, scalars, body)


FILL = L.loop("i", 8, lambda i: L.store(A, (i,), 0.0))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (kernel(FILL, buffers=(A, A)), "two buffers have the same name"),
        (kernel(FILL, scalars=(N, E.dim("n", 2))), "two scalars have the same name"),
        (kernel(FILL, scalars=(N, E.var("f", dtype="float32"))), "a scalar is not an int64 variable"),
        (kernel(FILL, buffers=(B,)), "an output is not among the buffers"),
        (kernel(FILL, buffers=(A, REGISTERS)), "the parameter `R` is in register memory"),
        (kernel(FILL, scalars=()), "the variable `n` is not bound"),
        (kernel(L.store(B, (0,), 1.0)), "`B` is written but not an output"),
        (kernel(L.store(REGISTERS, (0,), 1.0)), "`R` is written outside of its scope"),
        (kernel(L.store(A, (0,), REGISTERS[0])), "`R` is read outside of its scope"),
        (kernel(L.block(L.Allocate(REGISTERS, FILL), L.store(A, (0,), REGISTERS[0]))), "`R` is read outside of its scope"),
        (kernel(L.Allocate(REGISTERS, L.Allocate(REGISTERS, FILL))), "`R` is declared twice"),
        (kernel(L.Allocate(L.Buffer("S", "float32", (N,), "register"), FILL)), "register buffer `S` has a symbolic shape"),
        (
            kernel(L.Allocate(L.Buffer("S", "float32", (E.cast(A[0], "int64"),)), FILL)),
            "an extent of the buffer `S` is looked up in another one",
        ),
        (kernel(L.Allocate(L.Buffer("S", "float32", (4,), "heap"), FILL)), "unknown scope `heap`"),
        (kernel(L.block(FILL, FILL)), "two loops have the name `i`"),
        (kernel(L.loop("i", 8, lambda i: L.store(A, (i,), 0.0), "diagonal")), "unknown kind of loop `diagonal`"),
        (kernel(L.loop("i", N, lambda i: L.store(A, (0,), 0.0), L.VECTORIZED)), "vectorized loop `i` has the symbolic extent n"),
        (kernel(L.For(E.loop_var("i", 8), 9, L.store(A, (0,), 0.0))), "`i` runs below 9, its declared range ends below 8"),
        (kernel(L.For(E.var("i", 1, 8), 8, L.store(A, (0,), 0.0))), "cannot be the variable of a loop"),
        (kernel(L.loop("a", 2, lambda a: L.loop("b", 2, lambda b: FILL, "block.x"), "block.x")), "two nested loops are bound to block.x"),
        (kernel(L.loop("a", 2, lambda a: L.loop("b", 2, lambda b: FILL, L.PARALLEL), L.VECTORIZED)), "inside a vectorized one"),
        (kernel(L.If(ONE, FILL)), "a condition is int64 instead of bool"),
        (kernel(L.While(A[0], FILL)), "a condition is float32 instead of bool"),
        (kernel(L.Store(A, (ZERO, ZERO), A[0])), "`A` has 1 dimensions and is written with 2 indices"),
        (kernel(L.Store(A, (ZERO,), ONE)), "a int64 is stored in `A` of float32"),
        (kernel(L.store(A, (8,), 0.0)), "index 0 of `A` is 8, its extent is 8"),
        (kernel(L.store(A, (0,), B[E.const(-1)])), "index 0 of `B` is -1"),
        (kernel(L.store(A, (0,), X[0, 0])), "`X` is read outside of its scope"),
        (kernel(L.Store(A, (ZERO,), reduce(SUM, A[0], [J]))), "a loop program contains a reduction"),
        (kernel(L.Accumulate(A, (ZERO,), A[1], standard_reducers("int32")["sum"])), "the reducer `sum` is not one of float32"),
        (kernel(L.store(A, (I,), 0.0)), "the variable `i` is not bound"),
        (kernel("A[0] = 1"), "str is not a statement"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_kernels(program, message):
    refused(verify_kernel, program, message)


def test_places_show_loops_and_the_statement():
    nest = L.loop("i", 2, lambda i: L.loop("j", 3, lambda j: L.store(A, (j + 8,), 0.0)))
    refused(verify_kernel, kernel(nest), r"where: kernel `k`, loops i, j: A\[j \+ 8\] = 0.0f")
    verify_kernel(kernel(L.If(N < 0, nest)))


# ---------------------------------------------------------------- graphs

RELU = Operator("relu", lambda x: te.compute(x.shape, lambda *i: te.maximum(x[i], 0.0)))
BROKEN = Operator("broken", lambda x: te.compute(x.shape, lambda i: x[i + 4]))
A4, FLAG = Value("a", "float32", (4,)), Value("flag", "bool", ())


def value(name="v", dtype="float32", shape=(4,), layout=None):
    return Value(name, dtype, shape, layout)


def graph(*nodes, inputs=(A4,), outputs=(), constants=None):
    return Graph("g", inputs, outputs, nodes, constants or {})


def relu(source=A4, target=None, **fields):
    return replace(Node(RELU, (source,), (target or value(),), {}, "r"), **fields)


def body(*names, dtype="float32", out=None):
    """A graph that takes the named values and returns the relu of the last."""
    inputs = [value(n, dtype) for n in names]
    builder = GraphBuilder("body")
    builder.inputs.extend(inputs)
    (made,) = builder.add(RELU, [inputs[-1]])
    return builder.build([made] if out is None else out(inputs, made))


def structural(op, inputs, outputs, *bodies, **attrs):
    return graph(Node(op, inputs, outputs, attrs, "s", bodies), inputs=tuple(dict.fromkeys(v for v in inputs if v is not None)))


LOOP_ATTRS = {"trips": 3, "carried": 1, "scanned": 0, "reverse_in": (), "reverse_out": (), "condition": False}
COUNTER = value("n", "int64", ())


def loop_body():
    builder = GraphBuilder("body")
    builder.inputs.extend([COUNTER, value("x")])
    return builder.build(builder.add(RELU, [builder.inputs[1]]))


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (graph(inputs=(A4, value("a"))), "two inputs have the same name"),
        (graph(inputs=(A4, A4)), "two inputs have the same name"),
        (graph(relu(target=A4)), "`a` is defined twice"),
        (graph(relu(source=value("z"))), "`z` is used but not defined before"),
        (graph(outputs=(value("z"),)), "the output `z` is not defined"),
        (
            graph(relu(target=value(shape=(5,)))),
            r"the operator gives relu|the operator gives compute: float32\[4\], the node declares %v: float32\[5\]",
        ),
        (graph(relu(target=value(dtype="int32"))), "the node declares %v: int32"),
        (graph(relu(outputs=(value(), value("w")))), "the operator gives 1 values, the node declares 2"),
        (graph(relu(attrs={"axis": [1]})), "an attribute is a list"),
        (graph(relu(attrs={"axis": (np.int64(1),)})), "an attribute is a int64"),
        (graph(relu(bodies=(body("x"),))), "only structural operators have bodies"),
        (graph(replace(relu(), op=BROKEN)), r"`a`, of shape \[4\], is read over 8 elements along axis 0"),
        (graph(replace(relu(), op=Operator("none"))), "the operator `none` has no definition"),
        (graph(constants={value("c"): np.zeros(3, np.float32)}), r"the constant .* holds float32\[3\]"),
        (graph(constants={value("c"): np.zeros(4)}), r"the constant .* holds float64\[4\]"),
        (graph(inputs=(value(dtype="int7"),)), "unknown dtype `int7`"),
        (graph(inputs=(value(shape=(-1,)),)), "an extent of -1"),
        (graph(inputs=(value(layout=Layout.permuted((1, 0))),)), "is for 2 dimensions"),
        (graph(inputs=(value(layout=Layout(1, (Piece(0, 4),))),)), "does not store axis 0 exactly once"),
        (graph(inputs=(value(layout=Layout(1, (Piece(0), Piece(0, 1, 4)))),)), "does not store axis 0 exactly once"),
        (structural(KERNEL, (A4,), (value(),)), "`kernel` has 0 bodies instead of 1"),
        (structural(KERNEL, (A4, None), (value(),), body("x")), "an input of a structural operator is left out"),
        (structural(KERNEL, (A4,), (value(shape=(5,)),), body("x")), "the body gives"),
        (structural(KERNEL, (A4, A4), (value(),), body("x")), "the node gives 2 values, the body takes 1"),
        (structural(KERNEL, (A4,), (value(layout=Layout.blocked((0,), 0, 2)),), body("x")), "the body gives"),
        (structural(KERNEL, (A4,), (value(),), structural(KERNEL, (A4,), (value(),), body("x"))), "contains a structural operator"),
        (structural(IF, (A4,), (value(),), body("x"), body("x")), "the condition is not one bool"),
        (structural(IF, (FLAG, A4), (value(),), body("x")), "`if` has 1 bodies instead of 2"),
        (structural(IF, (FLAG, A4), (value(),), body("x"), body("x", "y")), "the body takes 2"),
        (structural(LOOP, (A4,), (value(),), loop_body()), "a loop lacks the attribute `carried`"),
        (structural(LOOP, (A4,), (value(),), body("x"), **LOOP_ATTRS), "the body takes 1"),
        (structural(LOOP, (A4,), (value(),), loop_body(), **LOOP_ATTRS | {"carried": 3}), "do not fit"),
        (structural(LOOP, (A4,), (value(),), loop_body(), **LOOP_ATTRS | {"reverse_in": (True,)}), "reverse_in and reverse_out"),
        (structural(LOOP, (A4,), (value(), value("w")), loop_body(), **LOOP_ATTRS | {"reverse_out": (False,)}), "one row for each"),
        (structural(LOOP, (A4,), (value(),), loop_body(), **LOOP_ATTRS | {"condition": True}), "the node declares 2"),
    ],
)
def test_graphs(g, message):
    refused(verify_graph, g, message)


def test_nested_places_are_named():
    inner = Graph("inner", (A4,), (value("z"),), ())
    refused(verify_graph, structural(KERNEL, (A4,), (value(),), inner), "where: graph `g`, node `s` \\(kernel\\): graph `inner`")


def test_well_formed_graphs_pass():
    v = value()
    verify_graph(graph(relu(target=v), outputs=(v, A4)))
    verify_graph(structural(IF, (FLAG, A4), (value(),), body("x"), body("x")))
    verify_graph(structural(LOOP, (A4,), (value(),), loop_body(), **LOOP_ATTRS))
