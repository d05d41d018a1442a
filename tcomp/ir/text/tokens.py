"""The tokens of printed programs: what a parser takes them apart into, and how it says what is wrong where.

A quoted name is in backticks, text in double quotes; both have the escapes of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

from tcomp.errors import IRError, ParseError

DIGITS = 400  # of one number
T = TypeVar("T")

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+|\#[^\n]*)"
    r"|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?P<suffix>bf16|f16|f|[iu](?:8|16|32|64))?(?![A-Za-z0-9_]))"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
    r"|(?P<quoted>`(?:[^`\\\n]|\\.)*`)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<sign>\.\.|->|//|<<|>>|<=|==|!=|\+=|[-+*/%&|^~<>=()\[\]{},:;@])",
    re.ASCII,
)


class Token(NamedTuple):
    """A piece of text, where it starts, and of a number the suffix that says its type."""

    kind: str
    text: str
    start: int
    suffix: str = ""


class Tokens:
    """A text as tokens, and the place that a parser has come to."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.tokens = text, 0, list[Token]()
        start, end = 0, len(text)
        while start < end:
            match = _TOKEN.match(text, start)
            if match is None:
                self.fail("a character that starts nothing", start)
            if match.lastgroup != "space":
                kind = "number" if match["number"] else str(match.lastgroup)
                self.tokens.append(Token(kind, match.group(), start, match["suffix"] or ""))
            start = match.end()
        self.tokens.append(Token("end", "", end))
        self.token = self.tokens[0]

    def fail(self, what: str, start: int | None = None, hint: str = "") -> NoReturn:
        """Raises `ParseError` that shows the place: that of the next token, or `start`."""
        start = self.token.start if start is None else start
        line = self.text.count("\n", 0, start) + 1
        begin = self.text.rfind("\n", 0, start) + 1
        column = start - begin
        left = max(0, column - 60)
        excerpt = self.text[begin:].split("\n", 1)[0][left : left + 120]
        raise ParseError(what, where=f"line {line}, column {column + 1}\n    {excerpt}\n    {' ' * (column - left)}^", hint=hint)

    def made(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a constructor; an error that it raises is reported at this place of the text."""
        try:
            return function(*args)
        except ParseError:
            raise
        except IRError as error:
            self.fail(error.what, hint=error.hint)

    def whole(self, rule: Callable[[], T]) -> T:
        """The result of `rule`, which must consume the whole text."""
        try:
            result = self.made(rule)
        except RecursionError:
            self.fail("this is nested too deeply")
        if self.token.kind != "end":
            self.fail(f"expected the end of the text, found `{self.token.text}`")
        return result

    def take(self) -> str:
        """The text of the next token, which is passed."""
        text, self.position = self.token.text, self.position + 1
        self.token = self.tokens[min(self.position, len(self.tokens) - 1)]
        return text

    def peek(self, text: str, skipped: int = 0) -> bool:
        """Whether this sign or name is the next token, or the token after `skipped` others."""
        token = self.tokens[min(self.position + skipped, len(self.tokens) - 1)]
        return token.text == text and token.kind in ("sign", "name")

    def accept(self, text: str) -> bool:
        """Whether the next token is this sign or name; then it is passed."""
        return self.peek(text) and bool(self.take())

    def found(self) -> str:
        """The next token, for a message."""
        return f"`{self.token.text}`" if self.token.text else "the end of the text"

    def expect(self, *texts: str) -> None:
        """Passes these signs or names, which must be next."""
        for text in texts:
            if not self.accept(text):
                self.fail(f"expected `{text}`, found {self.found()}")

    def sequence(self, *parts: str | Callable[[], Any]) -> list[Any]:
        """The results of the rules among `parts`, in order; strings among `parts` are signs and names that must be present between them."""
        results = []
        for part in parts:
            if isinstance(part, str):
                self.expect(part)
            else:
                results.append(part())
        return results

    def name(self) -> str:
        """A name, in backticks or not."""
        return self.take() if self.token.kind == "name" else self.unescaped("quoted", "a name")

    def string(self) -> str:
        """Text in double quotes."""
        return self.unescaped("string", "a string")

    def unescaped(self, kind: str, what: str) -> str:
        """The text of the next token, which must be of this kind, without its quotes and escapes."""
        if self.token.kind != kind:
            self.fail(f"expected {what}, found {self.found()}")
        try:
            result = json.loads(f'"{self.token.text[1:-1]}"')
        except ValueError:
            self.fail("a malformed escape")
        self.take()
        return str(result)

    def integer(self) -> int:
        """An integer, which may be negative."""
        sign = -1 if self.accept("-") else 1
        if self.token.kind != "number" or not self.token.text.isdigit() or len(self.token.text) > DIGITS:
            self.fail(f"expected an integer, found {self.found()}")
        return sign * int(self.take())

    def listed(self, item: Callable[[], T], end: str) -> tuple[T, ...]:
        """Items separated by commas, up to and including `end`."""
        if self.accept(end):
            return ()
        items = self.several(item)
        self.expect(end)
        return items

    def until(self, end: str, item: Callable[[], T]) -> tuple[T, ...]:
        """Items one after the other, up to and including `end`."""
        items = []
        while not self.accept(end):
            items.append(item())
        return tuple(items)

    def bracketed(self, item: Callable[[], T], pair: str) -> tuple[T, ...]:
        """Items separated by commas between a pair of brackets."""
        self.expect(pair[0])
        return self.listed(item, pair[1])

    def several(self, item: Callable[[], T]) -> tuple[T, ...]:
        """Items separated by commas, one at least."""
        items = [item()]
        while self.accept(","):
            items.append(item())
        return tuple(items)
