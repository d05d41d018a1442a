"""The addresses of accesses, for one lane or for all lanes of a vectorized loop, and what is known at one place of a function: variables,
active lanes, memoised values.

Values are memoised (expressions are hash-consed), in scopes: what is computed inside a branch or loop is unknown outside of it, and what
was read from a buffer is forgotten when the buffer is written.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

from tcomp.codegen.llvm.builder import Builder, Value, iota
from tcomp.codegen.llvm.kernel_module import Form, KernelModule, Term
from tcomp.ir.access import linear_index
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import INDEX, Expr, const, substitute
from tcomp.ir.linear import Linear, linear
from tcomp.ir.loops import Buffer
from tcomp.ir.simplify import simplify

ALIGN = 64  # bytes: of stack slots, as the widest vector register


class Address(NamedTuple):
    """Where the elements of one access lie: at `pointer`, `pointer + stride`, ... per lane, or at `pointer[indices]` for a vector of
    indices."""

    pointer: str
    stride: int
    indices: str | None
    align: int
    offset: int | None  # from the start of the buffer, where it is known

    @property
    def dense(self) -> bool:
        """Whether the lanes lie side by side."""
        return self.stride == 1 and self.indices is None

    @property
    def shared(self) -> bool:
        """Whether all lanes access one element."""
        return self.stride == 0 and self.indices is None


class Addresses(Builder, ABC):
    """Where accesses lie, at one place of a function."""

    module: KernelModule

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module)
        self.readers: dict[Buffer, list[Any]] = {}  # keys of memoised values that depend on the content of a buffer
        self.constants: dict[Expr, int] = {}
        self.bound: dict[Expr, Value] = {}
        self.depth: dict[Expr, int] = {}
        self.pointers: dict[Buffer, str] = {}
        self.private: set[Buffer] = set()  # stack slots, padded by a whole vector
        self.lane: Expr | None = None
        self.lanes = 1
        self.mask: Value | None = None  # active lanes; None: all
        self.first_lanes: int | None = None  # how many lanes are active, if these are known to be the first ones
        self.nesting = 0

    def bind(self, v: Expr, value: Value) -> None:
        """Give a variable its value; the innermost loop is bound last."""
        self.bound[v], self.depth[v] = value, len(self.depth)

    @contextmanager
    def masked(self, test: Value, first: int | None = None) -> Iterator[None]:
        """Inside, a lane is active only if it was before and the condition holds; `first` is their number, if these are known to be the
        first lanes."""
        before = self.mask, self.first_lanes
        self.mask = test if self.mask is None else self.arithmetic("and", [self.mask, test], "bool")
        self.first_lanes = first if before[0] is None else None
        with self.scope():
            yield
        self.mask, self.first_lanes = before

    @abstractmethod
    def value(self, e: Expr) -> Value:
        """The value of an expression here, computed if it is not known."""

    def key(self, e: Expr) -> Any:
        """The key of the value of `e` at this place: the expression, and the constants of unrolled variables in it."""
        if not self.constants:
            return e
        known = tuple([self.constants[v] for v in self.module.variables(e) if v in self.constants])
        return (e, known) if known else e

    def forget(self, buffers: Iterable[Buffer]) -> None:
        """Values read from these buffers are out of date."""
        for buffer in buffers:
            for key in self.readers.pop(buffer, ()):
                for scope in self.scopes:
                    scope.pop(key, None)

    def remember(self, key: Any, value: Value, sources: Iterable[Buffer]) -> None:
        """Memoise a value until a buffer that it was read from is written."""
        self.scopes[-1][key] = value
        for buffer in sources:
            self.readers.setdefault(buffer, []).append(key)

    def address(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Address:
        """Where the elements of an access lie."""
        form, shared, varying = self.form(buffer, indices), list[Term](), list[Term]()
        offset, stride = form.offset, 0
        for monomial, c in form.terms:
            plain = monomial[0] if len(monomial) == 1 and monomial[0].op == "var" else None
            if plain is not None and plain in self.constants:
                offset += c * self.constants[plain]
            elif plain is not None and plain is self.lane:
                stride += c
            else:
                (varying if plain is None and self.varies(monomial) else shared).append((monomial, c))
        index, align = self.index_vector(varying, stride) if varying else None, itemsize(buffer.dtype)
        if buffer in self.private:
            align = math.gcd(align * math.gcd(offset, *(c for _, c in shared)), ALIGN)
        return Address(self.pointer(buffer, tuple(shared), offset), 0 if varying else stride, index, align, None if shared else offset)

    def varies(self, monomial: tuple[Expr, ...]) -> bool:
        """Whether a product of atoms differs between the lanes."""
        return self.lane is not None and any(self.lane in self.module.variables(a) for a in monomial)

    def form(self, buffer: Buffer, indices: tuple[Expr, ...]) -> Form:
        """The linear form of the row-major index, in which only plain variables are known constants."""
        forms = self.module.forms
        if (form := forms.get((buffer, indices))) is None:
            form = forms[buffer, indices] = self.sorted_form(linear(linear_index(buffer, indices)), buffer)
        known = {v: n for v, n in self.constants.items() if v in form.inner} if form.inner else {}
        key = (buffer, indices, tuple(known.items()))
        if known and key not in forms:
            index = const(form.offset)
            for monomial, c in form.terms:
                index = index + math.prod(monomial[1:], start=monomial[0]) * c
            forms[key] = self.sorted_form(linear(simplify(substitute(index, {v: const(n) for v, n in known.items()}))), None)
        return forms[key] if known else form

    def sorted_form(self, terms: Linear, buffer: Buffer | None) -> Form:
        """A linear form with its terms in the order of the loops."""
        if buffer is not None and buffer in self.module.per_lane:
            lane, lanes = self.module.per_lane[buffer]
            terms = {m: c * lanes for m, c in terms.items()}
            terms[(lane,)] = terms.get((lane,), 0) + 1
        depth = {m: max((self.depth.get(v, 0) for a in m for v in self.module.variables(a)), default=0) for m in terms}
        ordered = tuple(sorted(((m, c) for m, c in terms.items() if m), key=lambda item: depth[item[0]]))
        inner = [v for m, _ in ordered if len(m) > 1 or m[0].op != "var" for a in m for v in self.module.variables(a)]
        return Form(ordered, terms.get((), 0), frozenset(inner))

    def pointer(self, buffer: Buffer, terms: tuple[Term, ...], offset: int) -> str:
        """`buffer + terms + offset`, added up from the outermost loop inwards so that LLVM can hoist each part."""
        whole = (buffer, terms, offset)
        if (found := self.find(whole)) is not None:
            return found.ref
        if buffer not in self.pointers:
            raise self.error(f"buffer `{buffer.name}` is used but is neither parameter nor allocated")
        ref, scalar, sources = self.pointers[buffer], self.module.memory_type(buffer.dtype), list[Buffer]()
        for n, (monomial, c) in enumerate(terms, start=1):
            key = (buffer, terms[:n])
            sources += [b for a in monomial for b in self.module.buffers(a)]
            if (found := self.find(key)) is None:
                found = Value(self.op(f"getelementptr {scalar}, ptr {ref}, i64 {self.scaled(monomial, c).ref}"), "ptr")
                self.remember(key, found, sources)
            ref = found.ref
        if offset:
            forward = ""
            if offset > 0 and self.target.arch == "wasm32" and buffer not in self.private:
                # Only with this flag do instructions of WebAssembly, whose addresses do not wrap around, take in the constant; and LLVM
                # would lose it in loops, did it know where the address comes from.
                ref, forward = self.opaque(buffer, terms, ref), "nuw "
            ref = self.op(f"getelementptr {forward}{scalar}, ptr {ref}, i64 {offset}")
        self.remember(whole, Value(ref, "ptr"), sources)
        return ref

    def opaque(self, buffer: Buffer, terms: tuple[Term, ...], ref: str) -> str:
        """A pointer whose origin is hidden from LLVM, by an empty inline assembly."""
        key = (buffer, terms, "opaque")
        if (found := self.find(key)) is None:
            found = Value(self.op(f'call ptr asm "", "=r,0"(ptr {ref})'), "ptr")
            self.remember(key, found, [b for monomial, _ in terms for a in monomial for b in self.module.buffers(a)])
        return found.ref

    def scaled(self, monomial: tuple[Expr, ...], c: int) -> Value:
        """c times the product of the atoms."""
        factors = [self.value(atom) for atom in monomial] + ([] if c == 1 else [Value(str(c), INDEX)])
        return reduce(lambda a, b: self.arithmetic("mul", [a, b], INDEX), factors)

    def index_vector(self, terms: Sequence[Term], stride: int) -> str:
        """The sum of terms that differ between lanes, as a vector of 64-bit integers."""
        result = Value(iota(self.lanes, "i64", stride), INDEX, self.lanes) if stride else self.scaled(*terms[0])
        for monomial, c in terms if stride else terms[1:]:
            result = self.arithmetic("add", [result, self.scaled(monomial, c)], INDEX)
        return self.spread(result, self.lanes)
