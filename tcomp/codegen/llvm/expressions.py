"""The values of expressions as LLVM IR, for one lane or for all lanes of a vectorized loop: loads, addresses, arithmetic.

Values are memoised (expressions are hash-consed), in scopes: what is computed inside a branch or loop is unknown outside of it, and what
was read from a buffer is forgotten when the buffer is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any, NamedTuple

from tcomp.codegen.llvm.builder import Builder, Module, Value, iota, literal
from tcomp.codegen.llvm.math import ELEMENTARY, lower
from tcomp.ir import expr as E, loops as L
from tcomp.ir.access import clamped_check, in_range, linear_index
from tcomp.ir.dtypes import integer_range, is_integer, itemsize
from tcomp.ir.expr import INDEX, Expr, const, substitute
from tcomp.ir.loops import Buffer, Stmt
from tcomp.ir.simplify import Linear, difference, from_linear, linear, prove, simplify
from tcomp.target import CpuTarget

MAX_LANES = 64  # of a vectorized loop: bytes of the widest vector register
EXACT = 1 << 16  # integers of at most that size, and sums of a few, are exact in float32
ALIGN = 64  # bytes: of stack slots, as the widest vector register
ROW_LANES = 16  # of 32 bits, in a vector register of AVX-512
MAX_ROW = 64  # elements of a row in registers: four of the 32 registers
Term = tuple[tuple[Expr, ...], int]  # of a linear form: factors, and their coefficient


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


class Form(NamedTuple):
    """The linear form of an index, outermost loops first. `inner`: the variables that occur in anything but `c * variable`."""

    terms: tuple[Term, ...]
    offset: int
    inner: frozenset[Expr]


class KernelModule(Module):
    """A module of loop programs, and what is known about the expressions in them. `overlapping`: buffers that may share memory with
    others."""

    def __init__(self, name: str, target: CpuTarget, notes: Sequence[str] = (), overlapping: frozenset[Buffer] = frozenset()) -> None:
        super().__init__(name, target, notes)
        self.overlapping = overlapping
        self.forms: dict[Any, Form] = {}
        self.per_lane: dict[Buffer, tuple[Expr, int]] = {}  # buffers allocated inside a vectorized loop: lane variable, lanes
        self._variables: dict[Expr, tuple[Expr, ...]] = {}
        self._buffers: dict[Expr, frozenset[Buffer]] = {}
        self.lowered = cache(lambda e: lower(e, target))  # by operations that the target has; None where it has the operator
        self.in_bounds = cache(lambda read: in_range(read.args, read.attr.shape))  # whether a read lies inside its buffer for all values
        self.checks = cache(lambda e: tuple(_certain_checks(e)))  # those that every evaluation makes
        self.holds = cache(_holds)
        self.sums = cache(_sums)

    def parameter(self, buffer: Buffer, ref: str, written: bool) -> str:
        """A pointer parameter with what is known of its memory."""
        return f"ptr{'' if buffer in self.overlapping else ' noalias'} nonnull{'' if written else ' readonly'} {ref}"

    def variables(self, e: Expr) -> tuple[Expr, ...]:
        """The variables that a value depends on."""
        for node in _unknown(e, self._variables):
            own = (node,) if node.op == "var" else self.per_lane.get(node.attr, ())[:1] if node.op == "read" else ()
            of_args = [v for a in node.args for v in self._variables[a]]
            self._variables[node] = (
                self._variables[node.args[0]] if len(node.args) == 1 and not own else tuple(dict.fromkeys([*of_args, *own]))
            )
        return self._variables[e]

    def buffers(self, e: Expr) -> frozenset[Buffer]:
        """The buffers that a value is read from."""
        for node in _unknown(e, self._buffers):
            own = frozenset((node.attr,)) if node.op == "read" else frozenset()
            self._buffers[node] = own.union(*(self._buffers[a] for a in node.args))
        return self._buffers[e]

    def written(self, stmt: Stmt) -> set[Buffer]:
        """The buffers that a statement may write."""
        return {s.buffer for s in L.walk(stmt) if isinstance(s, L.Store | L.Accumulate)}

    def unsafe(self, e: Expr) -> bool:
        """Whether evaluating `e` where it is not wanted might fault, or report an index."""
        reporting = () if self.target.unchecked else ("checked",)
        return bool(self.buffers(e)) and any((n.op == "read" and not self.in_bounds(n)) or n.op in reporting for n in E.walk(e))


class Expressions(Builder):
    """The values of expressions at one place of a function."""

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
        self.nesting = 0

    def bind(self, v: Expr, value: Value) -> None:
        """Give a variable its value; the innermost loop is bound last."""
        self.bound[v], self.depth[v] = value, len(self.depth)

    @contextmanager
    def masked(self, test: Value) -> Iterator[None]:
        """Within, only those of the active lanes are active that meet a condition."""
        before = self.mask
        self.mask = test if before is None else self.arithmetic("and", [before, test], "bool")
        with self.scope():
            yield
        self.mask = before

    def key(self, e: Expr) -> Any:
        """What identifies the value of `e` here: the expression, and the constants that unrolled variables stand for."""
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

    def read(self, e: Expr) -> Value:
        """The value of a read, which active lanes alone make where it may lie outside of its buffer."""
        if self.lane is not None and (found := self.picked(e)) is not None:
            return found
        if self.lane is not None and (found := self.looked_up(e)) is not None:
            return found
        buffer, mask = e.attr, self.mask
        address = self.address(buffer, e.args)
        anywhere = mask is not None and (self.module.in_bounds(e) or self.padded(buffer, address))
        if anywhere or mask is None or (self.lane is not None and not address.shared):
            self.mask = None if anywhere else mask
            value = self.load(buffer, address)
            self.mask = mask
            return value
        test = mask.ref  # one element for all lanes, wanted only if any lane is active
        if mask.lanes > 1:
            bits = self.module.type("bool", mask.lanes)
            test = self.call("vector.reduce.or", "i1", (bits, test), suffix=(bits,))
        (yes, end), before = self.labels("any", "end"), self.block
        self.branch(test, yes, end)
        self.start(yes)
        value = self.load(buffer, address)
        self.jump(end)
        self.start(end)
        ref = self.op(f"phi {self.module.type(buffer.dtype)} [ zeroinitializer, %{before} ], [ {value.ref}, %{yes} ]")
        return Value(ref, buffer.dtype)

    def padded(self, buffer: Buffer, address: Address) -> bool:
        """Whether a whole vector may be accessed though not all lanes are active: at a known place of a stack slot."""
        return buffer in self.private and address.offset is not None and address.dense

    def load(self, buffer: Buffer, address: Address) -> Value:
        """What lies at an address, for all lanes."""
        scalar = self.lane is None or address.shared
        lanes = 1 if scalar else self.lanes
        type_ = self.module.memory_type(buffer.dtype, lanes)
        if scalar or (address.dense and (self.mask is None or self.padded(buffer, address))):
            ref = self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
        elif address.dense:
            ref = self.masked_load("load", type_, lanes, "ptr", address.pointer, address.align)
        elif buffer in self.private and address.offset is not None and address.stride == lanes and address.indices is None:
            ref = self.column(buffer, address.offset, lanes)
        elif address.indices is None and self.mask is None and address.stride in (-1, 2, 3, 4):
            ref = self.strided(buffer, address, lanes)
        else:
            ref = self.masked_load("gather", type_, lanes, f"<{lanes} x ptr>", self.pointer_vector(buffer, address), itemsize(buffer.dtype))
        if buffer.dtype == "bool":
            ref = self.op(f"icmp ne {type_} {ref}, zeroinitializer")
        return Value(ref, buffer.dtype, lanes)

    def masked_load(self, intrinsic: str, type_: str, lanes: int, pointers: str, place: str, align: int) -> str:
        """What active lanes read, 0 in the others."""
        args = ((pointers, place), ("i32", str(align)), (f"<{lanes} x i1>", self.active), (type_, "zeroinitializer"))
        return self.call(f"masked.{intrinsic}", type_, *args, suffix=(type_, pointers))

    @property
    def active(self) -> str:
        """The mask of the active lanes."""
        return "splat (i1 true)" if self.mask is None else self.mask.ref

    def column(self, buffer: Buffer, offset: int, lanes: int) -> str:
        """A column of a tile of `lanes` x `lanes` elements on the stack. All columns are made at once, in log2(lanes) steps of `lanes`
        shuffles: step b exchanges bit b of the row with bit b of the lane. What stays unused is no code in the end."""
        start = offset - offset % lanes
        if (found := self.find((buffer, "column", offset))) is not None:
            return found.ref
        scalar, type_ = self.module.memory_type(buffer.dtype), self.module.memory_type(buffer.dtype, lanes)
        rows, bit = [], 1
        for place in range(start, start + lanes * lanes, lanes):
            pointer = self.op(f"getelementptr {scalar}, ptr {self.pointers[buffer]}, i64 {place}")
            rows.append(self.op(f"load {type_}, ptr {pointer}, align {math.gcd(place * itemsize(buffer.dtype), ALIGN)}"))
        while bit < lanes:
            low = [lane if not lane & bit else lanes + (lane ^ bit) for lane in range(lanes)]
            high = [lane ^ bit if not lane & bit else lanes + lane for lane in range(lanes)]
            rows = [self.shuffle(type_, rows[n & ~bit], rows[n | bit], high if n & bit else low) for n in range(lanes)]
            bit *= 2
        for lane, ref in enumerate(rows):
            self.remember((buffer, "column", start + lane), Value(ref, buffer.dtype, lanes), [buffer])
        return rows[offset % lanes]

    def strided(self, buffer: Buffer, address: Address, lanes: int) -> str:
        """Every `stride`-th element, by contiguous loads that stay within the first and last element, and shuffles."""
        scalar, type_, stride = self.module.memory_type(buffer.dtype), self.module.memory_type(buffer.dtype, lanes), address.stride
        starts = [min(n * lanes, (lanes - 1) * (stride - 1)) for n in range(stride)] if stride > 0 else [1 - lanes]
        parts = []
        for start in starts:
            place = self.op(f"getelementptr {scalar}, ptr {address.pointer}, i64 {start}")
            parts.append(self.op(f"load {type_}, ptr {place}, align {itemsize(buffer.dtype)}"))
        if stride < 0:
            return self.shuffle(type_, parts[0], parts[0], range(lanes - 1, -1, -1))
        result, owner = parts[0], [lane * stride // lanes for lane in range(lanes)]  # the part with the element of each lane
        for n in range(1, stride):
            picks = [
                lanes + lane * stride - starts[n] if owner[lane] == n else lane * stride if n == 1 and owner[lane] == 0 else lane
                for lane in range(lanes)
            ]
            result = self.shuffle(type_, result, parts[n], picks)
        return result

    def picked(self, e: Expr) -> Value | None:
        """The value of a read at places that depend on the lane alone and lie within one vector, such as `x[lane // 4 * 4 + c]`: one
        contiguous load and a shuffle. Nothing outside of the buffer is read: where the whole vector is not certainly inside, those
        elements are loaded that active lanes pick. None for any other read."""
        buffer, lanes, mask = e.attr, self.lanes, self.mask
        if (parts := self.lane_places(buffer, e.args)) is None:
            return None
        shared, places = parts
        first, last = min(places), max(places)
        if last - first >= lanes or buffer.dtype == "bool":
            return None
        if mask is not None and self.module.in_bounds(e):
            mask = None
        start = first // lanes * lanes  # where several reads pick from one vector, they load it once
        if last >= start + lanes:
            start = first
        type_ = self.module.memory_type(buffer.dtype, lanes)
        whole = mask is None and self.module.holds(buffer, shared, start, lanes)
        if not whole:
            start = first
        picks = [place - start for place in places]
        active = None if whole else self.picking(mask, picks)
        key = (buffer, "vector", shared, start, active)
        if (vector := self.find(key)) is None:
            pointer, align = self.pointer(buffer, shared, start), itemsize(buffer.dtype)
            if active is None:
                ref = self.op(f"load {type_}, ptr {pointer}, align {align}")
            else:
                args = (("ptr", pointer), ("i32", str(align)), (f"<{lanes} x i1>", active), (type_, "zeroinitializer"))
                ref = self.call("masked.load", type_, *args, suffix=(type_, "ptr"))
            vector = Value(ref, buffer.dtype, lanes)
            self.remember(key, vector, [buffer, *(b for monomial, _ in shared for a in monomial for b in self.module.buffers(a))])
        return Value(self.shuffle(type_, vector.ref, vector.ref, picks), buffer.dtype, lanes)

    def looked_up(self, e: Expr) -> Value | None:
        """The value of a read from a short row at places that depend on data: the row stays in registers, and permutations of them take a
        small part of the time of a gather. None for any other read, and without AVX-512."""
        buffer, lanes = e.attr, self.lanes
        if lanes % ROW_LANES or not self.module.target.has("avx512f") or buffer.dtype not in ("float32", "int32") or not e.args:
            return None
        *around, place = e.args
        extent, variables = buffer.shape[-1], self.module.variables
        if not isinstance(extent, int) or extent > MAX_ROW or not self.module.buffers(place) or self.lane not in variables(place):
            return None
        if any(self.lane in variables(a) for a in around) or (self.mask is not None and not self.module.in_bounds(e)):
            return None
        type_, indices = self.module.memory_type(buffer.dtype, ROW_LANES), f"<{ROW_LANES} x i32>"
        row = self.row(buffer, tuple(around), extent)
        index = self.spread(self.cast(self.value(place), "int32"), lanes)
        one, two = ("permvar.sf", "vpermi2var.ps") if buffer.dtype == "float32" else ("permvar.si", "vpermi2var.d")
        parts = []
        for start in range(0, lanes, ROW_LANES):
            at = index if lanes == ROW_LANES else self.shuffle(f"<{lanes} x i32>", index, index, range(start, start + ROW_LANES))
            found = []
            for first, *second in (row[n : n + 2] for n in range(0, len(row), 2)):
                name, more = (f"x86.avx512.{two}", [(type_, second[0])]) if second else (f"x86.avx512.{one}", [])
                found.append(self.call(name, type_, (type_, first), (indices, at), *more, suffix=("512",)))
            if len(found) > 1:
                low = self.op(f"icmp ult {indices} {at}, splat (i32 {2 * ROW_LANES})")
                found = [self.either(low, type_, found[0], found[1], ROW_LANES)]
            parts += found
        while len(parts) > 1:
            width = lanes // len(parts)
            type_ = self.module.memory_type(buffer.dtype, width)
            parts = [self.shuffle(type_, *pair, range(2 * width)) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return Value(parts[0], buffer.dtype, lanes)

    def row(self, buffer: Buffer, around: tuple[Expr, ...], extent: int) -> list[str]:
        """A short row of a buffer, as vectors."""
        type_, size = self.module.memory_type(buffer.dtype, ROW_LANES), itemsize(buffer.dtype)
        vectors = []
        for start in range(0, extent, ROW_LANES):
            key = (buffer, "row", tuple(map(self.key, around)), start)
            if (vector := self.find(key)) is None:
                pointer = self.address(buffer, (*around, const(start))).pointer
                if start + ROW_LANES <= extent:
                    ref = self.op(f"load {type_}, ptr {pointer}, align {size}")
                else:
                    active = f"<{', '.join(f'i1 {str(start + n < extent).lower()}' for n in range(ROW_LANES))}>"
                    args = (("ptr", pointer), ("i32", str(size)), (f"<{ROW_LANES} x i1>", active), (type_, "zeroinitializer"))
                    ref = self.call("masked.load", type_, *args, suffix=(type_, "ptr"))
                vector = Value(ref, buffer.dtype, ROW_LANES)
                self.remember(key, vector, [buffer, *(b for a in around for b in self.module.buffers(a))])
            vectors.append(vector.ref)
        return vectors

    def lane_places(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[tuple[Term, ...], list[int]] | None:
        """For an access whose place is a sum of terms that all lanes share and of others, not multiples of the lane, that depend on the
        lane alone: (the shared terms, how far each lane's place lies behind these). None for any other access."""
        form, lane = self.form(buffer, indices), self.lane
        if lane is None or lane not in form.inner:
            return None
        own, shared, offset = list[Term](), list[Term](), form.offset
        for monomial, c in form.terms:
            plain = monomial[0] if len(monomial) == 1 and monomial[0].op == "var" else None
            if plain is not None and plain in self.constants:
                offset += c * self.constants[plain]
            else:
                (own if self.varies(monomial) else shared).append((monomial, c))
        if any(self.module.variables(a) != (lane,) or self.module.buffers(a) for monomial, _ in own for a in monomial):
            return None
        return tuple(shared), [offset + n for n in self.module.sums(tuple(own), lane, self.lanes)]

    def picking(self, mask: Value | None, picks: Sequence[int]) -> str:
        """The mask of the elements of a vector that active lanes pick."""
        pickers = [[n for n, pick in enumerate(picks) if pick == place] for place in range(self.lanes)]
        if mask is None:
            return f"<{', '.join(f'i1 {str(bool(found)).lower()}' for found in pickers)}>"
        type_, ref = self.module.type("bool", self.lanes), "zeroinitializer"
        spread = self.spread(mask, self.lanes)
        for turn in range(max(map(len, pickers))):
            some = [found[turn] if turn < len(found) else self.lanes for found in pickers]
            ref = self.op(f"or {type_} {ref}, {self.shuffle(type_, spread, 'zeroinitializer', some)}")
        return ref

    def pointer_vector(self, buffer: Buffer, address: Address) -> str:
        """The addresses of all lanes."""
        index = address.indices or iota(self.lanes, "i64", address.stride)
        return self.op(f"getelementptr {self.module.memory_type(buffer.dtype)}, ptr {address.pointer}, <{self.lanes} x i64> {index}")

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
        ref, scalar = self.pointers[buffer], self.module.memory_type(buffer.dtype)
        for n, (monomial, c) in enumerate(terms, start=1):
            key = (buffer, terms[:n])
            if (found := self.find(key)) is None:
                found = Value(self.op(f"getelementptr {scalar}, ptr {ref}, i64 {self.scaled(monomial, c).ref}"), "ptr")
                self.remember(key, found, [b for a in monomial for b in self.module.buffers(a)])
            ref = found.ref
        if offset:
            forward = ""
            if offset > 0 and self.target.arch == "wasm32" and buffer not in self.private:
                # Only with this flag do instructions of WebAssembly, whose addresses do not wrap around, take in the constant; and LLVM
                # would lose it in loops, did it know where the address comes from.
                ref, forward = self.opaque(buffer, terms, ref), "nuw "
            ref = self.op(f"getelementptr {forward}{scalar}, ptr {ref}, i64 {offset}")
        self.remember(whole, Value(ref, "ptr"), [b for monomial, _ in terms for a in monomial for b in self.module.buffers(a)])
        return ref

    def opaque(self, buffer: Buffer, terms: tuple[Term, ...], ref: str) -> str:
        """An address of which LLVM knows nothing, by an instruction that is none."""
        key = (buffer, terms, "opaque")
        if (found := self.find(key)) is None:
            found = Value(self.op(f'call ptr asm "", "=r,0"(ptr {ref})'), "ptr")
            self.remember(key, found, [b for monomial, _ in terms for a in monomial for b in self.module.buffers(a)])
        return found.ref

    def remember(self, key: Any, value: Value, sources: Iterable[Buffer]) -> None:
        """Memoise a value until a buffer that it was read from is written."""
        self.scopes[-1][key] = value
        for buffer in sources:
            self.readers.setdefault(buffer, []).append(key)

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

    def fold(self, e: Expr) -> Expr:
        """`e` with the known constants put in, simplified where there are any."""
        if e.op == "const" or not self.constants:
            return e
        known = {v: const(self.constants[v]) for v in self.module.variables(e) if v in self.constants}
        return simplify(substitute(e, known)) if known else e

    def scalar(self, e: Expr, what: str) -> str:
        """A value that all lanes share. Raises `CodegenError` where they differ."""
        value = self.value(e)
        if value.lanes != 1:
            assert self.lane is not None
            raise self.error(f"{what} differs between the lanes of `{self.lane.name}`", where=str(e))
        return value.ref

    def value(self, e: Expr) -> Value:
        """The value of an expression here, computed if it is not known."""
        key = self.key(e)
        if (found := self.find(key)) is not None:
            return found
        depth, self.nesting = self.nesting, self.nesting + 1
        if depth > 60:  # a long chain: operands first, or it would exhaust Python's stack
            self.nesting = 0
            for node in E.needed_operands(e):
                self.value(node)
        result = self.compute(e)
        self.nesting = depth
        self.remember(key, result, self.module.buffers(e))
        return result

    def quantized(self, e: Expr) -> Value | None:
        """uint8(round(x) + z), in two instructions less; and what makes floats of that again, float32(int32(uint8(round(x) + z)) + c),
        which needs no integers. Both as exact as step by step: numbers within the range of the bytes are exact in float32."""
        if e.op != "cast":
            return None
        if (found := _rounded_bytes(e)) is not None:
            value = self.value(found[0])
            return self.rounded(value, found[1], e.dtype) if value.lanes > 1 else None
        whole, shift = _plus_constant(e.args[0]) if e.dtype == "float32" and e.args[0].dtype == "int32" else (e, 0)
        found = _rounded_bytes(whole.args[0]) if whole.op == "cast" and whole is not e else None
        if found is None or abs(shift) > EXACT or (value := self.value(found[0])).lanes == 1:
            return None
        offset, (low, high) = found[1], integer_range(whole.args[0].dtype)
        nearest = self.unary("round", self.clamped(value, low - offset, high - offset, -offset))
        moved = self.value(const(float(shift + offset), "float32"))
        return nearest if shift + offset == 0 else self.arithmetic("add", [nearest, moved], "float32")

    def compute(self, e: Expr) -> Value:
        """The instructions of an operator, operands first."""
        match e.op:
            case "const":
                return Value(literal(e.attr, e.dtype, self.module.native_half), e.dtype)
            case "var" if e in self.constants:  # its loop is unrolled
                return Value(str(self.constants[e]), e.dtype)
            case "var":
                if e not in self.bound:
                    raise self.error(f"`{e.name}` is used but is no parameter and no loop around")
                return self.bound[e]
            case "read":
                return self.read(e)
            case "select":
                return self.select(e)
            case "lt" | "le" if e.args[0].dtype == INDEX and self.varies((e,)):
                return self.compare_lanes(e)
        if (check := clamped_check(e)) is not None and not self.module.target.unchecked:  # as it gives 0 where it reports, no more is done
            return self.checked(*map(self.value, check.args))
        if (other := self.module.lowered(e)) is not None:
            return self.value(other)
        if (quantized := self.quantized(e)) is not None:
            return quantized
        if e.op in ELEMENTARY or e.op == "reduce":
            raise self.error(f"`{e.op}` of {e.dtype} cannot be compiled", where=str(e))
        args = [self.value(a) for a in e.args]
        match e.op:
            case "cast":
                return self.cast(args[0], e.dtype)
            case "bitcast":
                return self.bitcast(args[0], e.dtype)
            case "fma":
                return self.fma(*args)
            case "ldexp":
                return self.ldexp(*args)
            case "checked":
                return args[0] if self.module.target.unchecked else self.checked(*args)
            case "lt" | "le" | "eq" | "ne":
                return self.compare(e.op, *args)
            case "floordiv" | "mod" | "truncdiv" | "truncmod" if is_integer(e.dtype):
                return self.divide(e, *args)
            case "shl" | "shr":
                return self.shift(e, *args)
            case _ if len(args) == 1:
                return self.unary(e.op, args[0])
        return self.arithmetic(e.op, args, e.dtype)

    def compare_lanes(self, e: Expr) -> Value:
        """`rest + slope * lane > 0` (or >= 0): vectors of 32 bits instead of 64 where the values fit."""
        folded = self.fold(e)
        if folded.op not in ("lt", "le"):
            return self.value(folded) if folded is not e else self.compare(e.op, *(self.value(a) for a in e.args))
        a, b = folded.args
        terms, strict = linear(difference(b, a)), folded.op == "lt"
        rest = {m: c for m, c in terms.items() if not self.varies(m)}
        lane_only = {m: c for m, c in terms.items() if self.varies(m)}
        assert self.lane is not None
        slope = lane_only.get((self.lane,), 0)
        if len(lane_only) == 1 and abs(slope) == 1:
            # slope -1: lane < rest (+ 1 for le); slope 1: lane >= 1 - rest (- rest for le), the negation of lane < that.
            limit = from_linear(rest) + (0 if strict else 1) if slope < 0 else const(1 if strict else 0) - from_linear(rest)
            limit = E.minimum(E.maximum(limit, 0), self.lanes)
            lanes, test = iota(self.lanes, "i32"), "ult" if slope < 0 else "uge"
        elif (
            slope
            and len(lane_only) == 1
            and all(n is not None and abs(n) < 1 << 30 for n in (slope * self.lanes, *E.bounds(from_linear(rest))))
        ):
            # slope * lane > -rest: sums of two such numbers fit 32 bits
            limit, lanes, test = const(0) - from_linear(rest), iota(self.lanes, "i32", slope), "sgt" if strict else "sge"
        else:
            return self.compare(folded.op, self.value(a), self.value(b))
        count = self.value(simplify(limit))
        narrow = self.op(f"trunc i64 {count.ref} to i32") if count.ref[0] == "%" else count.ref
        vector = self.spread(Value(narrow, "int32"), self.lanes)
        return Value(self.op(f"icmp {test} <{self.lanes} x i32> {lanes}, {vector}"), "bool", self.lanes)

    def checked(self, index: Value, extent: Value, given: Value) -> Value:
        """The index, 0 where it is out of range; the first active lane in which it is so is reported, and the code goes on."""
        lanes, type_, (i, n, told) = self.alike(index, extent, given)
        inside = Value(self.op(f"icmp ult {type_} {i}, {n}"), "bool", lanes)  # as unsigned integers, negative ones are the largest
        zeroed = f"select {self.module.type('bool', lanes)} {inside.ref}, {type_} {i}, {type_} zeroinitializer"
        if self.mask is not None:  # other lanes may be out of range without a report
            i, inside = self.op(zeroed), self.arithmetic("or", [inside, self.negated(self.mask)], "bool")
        (bad, end), before, count = self.labels("outside", "end"), self.block, inside.lanes
        bits = self.op(f"bitcast <{count} x i1> {inside.ref} to i{count}") if count > 1 else inside.ref
        self.branch(self.op(f"icmp eq i{count} {bits}, -1"), end, bad, expected=True)
        self.start(bad)
        # Only here, so that what is accessed does not wait for the comparison. (That a masked move follows has LLVM keep the comparison
        # out of the register k0 of AVX-512, which every mask of ones for a gather is made of.)
        safe = i if self.mask is not None else self.op(zeroed)
        if lanes > 1:
            others = self.op(f"xor i{lanes} {bits}, -1")
            lane = self.call("cttz", f"i{lanes}", (f"i{lanes}", others), ("i1", "true"), suffix=(f"i{lanes}",))
            told, n = (self.op(f"extractelement {type_} {x}, i{lanes} {lane}") for x in (told, n))
        self.line(f"call void @tcomp_outside(ptr %call, i64 {told}, i64 {n})")
        self.module.reports += 1
        self.jump(end)
        self.start(end)
        return Value(self.op(f"phi {type_} [ {i}, %{before} ], [ {safe}, %{bad} ]"), INDEX, lanes)

    def select(self, e: Expr) -> Value:
        """A choice: both sides are computed unless that might fault."""
        cond = self.fold(e.args[0])
        if cond.op == "const":
            return self.value(e.args[1] if cond.attr else e.args[2])
        test = self.value(cond)
        if not (self.module.unsafe(e.args[1]) or self.module.unsafe(e.args[2])):
            return self.choose(test, self.value(e.args[1]), self.value(e.args[2]))
        if test.lanes == 1:
            return self.select_by_branch(test, e.args[1], e.args[2])
        with self.masked(test):
            a = self.value(e.args[1])
        with self.masked(self.negated(test)):
            b = self.value(e.args[2])
        return self.choose(test, a, b)

    def select_by_branch(self, test: Value, a: Expr, b: Expr) -> Value:
        """A choice whose sides are computed only if they are wanted."""
        yes, no, end = self.labels("then", "else", "end")
        self.branch(test.ref, yes, no)
        outer, sides, arms = self.lines, [], []
        for label, side in ((yes, a), (no, b)):
            self.lines = []
            self.start(label)
            with self.scope():
                sides.append((self.value(side), self.lines, self.block))
        lanes = max(value.lanes for value, _, _ in sides)
        for value, lines, block in sides:
            self.lines = lines
            with self.scope():
                arms.append(f"[ {self.spread(value, lanes)}, %{block} ]")
            self.jump(end)
            outer.extend(lines)
        self.lines = outer
        self.start(end)
        return Value(self.op(f"phi {self.module.type(a.dtype, lanes)} {', '.join(arms)}"), a.dtype, lanes)


def _holds(buffer: Buffer, terms: tuple[Term, ...], start: int, count: int) -> bool:
    """Whether the elements `terms + start` and so many behind it, in row-major order, certainly lie in a buffer."""
    index = from_linear(dict(terms)) + start
    return prove(index >= 0) and prove(index + (count - 1) < math.prod(map(E.as_expr, buffer.shape), start=const(1)))


def _sums(terms: tuple[Term, ...], lane: Expr, lanes: int) -> list[int]:
    """The sum of terms that depend on the lane alone, for each of the lanes."""
    total = from_linear(dict(terms))
    return [E.evaluate_int(total, {lane: n}) for n in range(lanes)]


def _unknown(e: Expr, facts: Mapping[Expr, Any]) -> Iterable[Expr]:
    """The sub-expressions that `facts` lacks, operands before users."""
    if e in facts:
        return ()
    return (e,) if all(a in facts for a in e.args) else [node for node in E.walk(e) if node not in facts]


def _certain_checks(e: Expr) -> Iterator[Expr]:
    stack, seen = [e], set[Expr]()  # what is shared is looked at once
    while stack:
        if (node := stack.pop()) in seen:
            continue
        seen.add(node)
        if node.op == "checked" or clamped_check(node) is not None:
            yield node  # with what its operands check
        else:
            stack.extend(node.args[:1] if node.op == "select" else node.args)


def _rounded_bytes(e: Expr) -> tuple[Expr, int] | None:
    """(x, z) for integers of 8 or 16 bits that are made of round(x) + z."""
    if e.op != "cast" or e.dtype not in ("uint8", "int8", "uint16", "int16") or e.args[0].dtype != "float32":
        return None
    x, offset = _plus_constant(e.args[0])
    return (x.args[0], int(offset)) if x.op == "round" and abs(offset) <= EXACT and offset == int(offset) else None


def _plus_constant(e: Expr) -> tuple[Expr, int | float]:
    """(x, c) for x + c, x - c; (e, 0) for anything else."""
    if e.op in ("add", "sub") and e.args[1].op == "const":
        return e.args[0], e.args[1].attr if e.op == "add" else -e.args[1].attr
    return (e.args[1], e.args[0].attr) if e.op == "add" and e.args[0].op == "const" else (e, 0)
