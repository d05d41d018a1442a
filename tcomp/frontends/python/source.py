"""What a function's syntax tree says: refusals that point into the source text, and where local variables live.

Python has one variable of a name in the whole function. A loop program wants each in the innermost block that holds all of a
value's uses: then it is private to an iteration and does not stand in the way of running iterations in parallel. A name whose value
is always assigned again between two stretches of the program stands for two variables.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tcomp.errors import ProgramError


class Source:
    """The syntax tree of a function, and where it stands."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        try:
            lines, self.first = inspect.getsourcelines(function)
            self.file = inspect.getsourcefile(function) or "<unknown>"
        except (OSError, TypeError):
            what, where = f"the source of `{self.name}` cannot be read", getattr(getattr(function, "__code__", None), "co_filename", "")
            why = "a loop program is made from the text of the function, which exists for files, not for an interactive prompt"
            raise ProgramError(what, where=where, why=why, hint="write the function in a file and import it") from None
        self.lines = [line.rstrip("\n") for line in lines]
        found: ast.stmt | None = None
        with suppress(SyntaxError):  # the lines of a lambda need not be a statement
            found = ast.parse(textwrap.dedent("".join(lines))).body[0]
        if not isinstance(found, ast.FunctionDef):
            hint = "decorate a `def`, not a lambda or a coroutine"
            raise ProgramError(f"`{self.name}` is not a plain function", where=f"{self.file}:{self.first}", hint=hint)
        self.function = found

    def refuse(self, node: ast.AST, what: str, why: str = "", hint: str = "") -> NoReturn:
        """The error for a node of the syntax tree, with file, line and text of the line that it begins on."""
        line: int = getattr(node, "lineno", 1)
        raise ProgramError(what, where=f"{self.file}:{self.first + line - 1}: {self.lines[line - 1].strip()}", why=why, hint=hint)


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
        if names(stmt, name):
            if not groups or first_use(block[number:], name) != READ:
                groups.append([])
            groups[-1].append(stmt)
    for group in groups:
        match group:
            case [ast.For() | ast.While() | ast.If() as stmt]:  # neither takes a value from before nor leaves one behind
                yield from (local for inner in (stmt.body, stmt.orelse) for local in locals_of(inner, name))
            case _:
                uses = tuple(n for stmt in group for n in names(stmt, name))
                yield Local(name, block, uses, tuple(s for stmt in group for s in assignments(stmt, name)))


def first_use(block: Sequence[ast.stmt], name: str) -> str | None:
    """READ: the value from before may be needed; WRITE: it is certainly overwritten first; MAYBE: overwritten on some paths."""
    uses = [use for stmt in block if (use := _first_in(stmt, name))]
    return next((use for use in uses if use != MAYBE), MAYBE if uses else None)


def _first_in(stmt: ast.stmt, name: str) -> str | None:
    match stmt:
        case ast.For(iter=header) | ast.While(test=header):
            use = READ if names(header, name) else first_use(stmt.body, name)
            return MAYBE if use == WRITE else use
        case ast.If():
            sides = [first_use(stmt.body, name), first_use(stmt.orelse, name)]
            if names(stmt.test, name) or READ in sides:
                return READ
            return WRITE if sides == [WRITE, WRITE] else MAYBE if any(sides) else None
    found = names(stmt, name)
    if isinstance(stmt, ast.AugAssign) or any(isinstance(n.ctx, ast.Load) for n in found):
        return READ if found else None
    return WRITE if found else None


def names(node: ast.AST, name: str | None = None) -> list[ast.Name]:
    """The nodes inside that are names, or this name."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and name in (None, n.id)]


def assignments(stmt: ast.stmt, name: str) -> Iterator[ast.stmt]:
    """The assignments inside that give a name a value."""
    for s in ast.walk(stmt):
        targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AugAssign) else []
        if isinstance(s, ast.stmt) and any(isinstance(n.ctx, ast.Store) for target in targets for n in names(target, name)):
            yield s
