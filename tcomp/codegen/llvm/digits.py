"""Which quotients and remainders of a loop variable are counted from one iteration to the next instead of being divided.

A loop into which several were fused has their indices as its digits, which go up like an odometer: `i % w`, then `i // w % h`, then
`i // w // h`. By sizes that are known when the model runs, a division takes 10 to 20 cycles, a step of a digit 1 to 2.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tcomp.ir import expr as E, loops as L
from tcomp.ir.expr import Expr


class CountedDigit(NamedTuple):
    """`number % base`, which carries into `number // base`. The number is the loop variable, or what another digit carries into."""

    number: Expr
    base: Expr

    @property
    def quotient(self) -> Expr:
        """What it carries into."""
        return E.binary("floordiv", self.number, self.base)

    @property
    def remainder(self) -> Expr:
        """The digit."""
        return E.binary("mod", self.number, self.base)


class Counter(NamedTuple):
    """A digit while its loop is emitted, as LLVM IR: its base, at least 1; whether that is positive, where it may be 0; and what the digit
    and its quotient are in the first iteration."""

    digit: CountedDigit
    base: str
    positive: str | None
    remainder: str
    quotient: str


def digits(loop: L.For, sizes: Collection[Expr]) -> list[CountedDigit]:
    """The digits of a loop's variable in its body, a number before its quotients. Their bases do not change in the loop, and are not
    negative, as none of the given sizes of buffers is; constant ones are counted only where a symbolic one follows, as LLVM divides by
    multiplying where it knows the divisor."""
    changing = {s.var for s in L.walk(loop) if isinstance(s, L.For)}
    found, numbers = dict[CountedDigit, None](), {loop.var}
    for s in L.walk(loop.body):
        for e in E.walk(*L.expressions(s)):
            if e.op not in ("floordiv", "mod") or e.args[0] not in numbers or not changing.isdisjoint(E.variables(e.args[1])):
                continue
            least = E.bounds(e.args[1])[0]
            if e.args[1] in sizes or (least is not None and least >= 0 and not E.reads(e.args[1])):
                found[digit := CountedDigit(*e.args)] = None
                numbers.add(digit.quotient)
    kept, followed = list[CountedDigit](), set[Expr]()
    for digit in reversed(found):
        if digit.base.op != "const" or digit.quotient in followed:
            kept.append(digit)
            followed.add(digit.number)
    return kept[::-1]
