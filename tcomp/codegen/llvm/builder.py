"""LLVM IR text, instruction by instruction: values of tcomp's element types, scalars or vectors, and the operators on them.

Undefined behaviour of machine instructions is kept out: a division by zero gives 0, shifts by more than the width give 0 (or the
sign), float to integer saturates. `min` and `max` propagate NaN. No call is emitted that would not become instructions.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tcomp.errors import CodegenError
from tcomp.ir import expr as E
from tcomp.ir.dtypes import BITS, SIGNED, integer_range, is_float, itemsize, to_numpy
from tcomp.ir.expr import Expr
from tcomp.target import CpuTarget


class Value(NamedTuple):
    """An SSA value or literal: its LLVM spelling, element type, and number of lanes (1: a scalar)."""

    ref: str
    dtype: str
    lanes: int = 1


def symbol(name: str) -> str:
    """The name of a function in LLVM IR. Raises `CodegenError` for a name that an object file cannot hold."""
    if not re.fullmatch(r"[\w.$-]+", name):
        raise CodegenError(f"`{name}` is not a name for a kernel", hint="letters, digits, `_`, `.`, `-`")
    return f'@"{name}"'


@functools.cache
def literal(value: Any, dtype: str, native_half: bool) -> str:
    """A constant in LLVM IR, rounded to its type."""
    if dtype == "bool":
        return "true" if value else "false"
    if not is_float(dtype):
        return str(value)
    with np.errstate(over="ignore"):
        # All NaNs are one constant of the IR, so that they have one text, whichever came first.
        rounded = np.asarray(math.nan if math.isnan(value) else value, np.float64).astype(to_numpy(dtype))
    if itemsize(dtype) == 2:
        bits = int(rounded.view(np.uint16))
        return f"0xH{bits:04X}" if dtype == "float16" and native_half else str(bits)
    return f"0x{int(rounded.astype(np.float64).view(np.uint64)):016X}"  # floats, too, are spelled by the bits of a double


@functools.cache
def iota(lanes: int, type_: str, scale: int = 1) -> str:
    """The vector literal 0, scale, 2 * scale, ..."""
    return "<" + ", ".join(f"{type_} {n * scale}" for n in range(lanes)) + ">"


@functools.cache
def _mangled(type_: str) -> str:
    """The suffix of an overloaded intrinsic: v16f32 for <16 x float>."""
    if vector := re.fullmatch(r"<(\d+) x (.+)>", type_):
        return f"v{vector[1]}{_mangled(vector[2])}"
    return {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}.get(type_, type_)


# Fields of `tcomp_call` (runtime/include/tcomp.h), eight bytes each.
CALL_FIELDS = ("inputs", "outputs", "weights", "workspace", "dims", "pool", "status", "index", "extent")

_SCALARS = {"float32": "float", "float64": "double", "bool": "i1"}
_FLOAT_OPS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_INT_OPS = {op: op for op in ("add", "sub", "mul", "and", "or", "xor")}
_INTRINSICS = {op: op for op in ("sqrt", "floor", "ceil", "trunc")} | {"round": "roundeven", "abs": "fabs", "popcount": "ctpop"}

# The first thread that finds an index out of range says so in the call.
_STATUS, _INDEX, _EXTENT = (8 * CALL_FIELDS.index(name) for name in ("status", "index", "extent"))
_REPORT = f"""define internal void @tcomp_outside(ptr %call, i64 %index, i64 %extent) cold noinline #0 {{
  %status = getelementptr i8, ptr %call, i64 {_STATUS}
  %pair = cmpxchg ptr %status, i64 0, i64 1 monotonic monotonic
  %first = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %first, label %tell, label %end
tell:
  %index.at = getelementptr i8, ptr %call, i64 {_INDEX}
  store i64 %index, ptr %index.at
  %extent.at = getelementptr i8, ptr %call, i64 {_EXTENT}
  store i64 %extent, ptr %extent.at
  br label %end
