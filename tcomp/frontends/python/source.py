"""The source text of a function, and refusals that point into it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
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
            raise ProgramError(
                f"the source of `{self.name}` cannot be read",
                where=getattr(getattr(function, "__code__", None), "co_filename", ""),
                why="a loop program is made from the text of the function, which is kept for files, not for an interactive prompt",
                hint="write the function in a file and import it",
            ) from None
        self.lines = [line.rstrip("\n") for line in lines]
        try:
            found = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except SyntaxError:  # the lines of a lambda need not be a statement
            found = ast.Pass()
        if not isinstance(found, ast.FunctionDef):
            raise ProgramError(
                f"`{self.name}` is no plain function",
                where=f"{self.file}:{self.first}",
                hint="decorate a `def`, not a lambda or a coroutine",
            )
        self.function = found

    def place(self, node: ast.AST) -> str:
        """File, line and text of the line a node begins on."""
        line: int = getattr(node, "lineno", 1)
        return f"{self.file}:{self.first + line - 1}: {self.lines[line - 1].strip()}"

    def refuse(self, node: ast.AST, what: str, why: str = "", hint: str = "") -> NoReturn:
        """The error for a node of the syntax tree, with its place in the file."""
        raise ProgramError(what, where=self.place(node), why=why, hint=hint)
