"""The isl model of a loop program, against running the program: which iterations there are, in which order, and what they touch."""

from __future__ import annotations

import random
from collections.abc import Callable

import islpy as isl
import pytest

from tcomp.ir import expr as E, te
from tcomp.ir.expr import Expr, as_expr, evaluate_int
from tcomp.ir.loops import Accumulate, Allocate, Block, Buffer, For, If, Stmt, Store, While, block, loop, store
from tcomp.ir.polyhedral.model import READ, REDUCE, WRITE, TooHard, limited, model, written_twice

N = E.dim("n", 1)
A, B = Buffer("A", "float32", (N, N)), Buffer("B", "float32", (N, N))
P = Buffer("P", "int64", (N,))


def points(s: isl.Set) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    count = s.dim(isl.dim_type.set)
    s.foreach_point(lambda p: found.append(tuple(p.get_coordinate_val(isl.dim_type.set, d).to_python() for d in range(count))))
    return sorted(found)


def fixed(relation: isl.Set | isl.Map, n: int) -> isl.Set | isl.Map:
    return relation.fix_val(isl.dim_type.param, 0, isl.Val(n)) if relation.dim(isl.dim_type.param) else relation


def executed(stmt: Stmt, values: dict[Expr, int]) -> list[tuple[Stmt, tuple[int, ...]]]:
    """The leaves that run, in order, with the values of the loops around them."""
    match stmt:
        case Block(stmts):
            return [x for s in stmts for x in executed(s, values)]
        case Allocate(body=body):
            return executed(body, values)
        case For(v, extent, body):
            runs = []
            for k in range(evaluate_int(as_expr(extent), values)):
                runs += [(s, (k, *rest)) for s, rest in executed(body, {**values, v: k})]
            return runs
        case If(cond, then, otherwise):
            branch = then if evaluate_int(cond, values) else otherwise
            return [] if branch is None else executed(branch, values)
    return [(stmt, ())]


def random_index(rng: random.Random, variables: list[Expr]) -> Expr:
    e = as_expr(rng.randint(-1, 2))
    for v in variables:
        e = e + v * rng.choice([0, 0, 1, 1, 2, -1])
    match rng.randrange(6):
        case 0:
            return e // rng.randint(2, 4)
        case 1:
            return e % rng.randint(2, 4)
        case 2:
            return E.minimum(e, N - 1)
        case 3:
            return E.select(e < rng.randint(0, 3), e + 1, as_expr(2))
    return e


def random_program(rng: random.Random) -> Stmt:
    def leaf(variables: list[Expr]) -> Stmt:
        place = (random_index(rng, variables), random_index(rng, variables))
        return store(A, place, B[random_index(rng, variables), random_index(rng, variables)])

    def body(variables: list[Expr], depth: int) -> Stmt:
        parts = []
        for _ in range(rng.randint(1, 2)):
            if depth == 0 or rng.random() < 0.2:
                part = leaf(variables)
            else:
                extents = [N, as_expr(rng.randint(0, 4)), *(v + 1 for v in variables), *(N - v for v in variables)]
                part = loop(f"v{rng.random()}", rng.choice(extents), lambda v: body([*variables, v], depth - 1))
            if variables and rng.random() < 0.3:
                cond = random_index(rng, variables) < random_index(rng, variables)
                part = If(cond, part, leaf(variables) if rng.random() < 0.5 else None)
            parts.append(part)
        return block(*parts)

    return body([], 3)


@pytest.mark.parametrize("seed", range(40))
def test_domains_and_order_are_those_of_the_program(seed: int) -> None:
    program = random_program(random.Random(seed))
    m = model(program)
    for n in (1, 3):
        found = []
        for i in m.instances:
            assert i.exact
            for point in points(fixed(i.domain, n)):
                moment = i.order
                for d, value in enumerate(point):
                    moment = moment.fix_val(isl.dim_type.in_, d, isl.Val(value))
                (when,) = points(fixed(moment.range(), n))
                found.append((when, i.stmt, point))
        found.sort(key=lambda x: x[0])
        assert [(s, p) for _, s, p in found] == executed(program, {N: n})


@pytest.mark.parametrize("seed", range(40))
def test_accesses_are_the_indices(seed: int) -> None:
    m = model(random_program(random.Random(seed)))
    for i in m.instances:
        assert isinstance(i.stmt, Store)
        assert [(a.kind, a.buffer.name, a.exact) for a in i.accesses] == [(READ, "B", True), (WRITE, "A", True)]
        for point in points(fixed(i.domain, 3))[:20]:
            values = {N: 3, **{x.var: v for x, v in zip(i.loops, point, strict=True)}}
            for a, indices in zip(i.accesses, (i.stmt.value.args, i.stmt.indices), strict=True):
                relation = fixed(a.relation, 3)
                for d, value in enumerate(point):
                    relation = relation.fix_val(isl.dim_type.in_, d, isl.Val(value))
                assert points(relation.range()) == [tuple(evaluate_int(x, values) for x in indices)]