end:
  ret void
}}"""


UNROLLED = 8  # iterations of a loop that LLVM unrolls: c[i] += a[b[n - i]] takes 7.3 instructions with a check by 4, 6.6 by 8, 7 without


class Module:
    """The state that all functions of one LLVM module share."""

    def __init__(self, name: str, target: CpuTarget, notes: Sequence[str] = ()) -> None:
        self.name, self.target, self.notes = name, target, notes
        self.functions: list[str] = []
        self.declarations: dict[str, str] = {}
        self.regions = 0
        self.reports = 0  # places that report an index
        self.unrolled = 0  # loops that LLVM unrolls
        self.native_half = target.half_arithmetic

    def text(self) -> str:
        """The module as text: functions, declarations, attributes."""
        cpu, features, bits = self.target.cpu, self.target.llvm_features, self.target.vector_bits
        attributes = f'nounwind "no-builtins" "target-cpu"="{cpu}" "target-features"="{features}"'  # no loop becomes a call of memcpy
        if self.target.arch == "x86_64":
            attributes += f' "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'
        unrolled = [f"!{n} = distinct !{{!{n}, !{self.unrolled}}}" for n in range(self.unrolled)]
        unrolled += [f'!{self.unrolled} = !{{!"llvm.loop.unroll.count", i32 {UNROLLED}}}'] if unrolled else []
        notes = "".join(f"; {line}\n" for note in self.notes for line in note.splitlines())
        parts = [
            f'{notes}target triple = "{self.target.triple}"',
            *self.declarations.values(),
            *self.functions,
            *[_REPORT] * bool(self.reports),
            *unrolled,
        ]
        return "\n".join(parts) + f"\nattributes #0 = {{ {attributes} }}\n"

    def type(self, dtype: str, lanes: int = 1) -> str:
        """The LLVM type of a value in registers. 16-bit floats without arithmetic of their own are handled as bits."""
        scalar = "half" if dtype == "float16" and self.native_half else _SCALARS.get(dtype) or f"i{BITS[dtype]}"
        return scalar if lanes == 1 else f"<{lanes} x {scalar}>"

    def memory_type(self, dtype: str, lanes: int = 1) -> str:
        """The LLVM type of a value in memory: a bool is a byte there."""
        return self.type("uint8" if dtype == "bool" else dtype, lanes)


class Builder:
    """One LLVM function in the making: its text, and what has been computed, in nested scopes."""

    def __init__(self, module: Module) -> None:
        self.module, self.target = module, module.target
        self.lines: list[str] = []
        self.slots: list[str] = []  # allocas, which belong into the entry block, and what is stored there at first
        self.block = "entry"
        self.count = 0
        self.scopes: list[dict[Any, Value]] = [{}]

    def text(self, header: str) -> str:
        """The function as text, behind its header."""
        return "\n".join([header + " {", "entry:", *self.slots, *self.lines, "}"])

    def error(self, what: str, why: str = "", hint: str = "", where: str = "") -> CodegenError:
        """The error that the kernel cannot be compiled, at `where` in it."""
        return CodegenError(what, where=f"{self.module.name}: {where}" if where else self.module.name, why=why, hint=hint)

    def line(self, text: str) -> None:
        """Add an instruction without a result."""
        self.lines.append("  " + text)

    def op(self, text: str) -> str:
        """Add an instruction; returns its result."""
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def shuffle(self, type_: str, a: str, b: str, picks: Sequence[int]) -> str:
        """Pick lanes of two vectors of one type."""
        return self.op(f"shufflevector {type_} {a}, {type_} {b}, <{len(picks)} x i32> <{', '.join(f'i32 {p}' for p in picks)}>")

    def either(self, test: str, type_: str, first: str, second: str, lanes: int) -> str:
        """The instruction `select`, by a condition of `lanes` lanes."""
        return self.op(f"select {self.module.type('bool', lanes)} {test}, {type_} {first}, {type_} {second}")

    def labels(self, *hints: str) -> list[str]:
        """Names for new basic blocks."""
        first = self.count + 1
        self.count += len(hints)
        return [f"{hint}{n}" for n, hint in enumerate(hints, first)]

    def start(self, label: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{label}:")
        self.block = label

    def field(self, name: str) -> str:
        """The address of a field of the call."""
        return self.op(f"getelementptr i8, ptr %call, i64 {8 * CALL_FIELDS.index(name)}")

    def branch(self, test: str, yes: str, no: str, expected: bool = False, unroll: bool = False) -> None:
        """End a basic block by a choice of two; `expected`: the test nearly always holds; `unroll` the loop that it ends."""
        notes = [', !prof !{!"branch_weights", i32 1048575, i32 1}'] if expected else []
        if unroll:
            notes.append(f", !llvm.loop !{self.module.unrolled}")
            self.module.unrolled += 1
        self.line(f"br i1 {test}, label %{yes}, label %{no}{''.join(notes)}")

    def jump(self, label: str) -> None:
        """End a basic block."""
        self.line(f"br label %{label}")

    def call(self, intrinsic: str, result: str, *args: tuple[str, str], suffix: Sequence[str] | None = None, flags: str = "") -> str:
        """Call of an intrinsic overloaded on the types `suffix` (its result where not given)."""
        name = f"@llvm.{intrinsic}.{'.'.join(map(_mangled, suffix or (result,)))}"
        self.module.declarations.setdefault(name, f"declare {result} {name}({', '.join(t for t, _ in args)})")
        text = f"call {flags}{result} {name}({', '.join(f'{t} {ref}' for t, ref in args)})"
        if result != "void":
            return self.op(text)
        self.line(text)
        return ""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Values computed inside are not available after the end."""
        self.scopes.append({})
        yield
        self.scopes.pop()

    def find(self, key: Any) -> Value | None:
        """The value that was computed for a key and is available here; None if there is none."""
        return next((scope[key] for scope in reversed(self.scopes) if key in scope), None)

    def spread(self, value: Value, lanes: int) -> str:
        """As a vector of `lanes` lanes."""
        if value.lanes == lanes:
            return value.ref
        scalar, type_ = self.module.type(value.dtype), self.module.type(value.dtype, lanes)
        if value.ref[0] != "%":
            return f"splat ({scalar} {value.ref})"
        key = (value.ref, lanes)
        if (found := self.find(key)) is not None:
            return found.ref
        one = self.op(f"insertelement {type_} poison, {scalar} {value.ref}, i64 0")
        ref = self.op(f"shufflevector {type_} {one}, {type_} poison, <{lanes} x i32> zeroinitializer")
        self.scopes[-1][key] = Value(ref, value.dtype, lanes)
        return ref

    def splat(self, n: int, dtype: str, lanes: int) -> str:
        """An integer literal, the same in all lanes."""
        return str(n) if lanes == 1 else f"splat ({self.module.type(dtype)} {n})"

    def alike(self, *values: Value) -> tuple[int, str, list[str]]:
        """The values with the same number of lanes; that number, and the type of the first."""
        lanes = max(v.lanes for v in values)
        return lanes, self.module.type(values[0].dtype, lanes), [self.spread(v, lanes) for v in values]

    def negated(self, a: Value) -> Value:
        """The opposite of a condition."""
        return self.arithmetic("xor", [a, Value("true", "bool")], "bool")

    def arithmetic(self, op: str, args: Sequence[Value], dtype: str) -> Value:
        """An operator on two values of the type of its result."""
        lanes, type_, (a, b) = self.alike(*args)
        if op in ("min", "max"):
            return Value(self.extremum(op, args, a, b, dtype, lanes), dtype, lanes)
        if (name := (_FLOAT_OPS if is_float(dtype) else _INT_OPS).get(op)) is None:
            raise self.error(f"`{op}` of {dtype} cannot be compiled")
        return Value(self.op(f"{name} {type_} {a}, {b}"), dtype, lanes)

    def extremum(self, op: str, args: Sequence[Value], a: str, b: str, dtype: str, lanes: int) -> str:
        """`min` and `max`: NaN where either float is."""
        type_, relation = self.module.type(dtype, lanes), "lt" if op == "min" else "gt"
        if not is_float(dtype):
            sign = "s" if dtype in SIGNED else "u"
            return self.either(self.op(f"icmp {sign}{relation} {type_} {a}, {b}"), type_, a, b, lanes)
        if args[1].ref[0] != "%":
            a, b, args = b, a, (args[1], args[0])
        if args[0].ref[0] != "%" and args[0].ref != literal(math.nan, dtype, self.module.native_half):
            # (c < x) ? c : x is one instruction, and gives x when it is NaN.
            return self.either(self.op(f"fcmp o{relation} {type_} {a}, {b}"), type_, a, b, lanes)
        # Either zero will do. The test is whether the first operand is NaN: not the running result, or each step would wait for it.
        return self.call(f"{op}imum", type_, (type_, b), (type_, a), flags="nsz ")

    def unary(self, op: str, a: Value) -> Value:
        """An operator on one value."""
        ref, dtype, lanes = a
        type_ = self.module.type(dtype, lanes)
        match op:
            case "neg":
                return Value(self.op(f"fneg {type_} {ref}" if is_float(dtype) else f"sub {type_} zeroinitializer, {ref}"), dtype, lanes)
            case "abs" if dtype in SIGNED:
                return Value(self.call("abs", type_, (type_, ref), ("i1", "false")), dtype, lanes)
            case "abs" if not is_float(dtype):
                return a
            case "not":
                return self.arithmetic("xor", [a, Value("true" if dtype == "bool" else "-1", dtype)], dtype)
            case "isnan":
                return Value(self.op(f"fcmp uno {type_} {ref}, zeroinitializer"), "bool", lanes)
            case "isinf":
                size = self.call("fabs", type_, (type_, ref))
                return Value(self.op(f"fcmp oeq {type_} {size}, {self.everywhere(math.inf, a)}"), "bool", lanes)
            case _ if op in _INTRINSICS:
                return Value(self.call(_INTRINSICS[op], type_, (type_, ref)), dtype, lanes)
        raise self.error(f"`{op}` of {dtype} cannot be compiled")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once; with relaxed SIMD alone, and there of whole vectors only, once or twice."""
        lanes, type_, refs = self.alike(a, b, c)
        if self.target.relaxed_fma:
            return Value(self.call("wasm.relaxed.madd", type_, *((type_, r) for r in refs)), a.dtype, lanes)
        return Value(self.call("fma", type_, *((type_, r) for r in refs)), a.dtype, lanes)

    def ldexp(self, a: Value, n: Value) -> Value:
        """By the instruction of AVX-512, for vectors of 128, 256 and 512 bits: others are put together, or part of one."""
        lanes, type_, refs = self.alike(a, n)
        bits = BITS[a.dtype]
        width = min(max(lanes, 128 // bits), 512 // bits)
        part = self.module.type(a.dtype, width)
        refs = [self.spread(v, width) for v in (a, n)] if lanes == 1 else refs
        parts = []
        for start in range(0, lanes, width):
            x, y = (
                refs if lanes in (1, width) else [self.shuffle(type_, r, r, [k % lanes for k in range(start, start + width)]) for r in refs]
            )
            args = [
                (part, x),
                (part, y),
                (part, "zeroinitializer"),
                (f"i{max(width, 8)}", "-1"),
                *([("i32", "4")] if width * bits == 512 else []),
            ]
            parts.append(self.call(f"x86.avx512.mask.scalef.{'ps' if bits == 32 else 'pd'}", part, *args, suffix=(str(width * bits),)))
        while len(parts) > 1:
            part, width = self.module.type(a.dtype, width), 2 * width
            parts = [self.shuffle(part, *pair, range(width)) for pair in zip(parts[::2], parts[1::2], strict=True)]
        ref = parts[0]
        if lanes < width:
            ref = self.op(f"extractelement {part} {ref}, i64 0") if lanes == 1 else self.shuffle(part, ref, ref, range(lanes))
        return Value(ref, a.dtype, lanes)

    def compare(self, op: str, a: Value, b: Value) -> Value:
        """A comparison, as a bool for each lane."""
        lanes, type_, (x, y) = self.alike(a, b)
        sign = "" if op in ("eq", "ne") else "s" if a.dtype in SIGNED else "u"
        test = f"fcmp {'u' if op == 'ne' else 'o'}{op}" if is_float(a.dtype) else f"icmp {sign}{op}"
        return Value(self.op(f"{test} {type_} {x}, {y}"), "bool", lanes)

    def choose(self, test: Value, a: Value, b: Value) -> Value:
        """The lanes of `a` where a condition holds, else those of `b`."""
        lanes = max(a.lanes, b.lanes, test.lanes)
        x, y = self.spread(a, lanes), self.spread(b, lanes)
        return Value(self.either(test.ref, self.module.type(a.dtype, lanes), x, y, test.lanes), a.dtype, lanes)

    def divide(self, e: Expr, a: Value, b: Value) -> Value:
        """Integer quotients and remainders; by zero they are 0, and nothing traps."""
        dtype, remainder = e.dtype, e.op in ("mod", "truncmod")
        (lo, hi), (divisor_lo, _) = E.bounds(e.args[0]), E.bounds(e.args[1])
        unsigned = dtype not in SIGNED or (lo is not None and lo >= 0 and divisor_lo is not None and divisor_lo >= 0)
        if e.args[1].op == "const":
            return self.divide_by_constant(e, a, int(e.args[1].attr), unsigned, hi)
        lanes, type_, (x, y) = self.alike(a, b)
        if unsigned and b.lanes == 1 and divisor_lo is not None and divisor_lo > 0:
            return Value(self.op(f"{'urem' if remainder else 'udiv'} {type_} {x}, {y}"), dtype, lanes)
        bits = self.module.type("bool", lanes)
        y = self.op(f"freeze {type_} {y}")  # a masked-out lane may hold anything, but one thing
        one = self.splat(1, dtype, lanes)
        zero = self.op(f"icmp eq {type_} {y}, zeroinitializer")
        if unsigned:
            result = self.op(f"{'urem' if remainder else 'udiv'} {type_} {x}, {self.either(zero, type_, one, y, lanes)}")
        else:
            ones = self.splat(-1, dtype, lanes)
            minus = self.op(f"icmp eq {type_} {y}, {ones}")  # the smallest integer / -1 traps: x / 1, negated
            divisor = self.either(self.op(f"or {bits} {zero}, {minus}"), type_, one, y, lanes)
            quotient, rest = (self.op(f"{op} {type_} {x}, {divisor}") for op in ("sdiv", "srem"))
            quotient = self.either(minus, type_, self.op(f"sub {type_} zeroinitializer, {quotient}"), quotient, lanes)
            result = rest if remainder else quotient
            if e.op in ("floordiv", "mod"):
                opposite = self.op(f"icmp slt {type_} {self.op(f'xor {type_} {rest}, {y}')}, zeroinitializer")
                inexact = self.op(f"and {bits} {opposite}, {self.op(f'icmp ne {type_} {rest}, zeroinitializer')}")
                change = self.op(f"add {type_} {rest}, {y}" if remainder else f"add {type_} {quotient}, {ones}")
                result = self.either(inexact, type_, change, result, lanes)
        return Value(self.either(zero, type_, "zeroinitializer", result, lanes), dtype, lanes)

    def divide_by_constant(self, e: Expr, a: Value, c: int, unsigned: bool, hi: int | None) -> Value:
        """Integer quotients and remainders by a constant, which need fewer tests."""
        dtype, lanes, remainder = e.dtype, a.lanes, e.op in ("mod", "truncmod")
        if c == 0 or (c == -1 and remainder):
            return Value("0", dtype)
        if c == -1:
            return self.unary("neg", a)
        type_, x, divisor = self.module.type(dtype, lanes), a.ref, self.splat(c, dtype, lanes)
        if unsigned:
            op = "urem" if remainder else "udiv"
            if BITS[dtype] == 64 and hi is not None and hi < 1 << 31 and c < 1 << 31:  # 32-bit multiplication is cheaper
                narrow = self.module.type("int32", lanes)
                small = self.op(f"{op} {narrow} {self.op(f'trunc {type_} {x} to {narrow}')}, {self.splat(c, 'int32', lanes)}")
                return Value(self.op(f"zext {narrow} {small} to {type_}"), dtype, lanes)
            return Value(self.op(f"{op} {type_} {x}, {divisor}"), dtype, lanes)
        rest = self.op(f"srem {type_} {x}, {divisor}")
        result = rest if remainder else self.op(f"sdiv {type_} {x}, {divisor}")
        if e.op in ("floordiv", "mod"):
            inexact = self.op(f"icmp {'slt' if c > 0 else 'sgt'} {type_} {rest}, zeroinitializer")
            change = self.op(f"add {type_} {result}, {self.splat(c if remainder else -1, dtype, lanes)}")
            result = self.either(inexact, type_, change, result, lanes)
        return Value(result, dtype, lanes)

    def shift(self, e: Expr, a: Value, b: Value) -> Value:
        """Shifts; by the width or more they give 0, or the sign."""
        dtype, bits = e.dtype, BITS[e.dtype]
        op = "shl" if e.op == "shl" else "ashr" if dtype in SIGNED else "lshr"
        lanes, type_, (x, y) = self.alike(a, b)
        if e.args[1].op == "const" and 0 <= e.args[1].attr < bits:
            return Value(self.op(f"{op} {type_} {x}, {y}"), dtype, lanes)
        inside = self.op(f"icmp ult {type_} {y}, {self.splat(bits, dtype, lanes)}")
        shifted = self.op(f"{op} {type_} {x}, {self.either(inside, type_, y, self.splat(bits - 1, dtype, lanes), lanes)}")
        return Value(shifted if op == "ashr" else self.either(inside, type_, shifted, "zeroinitializer", lanes), dtype, lanes)

    def cast(self, a: Value, dtype: str) -> Value:
        """A conversion of values, saturating from floats to integers."""
        x, source, lanes = a
        old, new = self.module.type(source, lanes), self.module.type(dtype, lanes)
        before, after = (1 if source == "bool" else BITS[source]), BITS[dtype]
        if dtype == "bool":
            return Value(self.op(f"{'fcmp une' if is_float(source) else 'icmp ne'} {old} {x}, zeroinitializer"), dtype, lanes)
        if is_float(source) and is_float(dtype):
            return self.convert_float(a, dtype)
        if lanes > 1 and source in ("float32", "float64") and (after in (8, 16) or dtype == "int32"):
            return self.truncated(a, dtype)
        if is_float(source):
            return Value(self.call(f"fpto{'s' if dtype in SIGNED else 'u'}i.sat", new, (old, x), suffix=(new, old)), dtype, lanes)
        if before == after and not is_float(dtype):
            return Value(x, dtype, lanes)
        signed = source in SIGNED
        op = ("sitofp" if signed else "uitofp") if is_float(dtype) else "trunc" if before > after else "sext" if signed else "zext"
        return Value(self.op(f"{op} {old} {x} to {new}"), dtype, lanes)

    def truncated(self, a: Value, dtype: str) -> Value:
        """Vectors of floats as integers of at most 32 bits (saturating, NaN to 0): of its intrinsics for that LLVM makes scalar code. The
        largest int32 is not a float32: what is too large for it is replaced afterwards."""
        low, high = integer_range(dtype)
        wide, kind = self.module.type("int32", a.lanes), self.module.type(a.dtype, a.lanes)
        if BITS[dtype] < 32:
            whole = self.op(f"fptosi {kind} {self.clamped(a, low, high, 0).ref} to {wide}")
            return Value(self.op(f"trunc {wide} {whole} to {self.module.type(dtype, a.lanes)}"), dtype, a.lanes)
        x = self.clamped(a, low, None, 0).ref
        inside = self.op(f"fcmp olt {kind} {x}, {self.everywhere(high + 1, a)}")
        whole = self.op(f"fptosi {kind} {self.either(inside, kind, x, 'zeroinitializer', a.lanes)} to {wide}")
        return Value(self.either(inside, wide, whole, f"splat (i32 {high})", a.lanes), dtype, a.lanes)

    def rounded(self, a: Value, offset: int, dtype: str) -> Value:
        """Floats rounded to the nearest integer (of two, the even one), plus an offset, as integers of 8 or 16 bits; saturating, NaN to
        0."""
        low, high = integer_range(dtype)
        wide, kind = self.module.type("int32", a.lanes), self.module.type(a.dtype, a.lanes)
        x = self.clamped(a, low - offset, high - offset, -offset)
        if self.target.arch in ("armv7", "wasm32") and a.dtype == "float32":  # no instruction: the sum has its last bit at 1
            magic = 1.5 * 2.0**23
            shifted = self.op(f"bitcast {kind} {self.op(f'fadd {kind} {x.ref}, {self.everywhere(magic, a)}')} to {wide}")
            whole = self.op(f"sub {wide} {shifted}, splat (i32 {int(np.float32(magic).view(np.int32))})")
        else:
            whole = self.call("lrint", wide, (kind, x.ref), suffix=(wide, kind))
        if offset:
            whole = self.op(f"add {wide} {whole}, splat (i32 {offset})")
        return Value(self.op(f"trunc {wide} {whole} to {self.module.type(dtype, a.lanes)}"), dtype, a.lanes)

    def clamped(self, a: Value, low: int, high: int | None, nan: int) -> Value:
        """Floats between two numbers; `nan` in the place of NaN."""
        kind, x = self.module.type(a.dtype, a.lanes), a.ref
        if low != nan:  # else the next step replaces NaN
            x = self.either(self.op(f"fcmp ord {kind} {x}, {x}"), kind, x, self.everywhere(nan, a), a.lanes)
        for test, bound in (("ogt", low), ("olt", high)):
            if bound is not None:
                limit = self.everywhere(bound, a)
                x = self.either(self.op(f"fcmp {test} {kind} {x}, {limit}"), kind, x, limit, a.lanes)
        return Value(x, a.dtype, a.lanes)

    def everywhere(self, n: float, like: Value) -> str:
        """The same number in all lanes."""
        return self.spread(Value(literal(float(n), like.dtype, self.module.native_half), like.dtype), like.lanes)

    def convert_float(self, a: Value, dtype: str) -> Value:
        """A float of another width; 16 bits go through LLVM's `half`."""
        ref, source, lanes = a
        half, bits = "half" if lanes == 1 else f"<{lanes} x half>", self.module.type("float16", lanes)
        old, new = (half if d == "float16" else self.module.type(d, lanes) for d in (source, dtype))
        if source == "float16" and bits != half:
            ref = self.op(f"bitcast {bits} {ref} to {half}")
        ref = self.op(f"{'fpext' if BITS[source] < BITS[dtype] else 'fptrunc'} {old} {ref} to {new}")
        if (source, dtype) == ("float64", "float32"):  # or else LLVM may join it with a conversion to `half`, for which it calls a function
            ref = self.call("arithmetic.fence", new, (new, ref), suffix=(new,))
        if dtype == "float16" and bits != half:
            ref = self.op(f"bitcast {half} {ref} to {bits}")
        return Value(ref, dtype, lanes)

    def bitcast(self, a: Value, dtype: str) -> Value:
        """The same bits as another type of that width."""
        if BITS[a.dtype] != BITS[dtype]:
            raise self.error(f"bitcast of {a.dtype} to {dtype}", why="the widths differ")
        old, new = self.module.type(a.dtype, a.lanes), self.module.type(dtype, a.lanes)
        if old == new:
            return Value(a.ref, dtype, a.lanes)
        if "bool" in (a.dtype, dtype):  # a byte in memory, a bit in registers
            return self.cast(a, dtype)
        return Value(self.op(f"bitcast {old} {a.ref} to {new}"), dtype, a.lanes)
