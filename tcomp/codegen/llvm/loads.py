"""Loads: what reads give, for one lane or for all lanes of a vectorized loop, by as few instructions as the places of the lanes allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tcomp.codegen.llvm.addresses import ALIGN, Address, Addresses
from tcomp.codegen.llvm.builder import Value, iota
from tcomp.codegen.llvm.kernel_module import Term
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr, const
from tcomp.ir.loops import Buffer

ROW_LANES = 16  # of 32 bits, in a vector register of AVX-512
MAX_ROW = 64  # elements of a row that is looked up in registers: in four of the 32


class Loads(Addresses):
    """Loads, at one place of a function."""

    def read(self, e: Expr) -> Value:
        """The value of a read, which active lanes alone make where it may lie outside of its buffer."""
        if self.lane is not None and (found := self.picked(e) or self.looked_up(e)) is not None:
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
        """Load the elements at an address, for all lanes."""
        scalar = self.lane is None or address.shared
        lanes = 1 if scalar else self.lanes
        type_ = self.module.memory_type(buffer.dtype, lanes)
        if scalar or (address.dense and (self.mask is None or self.padded(buffer, address))):
            ref = self.op(f"load {type_}, ptr {address.pointer}, align {address.align}")
        elif address.dense:
            ref = self.masked_load("load", type_, lanes, "ptr", address.pointer, address.align, self.active)
        elif buffer in self.private and address.offset is not None and address.stride == lanes and address.indices is None:
            ref = self.column(buffer, address.offset, lanes)
        elif address.indices is None and self.mask is None and address.stride in (-1, 2, 3, 4):
            ref = self.strided(buffer, address, lanes)
        else:
            places = self.pointer_vector(buffer, address)
            ref = self.masked_load("gather", type_, lanes, f"<{lanes} x ptr>", places, itemsize(buffer.dtype), self.active)
        if buffer.dtype == "bool":
            ref = self.op(f"icmp ne {type_} {ref}, zeroinitializer")
        return Value(ref, buffer.dtype, lanes)

    def masked_load(self, intrinsic: str, type_: str, lanes: int, pointers: str, place: str, align: int, active: str) -> str:
        """A masked load; inactive lanes are 0."""
        args = ((pointers, place), ("i32", str(align)), (f"<{lanes} x i1>", active), (type_, "zeroinitializer"))
        return self.call(f"masked.{intrinsic}", type_, *args, suffix=(type_, pointers))

    @property
    def active(self) -> str:
        """The mask of the active lanes."""
        return "splat (i1 true)" if self.mask is None else self.mask.ref

    def column(self, buffer: Buffer, offset: int, lanes: int) -> str:
        """A column of a tile of `lanes` x `lanes` elements on the stack. All columns are made at once, in log2(lanes) steps of `lanes`
        shuffles: step b exchanges bit b of the row with bit b of the lane. LLVM removes columns that are not used."""
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
                ref = self.masked_load("load", type_, lanes, "ptr", pointer, align, active)
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
                    inside = _mask([start + n < extent for n in range(ROW_LANES)])
                    ref = self.masked_load("load", type_, ROW_LANES, "ptr", pointer, size, inside)
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
            return _mask(pickers)
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


def _mask(lanes: Sequence[object]) -> str:
    """A constant mask of the lanes that are true."""
    return f"<{', '.join('i1 true' if lane else 'i1 false' for lane in lanes)}>"
