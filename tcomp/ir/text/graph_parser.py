"""Reads printed graphs and layouts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from tcomp.ir.dtypes import BITS, integer_range, to_numpy
from tcomp.ir.expr import Expr
from tcomp.ir.graph import STRUCTURAL, Graph, Node, Operator, Value
from tcomp.ir.layout import Layout, Piece
from tcomp.ir.text.parser import Parser


def parse_layout(text: str, rank: int) -> Layout:
    """A printed layout, `(a/16,b,a%16)`, of tensors with `rank` dimensions."""
    parser = _GraphParser(text, {}, {})
    return parser.whole(lambda: parser.layout(rank))


def parse_graph(text: str, operators: Mapping[str, Operator], constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """A printed graph. `operators` are looked up by name, large constants by their `content_hash`."""
    parser = _GraphParser(text, {**operators, **{op.name: op for op in STRUCTURAL}}, constants or {})
    return parser.whole(lambda: parser.graph(outermost=True))


class _GraphParser(Parser):
    def __init__(self, text: str, operators: Mapping[str, Operator], constants: Mapping[str, np.ndarray]) -> None:
        super().__init__(text)
        self.operators, self.constants = operators, constants
        self.values: dict[str, Value] = {}

    def graph(self, outermost: bool = False) -> Graph:
        outer, self.values = self.values, {}
        self.expect("graph")
        name = self.name()
        if outermost:
            self.dims()
        inputs = self.bracketed(self.value_declaration, "()")
        self.expect("->", "(")  # outputs are named before their nodes: skip them now, look them up at the end
        place = self.position
        while not self.accept(")"):
            if self.token.kind == "end":
                self.fail("expected `)`, found the end of the text")
            self.take()
        self.expect("{")
        constants: dict[Value, np.ndarray] = {}
        nodes: list[Node] = []
        while not self.accept("}"):
            if self.accept("const"):
                (value,) = self.sequence(self.value_declaration, "=")
                constants[value] = self.constant(value)
            else:
                nodes.append(self.node())
        end = self.position
        self.move(place)
        outputs = self.listed(self.value, ")")
        self.move(end)
        self.values = outer
        return Graph(name, inputs, outputs, tuple(nodes), constants)

    def value(self) -> Value:
        self.expect("%")
        return self.known(self.values, "no value `%{}` is known here")

    def value_declaration(self) -> Value:
        """`%name: dtype[shape] layout`, in scope from now on."""
        self.expect("%")
        start, name = self.token.start, self.name()
        if name in self.values:
            self.fail(f"the value `%{name}` is defined twice", start)
        dtype, shape = self.sequence(":", self.dtype, self.shape)
        layout = self.layout(len(shape)) if self.peek("(") else None
        v = self.values[name] = Value(name, dtype, shape, layout)
        return v

    def layout(self, rank: int) -> Layout:
        """`(a+1+1,b/16,c%16)`."""

        def piece() -> Piece:
            letter = self.name()
            axis = ord(letter[0]) - ord("a")
            if len(letter) > 1 or not 0 <= axis < rank:
                self.fail(f"`{letter}` is no axis of {rank} dimensions")
            div = self.integer() if self.accept("/") else 1
            mod = self.integer() if self.accept("%") else None
            if div < 1 or (mod is not None and mod < 1):
                self.fail("the pieces of a layout are positive")
            halo = self.sequence("+", self.integer, "+", self.integer) if self.peek("+") else ()
            return Piece(axis, div, mod, *halo)

        return Layout(rank, self.bracketed(piece, "()"))

    def node(self) -> Node:
        # Its own outputs are not in scope in the arguments: they are entered when the node is complete.
        known = dict(self.values)
        outputs = self.several(self.value_declaration)
        defined, self.values = self.values, known
        self.expect("=")
        operator = self.known(self.operators, "there is no operator `{}`")
        inputs: list[Value | None] = []
        attrs: dict[str, Any] = {}

        def argument() -> None:
            if self.peek("%"):
                inputs.append(self.value())
            elif self.peek("_") and not self.peek("=", 1):
                self.take()
                inputs.append(None)
            else:
                key, value = self.sequence(self.name, "=", self.attribute)
                attrs[key] = value

        self.bracketed(argument, "()")
        label = self.name() if self.accept("@") else ""
        bodies = []
        if self.accept("{"):
            while not self.accept("}"):
                bodies.append(self.graph())
        self.values = defined
        return Node(operator, tuple(inputs), outputs, attrs, label, tuple(bodies))

    def attribute(self) -> Any:
        if self.token.kind == "string":
            return self.string()
        if self.accept("none"):
            return None
        if self.peek("{"):
            return self.sequence("{", self.expression, "}")[0]
        if self.accept("("):
            items: list[Any] = []
            while not self.accept(")"):
                items.append(self.attribute())
                if not self.peek(")"):
                    self.expect(",")
            return tuple(items)
        literal = self.prefixed()
        if literal.op != "const":
            self.fail("expected an attribute: a number, string, `{dim}` or tuple of these")
        return literal.attr

    def constant(self, value: Value) -> np.ndarray:
        if any(isinstance(d, Expr) for d in value.shape):
            self.fail(f"the constant `%{value.name}` has a symbolic shape")
        shape = tuple(int(d) for d in value.shape)
        if self.accept("sha256"):
            key = self.string()
            if key not in self.constants:
                self.fail(f"the constant {key} is not among those given", self.tokens[self.position - 1].start)
            array = self.constants[key]
            if array.shape != shape or array.dtype != to_numpy(value.dtype):
                self.fail(f"the constant {key} is {array.dtype.name}{list(array.shape)}")
            return array
        items = self.bracketed(self.attribute, "[]")
        if any(isinstance(x, str | tuple | Expr) or x is None for x in items) or len(items) != prod(shape):
            self.fail(f"`%{value.name}` needs {prod(shape)} numbers")
        if value.dtype in BITS and "int" in value.dtype:
            lo, hi = integer_range(value.dtype)
            if not all(isinstance(x, int) and lo <= x <= hi for x in items):
                self.fail(f"`%{value.name}` needs integers in {lo}..{hi}")
        return np.array(items, to_numpy(value.dtype)).reshape(shape)
