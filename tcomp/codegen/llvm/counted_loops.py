"""Loops that are loops in LLVM IR: their counters, the digits of these, and how a long one is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tcomp.codegen.llvm.builder import Value
from tcomp.codegen.llvm.checkpoints import interval
from tcomp.codegen.llvm.digits import Counter, digits
from tcomp.codegen.llvm.kernel_module import KernelModule
from tcomp.codegen.llvm.stores import Stores
from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import INDEX, Expr


class CountedLoops(Stores):
    """Loops, at one place of a function."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module)
        self.can_stop = False  # whether the function tests the status

    def counted(
        self,
        v: Expr,
        begin: str,
        count: str,
        head: str,
        end: str,
        body: Callable[[], str | None],
        short: bool = False,
        counters: Sequence[Counter] = (),
    ) -> None:
        """`do { body } while (++v < count && condition)`, entered by a jump to `head` from the current block; `body` may return a
        condition. A `short` one that checks indices is unrolled: what iterations share then pays for the checks. The digits of the variable
        that have `counters` are not divided."""
        before, reports = self.block, self.module.reports
        self.start(head)
        self.count += 1
        i, after, place = f"%i{self.count}", f"%n{self.count}", len(self.lines)
        self.lines += [""] * (1 + 2 * len(counters))  # the phis, when the last block of the body is known
        with self.scope():
            self.bind(v, Value(i, INDEX))
            for n, c in enumerate(counters):
                self.remember(self.key(c.digit.remainder), Value(f"{i}.r{n}", INDEX), ())
                self.remember(self.key(c.digit.quotient), Value(f"{i}.q{n}", INDEX), ())
            condition = body()
            del self.bound[v], self.depth[v]
        self.line(f"{after} = add nuw nsw i64 {i}, 1")
        phis, carries = [(i, begin, after)], {v: "1"}
        for n, c in enumerate(counters):
            more = self.op(f"add nuw nsw i64 {i}.r{n}, {carries[c.digit.number]}")
            full = self.op(f"icmp eq i64 {more}, {c.base}")
            carried = full if c.positive is None else self.op(f"and i1 {full}, {c.positive}")
            carry = carries[c.digit.quotient] = self.op(f"zext i1 {carried} to i64")
            phis.append((f"{i}.r{n}", c.remainder, self.op(f"select i1 {full}, i64 0, i64 {more}")))
            phis.append((f"{i}.q{n}", c.quotient, self.op(f"add nuw nsw i64 {i}.q{n}, {carry}")))
        for n, (ref, first, following) in enumerate(phis, place):
            self.lines[n] = f"  {ref} = phi i64 [ {first}, %{before} ], [ {following}, %{self.block} ]"
        more = self.op(f"icmp slt i64 {after}, {count}")
        if condition is not None:
            more = self.op(f"and i1 {more}, {condition}")
        self.branch(more, head, end, unroll=short and self.module.reports > reports)
        self.start(end)

    def counters(self, s: L.For, begin: str) -> list[Counter]:
        """The digits of a loop's variable, with what they are in the first iteration. By 0, all quotients and remainders are 0."""
        sizes = {d for b in self.pointers for d in b.shape if isinstance(d, Expr)}
        numbers, found = {s.var: begin}, list[Counter]()
        for digit in digits(s, sizes):
            base, positive = self.scalar(digit.base, "a divisor"), None
            if (E.bounds(digit.base)[0] or 0) < 1:
                base, positive = self.call("smax", "i64", ("i64", base), ("i64", "1")), self.op(f"icmp sgt i64 {base}, 0")
            first = numbers[digit.number]
            quotient, remainder = ("0", "0") if first == "0" else (self.op(f"{op} i64 {first}, {base}") for op in ("udiv", "urem"))
            if positive is not None:
                quotient = self.op(f"select i1 {positive}, i64 {quotient}, i64 0")
            numbers[digit.quotient] = quotient
            found.append(Counter(digit, base, positive, remainder, quotient))
        return found

    def iterate(self, s: L.For, begin: str, count: str, head: str, end: str) -> None:
        """The iterations from `begin` to `count`, at least one; a long loop leaves the function once the run is stopped."""
        every, short = interval(s), not any(isinstance(x, L.For) for x in L.walk(s.body))
        if every is None or every == 1 or self.lane is not None:

            def body() -> None:
                self.statement(s.body)
                if every == 1 and self.lane is None:
                    self.stop_if_asked()

            counters = self.counters(s, begin)
            self.jump(head)
            return self.counted(s.var, begin, count, head, end, body, short and every is None, counters)
        before, (inner, rest, ask) = self.block, self.labels("part", "rest", "ask")
        self.jump(head)
        self.start(head)
        start, place = f"%from{self.count}", len(self.lines)
        self.lines.append("")  # the phi, as in `counted`
        with self.scope():
            stop = self.call("smin", "i64", ("i64", self.op(f"add nsw i64 {start}, {every}")), ("i64", count))
            counters = self.counters(s, start)
            self.jump(inner)
            self.counted(s.var, start, stop, inner, rest, lambda: self.statement(s.body), short, counters)
        self.branch(self.op(f"icmp slt i64 {stop}, {count}"), ask, end)
        self.start(ask)
        self.lines[place] = f"  {start} = phi i64 [ {begin}, %{before} ], [ {stop}, %{ask} ]"
        self.stop_if_asked(head)
        self.start(end)

    def stop_if_asked(self, label: str = "") -> None:
        """Return if the status is not 0, else continue at a label, or in a new block."""
        # As weak as an atomic load may be, so that other accesses are optimised around it; volatile, so that it stays in the loop.
        status = self.op(f"load atomic volatile i64, ptr {self.field('status')} unordered, align 8")
        self.can_stop, go = True, label or self.labels("go")[0]
        self.branch(self.op(f"icmp eq i64 {status}, 0"), go, "stopped")
        if not label:
            self.start(go)
