"""Stores and accumulations, of one lane or of all lanes of a vectorized loop: dense, masked, scattered, combined to one element, or lane by
lane where lanes may share an element."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tcomp.codegen.llvm.addresses import Address
from tcomp.codegen.llvm.builder import Value
from tcomp.codegen.llvm.expressions import Expressions
from tcomp.codegen.llvm.kernel_module import KernelModule
from tcomp.ir import expr as E
from tcomp.ir.dtypes import itemsize
from tcomp.ir.expr import Expr, as_expr
from tcomp.ir.loops import Buffer, Stmt, Store, buffer_size
from tcomp.ir.reducers import Reducer


class Stores(Expressions):
    """Stores and accumulations, at one place of a function."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module)
        self.chain: Stmt | None = None  # an accumulation into one element that is all that its loop does
        self.has_non_temporal = False  # whether some stores are

    @abstractmethod
    def statement(self, s: Stmt) -> None:
        """Emit a statement."""

    def store(self, s: Store) -> None:
        """Store a value, in all lanes."""
        buffer, value, address, stored = s.buffer, s.value, self.address(s.buffer, s.indices), self.value(s.value)
        if self.lane is not None and address.shared and (stored.lanes > 1 or self.mask is not None):
            return self.lane_by_lane(s)
        dense = address.dense and self.mask is None and buffer not in self.private
        if self.first_lanes and address.dense and self.is_split(buffer, value):
            self.write_first(buffer, address, stored)
        elif s.streamed_above is not None and dense and 8 * itemsize(buffer.dtype) * self.lanes % self.target.vector_bits == 0:
            self.store_non_temporal(buffer, address, stored, s.streamed_above)
        else:
            self.write(buffer, address, stored)
        self.forget((buffer,))

    def store_non_temporal(self, buffer: Buffer, address: Address, value: Value, above: int) -> None:
        """A non-temporal store, where the buffer has more bytes than `above`, and the address is aligned to whole vectors, as such stores
        have to be."""
        self.has_non_temporal, value = True, Value(self.spread(value, self.lanes), value.dtype, self.lanes)
        size, start = self.target.vector_bits // 8, self.op(f"ptrtoint ptr {address.pointer} to i64")
        aligned = self.op(f"icmp eq i64 {self.op(f'and i64 {start}, {size - 1}')}, 0")
        if above and (large := self.fold(E.binary("lt", above, as_expr(buffer_size(buffer))))).op != "const":
            aligned = self.op(f"and i1 {self.value(large).ref}, {aligned}")
        yes, no, end = self.labels("aligned", "unaligned", "end")
        self.branch(aligned, yes, no)
        for label, place, how in ((yes, address._replace(align=size), ", !nontemporal !{i32 1}"), (no, address, "")):
            self.start(label)
            self.write(buffer, place, value, how)
            self.jump(end)
        self.start(end)

    def accumulate(self, s: Stmt, buffer: Buffer, indices: tuple[Expr, ...], value: Expr, reducer: Reducer) -> None:
        """Add to an element, by a fused multiply-add where the target has it."""
        address = self.address(buffer, indices)
        if self.lane is not None and address.shared:
            return self.reduce_lanes(s, buffer, address, value, reducer)
        if self.lane is not None and not self.distinct(buffer, indices, address):
            return self.lane_by_lane(s)  # lanes may share an element: in order
        native = value.dtype in ("float32", "float64") or (value.dtype == "float16" and self.module.native_half)
        relaxed = self.target.relaxed_fma and 8 * itemsize(value.dtype) * self.lanes == self.target.vector_bits and value.dtype != "float16"
        if reducer.op == "add" and native and (self.target.fma or relaxed) and value.op == "mul" and s is not self.chain:
            new = self.fma(self.value(value.args[0]), self.value(value.args[1]), self.load(buffer, address))
        else:
            term = self.value(value)
            new = self.combined(reducer, self.load(buffer, address), term)
        self.write(buffer, address, new)
        self.forget((buffer,))

    def reduce_lanes(self, s: Stmt, buffer: Buffer, address: Address, value: Expr, reducer: Reducer) -> None:
        """All lanes accumulate into one element: combined in halves, as a binary tree (schedules ask for it by `reassociate`)."""
        if value.dtype == "bool":
            return self.lane_by_lane(s)
        lane, lanes, mask = self.lane, self.lanes, self.mask
        reduced = Value(self.spread(self.value(value), lanes), value.dtype, lanes)
        if mask is not None:
            reduced = self.choose(mask, reduced, self.value(reducer.identity))
        self.lane, self.mask = None, None
        while reduced.lanes > 1:
            width, type_, ref = reduced.lanes // 2, self.module.type(value.dtype, reduced.lanes), reduced.ref
            if width == 1:
                halves = [self.op(f"extractelement {type_} {ref}, i64 {start}") for start in (0, 1)]
            else:
                halves = [self.shuffle(type_, ref, "poison", range(start, start + width)) for start in (0, width)]
            reduced = self.combined(reducer, *(Value(half, value.dtype, width) for half in halves))
        self.write(buffer, address, self.combined(reducer, self.load(buffer, address), reduced))
        self.lane, self.mask = lane, mask
        self.forget((buffer,))

    def combined(self, reducer: Reducer, old: Value, term: Value) -> Value:
        """The combination of two values by a reducer."""
        with self.scope():
            self.bound[reducer.lhs], self.bound[reducer.rhs] = old, term
            new = self.value(reducer.combine)
            del self.bound[reducer.lhs], self.bound[reducer.rhs]
        return new

    def distinct(self, buffer: Buffer, indices: tuple[Expr, ...], address: Address) -> bool:
        """Whether the lanes certainly access different elements."""
        if address.indices is None:
            return address.stride != 0
        varying = [t for t, _ in self.form(buffer, indices).terms if self.varies(t)]
        factors = [a for a in varying[0] if a is not self.lane] if len(varying) == 1 and self.lane in varying[0] else None
        return factors is not None and all((E.bounds(a)[0] or 0) > 0 and not self.varies((a,)) for a in factors)

    def lane_by_lane(self, s: Stmt, some: Sequence[int] | None = None) -> None:
        """A statement of a vectorized loop for one lane after the other: `some` of them, or all."""
        lane, lanes, mask = self.lane, self.lanes, self.mask
        assert lane is not None
        vector = self.bound.pop(lane)
        self.lane, self.lanes, self.mask = None, 1, None
        for n in range(lanes) if some is None else some:
            self.constants[lane], end = n, ""
            if mask is not None:
                active = mask.ref if mask.lanes == 1 else self.op(f"extractelement {self.module.type('bool', lanes)} {mask.ref}, i64 {n}")
                yes, end = self.labels("lane", "end")
                self.branch(active, yes, end)
                self.start(yes)
            with self.scope():
                self.statement(s)
            if end:
                self.jump(end)
                self.start(end)
        del self.constants[lane]
        self.bound[lane] = vector
        self.lane, self.lanes, self.mask = lane, lanes, mask

    def write(self, buffer: Buffer, address: Address, value: Value, how: str = "") -> None:
        """Store to an address, in the lanes that are active."""
        scalar = self.lane is None or address.shared
        lanes = 1 if scalar else self.lanes
        type_, ref = self.module.memory_type(buffer.dtype, lanes), self.spread(value, lanes)
        if buffer.dtype == "bool":
            ref = self.op(f"zext {self.module.type('bool', lanes)} {ref} to {type_}")
        place = f"ptr {address.pointer}, align {address.align}"
        if scalar or (address.dense and self.mask is None):
            self.line(f"store {type_} {ref}, {place}{how}")
        elif self.padded(buffer, address):
            new = self.either(self.active, type_, ref, self.op(f"load {type_}, {place}"), lanes)
            self.line(f"store {type_} {new}, {place}")
        else:
            name, pointers, align = (
                ("store", "ptr", address.align) if address.dense else ("scatter", f"<{lanes} x ptr>", itemsize(buffer.dtype))
            )
            start = address.pointer if address.dense else self.pointer_vector(buffer, address)
            args = ((type_, ref), (pointers, start), ("i32", str(align)), (self.module.type("bool", lanes), self.active))
            self.call(f"masked.{name}", "void", *args, suffix=(type_, pointers))

    def is_split(self, buffer: Buffer, value: Expr) -> bool:
        """Whether to store the first lanes of a vector by `write_first`: not what loops accumulate in registers, as LLVM would then move
        such vectors from register to register in these loops."""
        sums = any(r.attr.scope == "register" and self.lane in E.variables(*r.args) for r in E.reads(value))
        return not sums and buffer not in self.private and itemsize(buffer.dtype) >= 4

    def write_first(self, buffer: Buffer, address: Address, value: Value) -> None:
        """Store the first lanes of a vector, by unmasked stores whose widths are powers of two. A masked store blocks store forwarding
        for all of its lanes: loads behind it, such as of the next row of an in-place kernel, would wait."""
        type_, element = self.module.memory_type(buffer.dtype, self.lanes), self.module.memory_type(buffer.dtype)
        ref, start, left = self.spread(value, self.lanes), 0, self.first_lanes or 0
        while left:
            n = 1 << left.bit_length() - 1
            part = self.shuffle(type_, ref, ref, range(start, start + n))
            place = self.op(f"getelementptr {element}, ptr {address.pointer}, i64 {start}")
            self.line(f"store <{n} x {element}> {part}, ptr {place}, align {itemsize(buffer.dtype)}")
            start, left = start + n, left - n
