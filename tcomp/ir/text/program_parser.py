"""Reads printed programs."""

from __future__ import annotations

import re

from tcomp.ir.expr import Dim, Expr, as_expr
from tcomp.ir.program import MEMORIES, NUMBERED, Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step
from tcomp.ir.text.parser import Parser


def parse_program(text: str) -> Program:
    """A printed program."""
    parser = _ProgramParser(text)
    return parser.whole(parser.program)


class _ProgramParser(Parser):
    def program(self) -> Program:
        self.expect("program")
        dims = self.dims()
        self.expect("workspace")
        workspace = self.size()
        self.expect("->", "(")
        shapes = self.listed(lambda: tuple(self.shape()), ")")
        self.expect("{")
        return Program(dims, workspace, tuple(shapes), self.steps())

    def steps(self) -> tuple[Step, ...]:
        """Steps up to and including the closing brace."""
        found: list[Step] = []
        while not self.accept("}"):
            found.append(self.step())
        return tuple(found)

    def step(self) -> Step:
        if self.accept("call"):
            symbol = self.name()
            self.expect("(")
            buffers: list[Ref] = []
            while not self.peek(")") and not self.peek(";"):
                if buffers:
                    self.expect(",")
                buffers.append(self.ref())
            scalars: list[Expr] = []
            if self.accept(";"):
                scalars = self.several(lambda: as_expr(self.size()))
            self.expect(")", "@")
            return Call(symbol, tuple(buffers), tuple(scalars), self.name())
        if self.accept("if"):
            cond = self.ref()
            self.expect("{")
            then = self.steps()
            if not self.accept("else"):
                return Branch(cond, then, ())
            self.expect("{")
            return Branch(cond, then, self.steps())
        if self.accept("for"):
            with self.scope():
                var, trips = self.binding()
                condition = self.ref() if self.accept("while") else None
                self.expect("{")
                return Repeat(var, trips, self.steps(), condition)
        if self.accept("copy"):
            count = self.size()
            self.expect("bytes", "from")
            src = self.ref()
            self.expect("to")
            return Copy(self.ref(), src, count)
        self.expect("set")
        dst = self.ref()
        self.expect("=")
        return SetIndex(dst, as_expr(self.size()))

    def ref(self) -> Ref:
        start, name = self.token.start, self.name()
        found = re.fullmatch(r"([a-z]+)(\d{0,9})", name, re.ASCII)
        if found is None or found[1] not in MEMORIES or (found[1] in NUMBERED) != bool(found[2]):
            self.fail(f"`{name}` is no memory", start, hint="one of input0, input1, ..., output0, ..., weights, workspace, dims")
        self.expect("[")
        offset = self.size()
        self.expect("]")
        return Ref(found[1], int(found[2] or 0), offset)

    def size(self) -> Dim:
        return self.dim(self.expression())