def test_what_is_not_affine_is_over_approximated() -> None:
    X = Buffer("X", "float32", (N,))
    (i,) = model(loop("i", N, lambda i: Store(X, (P[i],), X[i]))).instances
    kinds = {(a.kind, a.buffer.name): a for a in i.accesses}
    assert not kinds[WRITE, "X"].exact and kinds[READ, "X"].exact and kinds[READ, "P"].exact
    touched = kinds[WRITE, "X"].relation.range()
    assert isl.Set(f"[p0] -> {{ {touched.get_tuple_name()}[k] : 0 <= k < p0 }}").is_subset(touched)


def test_a_guard_read_from_memory_may_hold_or_not() -> None:
    X = Buffer("X", "float32", (N,))
    (i,) = model(loop("i", N, lambda i: If(P[i] < 3, store(X, (i,), 0.0)))).instances
    assert not i.exact and points(fixed(i.domain, 3)) == [(0,), (1,), (2,)]
    assert (READ, "P") in {(a.kind, a.buffer.name) for a in i.accesses}


def test_a_while_touches_all_of_its_buffers() -> None:
    X = Buffer("X", "int64", (N,))
    (i,) = model(loop("i", N, lambda i: While(X[i] < 3, store(X, (i,), X[i] + 1)))).instances
    assert {(a.kind, a.buffer.name, a.exact) for a in i.accesses} == {(READ, "X", False), (WRITE, "X", False)}
    assert len(points(fixed(i.accesses[0].relation, 3).range())) == 3


def test_a_temporary_is_new_in_every_iteration() -> None:
    T, X = Buffer("T", "float32", (4,)), Buffer("X", "float32", (N,))
    program = loop("i", N, lambda i: Allocate(T, block(loop("j", 4, lambda j: store(T, (j,), X[i])), store(X, (i,), T[3]))))
    written, read = (a for i in model(program).instances for a in i.accesses if a.buffer is T)
    assert points(fixed(read.relation, 2).range()) == [(0, 3), (1, 3)]
    assert len(points(fixed(written.relation, 2).range())) == 8


def test_reads_under_a_selection_happen_where_it_holds() -> None:
    X, Y = Buffer("X", "float32", (N,)), Buffer("Y", "float32", (N,))
    program = loop("i", N, lambda i: store(Y, (i,), E.select(i >= 1, X[i - 1], E.const(0.0, "float32"))))
    read = next(a for i in model(program).instances for a in i.accesses if a.kind == READ)
    assert points(fixed(read.relation, 4).range()) == [(0,), (1,), (2,)]


def test_accumulations_are_folds() -> None:
    X = Buffer("X", "float32", ())
    add = te.sum(B[0, 0], te.reduce_axis(1)).attr[0]
    folded = [a for i in model(loop("i", N, lambda i: Accumulate(X, (), B[i, i], add))).instances for a in i.accesses if a.buffer is X]
    assert [(a.kind, a.reducer) for a in folded] == [(REDUCE, add)]


def test_questions_have_a_limit() -> None:
    hard = " and ".join(f"exists (e{k}: {2 * k + 3} e{k} <= {k + 2} i + {k + 5} j <= {2 * k + 3} e{k} + {k % 3})" for k in range(9))
    with pytest.raises(TooHard), limited(1000):
        isl.Set(f"{{ [i, j] : {hard} }}").is_empty()
    with pytest.raises(TooHard), limited(1000):
        with limited():  # the limit around still holds afterwards
            isl.Set("{ [i] : i > 0 }").is_empty()
        isl.Set(f"{{ [i, j] : {hard} }}").is_empty()
    assert not isl.Set("{ [i] : i > 0 }").is_empty()


@pytest.mark.parametrize(
    ("index", "twice"),
    [
        (lambda i, j, k: k * 20 + i * 4 + j, False), (lambda i, j, k: k * 20 + i * 3 + j, True), (lambda i, j, k: i * 4 + j % 4, False),
        (lambda i, j, k: (i + k) % 5 * 4 + j, False), (lambda i, j, k: (i + k) % 4 * 4 + j, True), (lambda i, j, k: i, True),
        (lambda i, j, k: i // 2 * 8 + i % 2 * 4 + j, False), (lambda i, j, k: i * i * 4 + j, True), (lambda i, j, k: P[i] * 4 + j, True),
    ],
)  # fmt: skip
def test_elements_written_once(index: Callable[[Expr, Expr, Expr], Expr], twice: bool) -> None:
    """In one iteration of a loop around; what is not affine may be any element."""
    outer = E.loop_var("k", N)
    nest = loop("i", 5, lambda i: loop("j", 4, lambda j: store(A, (0, index(i, j, outer)), 1.0)))
    assert (written_twice(nest) is A) == twice
    assert written_twice(block(nest, loop("m", 2, lambda m: store(A, (1, m), 2.0)))) is (A if twice else None)
    assert written_twice(block(nest, store(A, (0, index(as_expr(2), as_expr(1), outer)), 2.0))) is A
