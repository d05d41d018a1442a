"""Where the local variables of a function live.

Python has one variable of a name in the whole function. A loop program wants each in the innermost block that holds all of a
value's uses: then it is private to an iteration and does not stand in the way of running iterations in parallel. A name whose value
is always assigned anew between two stretches of the program stands for two variables.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

READ, WRITE, MAYBE = "read", "write", "maybe"  # what a piece of program does first with a variable; None: nothing


@dataclass(frozen=True, eq=False, slots=True)
class Local:
    """One variable: its name, the block that it lives in, and the assignments to it."""

    name: str
    home: Sequence[ast.stmt]
    uses: tuple[ast.Name, ...]
    assignments: tuple[ast.stmt, ...]


def locals_of(block: Sequence[ast.stmt], name: str) -> Iterator[Local]:
    """The variables that a name stands for in a block in which it is assigned before it is read."""
    groups: list[list[ast.stmt]] = []
    for number, stmt in enumerate(block):
        if not _names(stmt, name):
            continue
        if groups and first_use(block[number:], name) == READ:
            groups[-1].append(stmt)
        else:
            groups.append([stmt])
    for group in groups:
        inner = _blocks(group[0]) if len(group) == 1 else ()
        if inner:  # a loop or branch that neither takes a value from before nor leaves one behind
            for body in inner:
                yield from locals_of(body, name)
        else:
            uses = tuple(n for stmt in group for n in _names(stmt, name))
            yield Local(name, block, uses, tuple(s for stmt in group for s in _assignments(stmt, name)))


def first_use(block: Sequence[ast.stmt], name: str) -> str | None:
    """READ: the value from before may be needed; WRITE: it is certainly overwritten first; MAYBE: overwritten on some paths."""
    found: str | None = None
    for stmt in block:
        match _first_in(stmt, name):
            case "read":
                return READ
            case "write":
                return WRITE
            case "maybe":
                found = MAYBE
    return found


def _first_in(stmt: ast.stmt, name: str) -> str | None:
    match stmt:
        case ast.For(iter=header) | ast.While(test=header):
            if _names(header, name) or first_use(stmt.body, name) == READ:
                return READ
            return MAYBE if first_use(stmt.body, name) else None
        case ast.If():
            sides = [first_use(stmt.body, name), first_use(stmt.orelse, name)]
            if _names(stmt.test, name) or READ in sides:
                return READ
            return WRITE if sides == [WRITE, WRITE] else MAYBE if any(sides) else None
        case ast.AugAssign():
            return READ if _names(stmt, name) else None
    found = _names(stmt, name)
    if any(isinstance(n.ctx, ast.Load) for n in found):
        return READ
    return WRITE if found else None


def _names(node: ast.AST, name: str) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]


def _blocks(stmt: ast.stmt) -> tuple[list[ast.stmt], ...]:
    return (stmt.body, stmt.orelse) if isinstance(stmt, ast.For | ast.While | ast.If) else ()


def _assignments(stmt: ast.stmt, name: str) -> Iterator[ast.stmt]:
    for s in ast.walk(stmt):
        if isinstance(s, ast.Assign | ast.AugAssign):
            targets = s.targets if isinstance(s, ast.Assign) else [s.target]
            if any(isinstance(n.ctx, ast.Store) for target in targets for n in _names(target, name)):
                yield s
