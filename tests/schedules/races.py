"""Which iterations of parallel and vectorized loops touch the same element: found by running the index arithmetic of a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tcomp.ir.expr import Expr, as_expr, evaluate_int
from tcomp.ir.loops import PARALLEL, VECTORIZED, Accumulate, Allocate, Block, Buffer, For, If, Kernel, Stmt, Store

Element = tuple[Buffer, tuple[int, ...]]
Access = tuple[str, Element]  # "read", "write" or "fold"


def accesses(stmt: Stmt, values: Mapping[Expr, int], found: list[str]) -> Iterator[Access]:
    """What a statement touches outside of its own temporaries, in order. Races inside it are appended to `found`."""
    match stmt:
        case Block(stmts):
            for s in stmts:
                yield from accesses(s, values, found)
        case Allocate(b, body):
            yield from (a for a in accesses(body, values, found) if a[1][0] is not b)
        case If(cond, then, otherwise):
            branch = then if evaluate_int(cond, values) else otherwise
            if branch is not None:
                yield from accesses(branch, values, found)
        case For(v, extent, body, kind):
            touched: dict[Element, tuple[int, str]] = {}
            for n in range(evaluate_int(as_expr(extent), values)):
                for how, element in accesses(body, {**values, v: n}, found):
                    if kind in (PARALLEL, VECTORIZED):
                        before, first = touched.setdefault(element, (n, how))
                        together = kind == VECTORIZED and first == how == "fold"  # lanes may be folded as a tree
                        if before != n and (first, how) != ("read", "read") and not together:
                            found.append(f"{kind} {v.name}: {before} and {n} touch {element[0].name}{list(element[1])}")
                        if how != "read":
                            touched[element] = (n, how)
                    yield how, element
        case Store(b, indices, value) | Accumulate(b, indices, value, _):
            yield from reads(value, values)
            element = b, tuple(evaluate_int(i, values) for i in indices)
            yield "fold" if isinstance(stmt, Accumulate) else "write", element


def reads(e: Expr, values: Mapping[Expr, int]) -> Iterator[Access]:
    if e.op == "select":
        yield from reads(e.args[1] if evaluate_int(e.args[0], values) else e.args[2], values)
    elif e.op == "read":
        yield "read", (e.attr, tuple(evaluate_int(i, values) for i in e.args))
    else:
        for a in e.args:
            yield from reads(a, values)


def races(kernel: Kernel, dims: Mapping[Expr, int]) -> list[str]:
    """A line for each pair of iterations that must not be swapped or run at the same time."""
    found: list[str] = []
    for _ in accesses(kernel.body, dims, found):
        pass
    return found
