"""The values of expressions as LLVM IR, for one lane or for all lanes of a vectorized loop."""

from __future__ import annotations

from tcomp.codegen.llvm.builder import Value, iota, literal
from tcomp.codegen.llvm.loads import Loads
from tcomp.codegen.llvm.math import ELEMENTARY
from tcomp.ir import expr as E
from tcomp.ir.access import clamped_check
from tcomp.ir.dtypes import integer_range, is_integer
from tcomp.ir.expr import INDEX, Expr, const, substitute
from tcomp.ir.linear import linear
from tcomp.ir.simplify import difference, from_linear, simplify

EXACT = 1 << 16  # integers of at most that size, and sums of a few, are exact in float32


class Expressions(Loads):
    """The values of expressions, at one place of a function."""

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
                    raise self.error(f"`{e.name}` is used, and is neither a parameter nor the variable of a loop around")
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
        """The index, 0 where it is out of range; the first active lane that is out of range is reported, and execution continues."""
        lanes, type_, (i, n, reported) = self.alike(index, extent, given)
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
            reported, n = (self.op(f"extractelement {type_} {x}, i{lanes} {lane}") for x in (reported, n))
        self.line(f"call void @tcomp_outside(ptr %call, i64 {reported}, i64 {n})")
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
