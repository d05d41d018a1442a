"""Regular expressions in the syntax of RE2, matched in time linear in the text: no pattern, and no text, can make a match take longer.

A pattern becomes a nondeterministic automaton, all of whose states are followed at once (Ken Thompson: Regular Expression Search Algorithm.
Communications of the ACM 11(6), 1968); sets of states are remembered, so that a character usually costs one look-up. There are no groups to
be captured, since all that is asked is whether a whole text matches. Python's `re` has another syntax and backtracks, exponentially at
worst; bindings of RE2 itself are machine code, and artifacts run with NumPy alone.

Source of the syntax: https://github.com/google/re2/wiki/Syntax, of which scripts (\\p{Greek}) and \\C are left out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from tcomp.errors import InputError

MAX_STATES = 20_000  # of the automaton of a pattern
MAX_REPEAT = 1000  # times that a count may ask for, as in RE2
MAX_DEPTH = 200  # groups inside groups
_MAX_SETS = 10_000  # transitions that are remembered

Fits: TypeAlias = Callable[[str], bool]  # whether a character fits

_WORD = [("0", "9"), ("A", "Z"), ("a", "z"), ("_", "_")]
_PERL = {"d": [("0", "9")], "s": [(c, c) for c in "\t\n\f\r "], "w": _WORD}
_POSIX = {
    "alnum": _WORD[:3], "alpha": _WORD[1:3], "ascii": [("\0", "\x7f")], "blank": [("\t", "\t"), (" ", " ")],
    "cntrl": [("\0", "\x1f"), ("\x7f", "\x7f")], "digit": _WORD[:1], "graph": [("!", "~")], "lower": [("a", "z")], "print": [(" ", "~")],
    "punct": [("!", "/"), (":", "@"), ("[", "`"), ("{", "~")], "space": [("\t", "\r"), (" ", " ")], "upper": [("A", "Z")], "word": _WORD,
    "xdigit": [("0", "9"), ("A", "F"), ("a", "f")],
}  # fmt: skip
_CONTROLS = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}


class _State(NamedTuple):
    """A state: to `next` (and `other`), by a character that fits, or without one, or where an assertion holds; the end has no next."""

    fits: Fits | None = None
    assertion: str = ""
    next: int = -1
    other: int = -1


def _between(ranges: Iterable[tuple[str, str]]) -> Fits:
    listed = [*ranges]
    return lambda c: any(a <= c <= b for a, b in listed)


def _any_of(parts: list[Fits], negated: bool, fold: bool) -> Fits:
    def one(c: str) -> bool:
        return any(part(c) for part in parts)

    def found(c: str) -> bool:
        return one(c) or (fold and (one(c.lower()) or one(c.upper())))

    return (lambda c: not found(c)) if negated else found


class _Parser:
    """Pattern -> states, from its end to its start: each part is made for the state that follows it."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.depth = pattern, 0, 0
        self.states = [_State()]
        self.fold = self.dot_all = self.lines = False

    def error(self, why: str) -> InputError:
        return InputError(f"the pattern `{self.pattern[:100]}` cannot be used", where=f"character {self.at}", why=why)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def accept(self, text: str) -> bool:
        if found := self.peek(text):
            self.at += len(text)
        return found

    def take(self) -> str:
        if self.at >= len(self.pattern):
            raise self.error("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def add(self, state: _State) -> int:
        if len(self.states) >= MAX_STATES:
            raise self.error(f"it takes more than {MAX_STATES} states")
        self.states.append(state)
        return len(self.states) - 1

    # A part of a pattern is a function from the state after it to its first state, so that a repeated part can be made several times.

    def alternatives(self) -> Callable[[int], int]:
        flags = self.fold, self.dot_all, self.lines
        branches = [self.sequence()]
        while self.accept("|"):
            branches.append(self.sequence())
        self.fold, self.dot_all, self.lines = flags

        def make(after: int) -> int:
            first = branches[-1](after)
            for branch in reversed(branches[:-1]):
                first = self.add(_State(next=branch(after), other=first))
            return first

        return make

    def sequence(self) -> Callable[[int], int]:
        parts: list[Callable[[int], int]] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            if self.accept("\\Q"):
                while self.at < len(self.pattern) and not self.accept("\\E"):
                    parts.append(self.one(self.literal(self.take())))
                continue
            parts.append(self.repeated(self.atom()))

        def make(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return make

    def one(self, fits: Fits) -> Callable[[int], int]:
        return lambda after: self.add(_State(fits, next=after))

    def literal(self, c: str) -> Fits:
        return _any_of([lambda x: x == c], False, self.fold)

    def repeated(self, part: Callable[[int], int]) -> Callable[[int], int]:
        least, most = self.count()
        if least is None:
            return part
        self.accept("?")  # which of several matches is preferred makes no difference
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            raise self.error("a repetition is repeated")

        def make(after: int) -> int:
            if most is None:
                loop = self.add(_State())
                self.states[loop] = _State(next=part(loop), other=after)
                first = loop
            else:
                first = after
                for _ in range(most - least):
                    first = self.add(_State(next=part(first), other=after))
            for _ in range(least):
                before, first = first, part(first)
                if first == before:  # of nothing
                    break
            return first

        return make

    def count(self) -> tuple[int | None, int | None]:
        for sign, range_ in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.accept(sign):
                return range_
        end = self.pattern.find("}", self.at)
        first, comma, last = self.pattern[self.at + 1 : end].partition(",")
        if not self.peek("{") or end < 0 or not (first.isascii() and first.isdigit() and len(first + last) <= 10):
            return None, None  # also a brace that begins no count
        if last and not (last.isascii() and last.isdigit()):
            return None, None
        self.at = end + 1
        least = int(first)
        most = int(last) if last else None if comma else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise self.error(f"a count of repetitions is beyond {MAX_REPEAT}, or ends before it begins")
        return least, most

    def atom(self) -> Callable[[int], int]:
        match c := self.take():
            case "(":
                return self.group()
            case "[":
                return self.one(self.char_class())
            case ".":
                return self.one((lambda x: True) if self.dot_all else lambda x: x != "\n")
            case "^" | "$":
                kind = {"^": "start", "$": "end"}[c] + ("_of_line" if self.lines else "")
                return lambda after: self.add(_State(assertion=kind, next=after))
            case "*" | "+" | "?":
                raise self.error("nothing is there to be repeated")
            case "\\":
                kinds = {"A": "start", "z": "end", "b": "boundary", "B": "no_boundary"}
                if (kind := kinds.get(self.pattern[self.at : self.at + 1], "")) != "":
                    self.at += 1
                    return lambda after: self.add(_State(assertion=kind, next=after))
                return self.one(_any_of([self.escape()], False, self.fold))
            case _:
                return self.one(self.literal(c))

    def group(self) -> Callable[[int], int]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"groups are nested more than {MAX_DEPTH} deep")
        outer = self.fold, self.dot_all, self.lines
        if self.accept("?P<") or self.accept("?<"):
            if self.peek("=") or self.peek("!"):
                raise self.error("it looks behind")
            while self.take() != ">":
                pass
        elif self.accept("?"):
            on = True
            while (flag := self.take()) not in ":)":
                match flag:
                    case "-":
                        on = False
                    case "i":
                        self.fold = on
                    case "s":
                        self.dot_all = on
                    case "m":
                        self.lines = on
                    case "U":
                        pass  # which match is preferred
                    case _:
                        raise self.error(f"`(?{flag}` is not supported")
            if flag == ")":  # flags of what follows
                self.depth -= 1
                return lambda after: after
        made = self.alternatives()
        if not self.accept(")"):
            raise self.error("a group is not closed")
        self.fold, self.dot_all, self.lines = outer
        self.depth -= 1
        return made

    def escape(self) -> Fits:
        """What follows a backslash."""
        c = self.take()
        if c.lower() in _PERL:
            return _any_of([_between(_PERL[c.lower()])], c.isupper(), False)
        if c in "pP":
            return self.category(c == "P")
        if c in _CONTROLS:
            return self.exactly(_CONTROLS[c])
        if c == "x":
            digits = self.take() + self.take() if not self.accept("{") else self.until("}")
            try:
                return self.exactly(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                raise self.error(f"`{digits[:20]}` is not a hexadecimal number of a character") from None
        if c.isascii() and c.isalnum():
            raise self.error(f"`\\{c}` is not supported")
        return self.exactly(c)

    def exactly(self, c: str) -> Fits:
        return lambda x: x == c

    def until(self, end: str) -> str:
        text = ""
        while (c := self.take()) != end:
            text += c
        return text

    def category(self, negated: bool) -> Fits:
        name = self.until("}") if self.accept("{") else self.take()
        if name.startswith("^"):
            name, negated = name[1:], not negated
        if not 1 <= len(name) <= 2 or name[0] not in "LMNPSZC":
            raise self.error(f"the class `{name[:20]}` of characters is not supported")
        return _any_of([lambda c: unicodedata.category(c).startswith(name)], negated, False)

    def char_class(self) -> Fits:
        negated, parts = self.accept("^"), list[Fits]()
        while not self.accept("]") or not parts:
            if parts == [] and self.pattern[self.at - 1] == "]":  # a bracket that comes first stands for itself
                low = "]"
            elif self.accept("[:"):
                off, name = self.accept("^"), self.until(":")
                if not self.accept("]") or name not in _POSIX:
                    raise self.error(f"unknown class `[:{name[:20]}:]`")
                parts.append(_any_of([_between(_POSIX[name])], off, False))
                continue
            else:
                low = self.take()
            if low == "\\":
                mark = self.at
                fits = self.escape()
                if self.pattern[mark].lower() in "dswp" or not self.is_range():
                    parts.append(fits)
                    continue
                low = self.single(mark)
            high = low
            if self.is_range():
                self.at += 1
                high = self.take()
                if high == "\\":
                    mark = self.at
                    self.escape()
                    high = self.single(mark)
            if high < low:
                raise self.error(f"the range {low}-{high} is empty")
            parts.append(_between([(low, high)]))
        return _any_of(parts, negated, self.fold)

    def is_range(self) -> bool:
        return self.peek("-") and not self.peek("-]")

    def single(self, mark: int) -> str:
        """The character that the escape just read, from `mark` on, stands for."""
        c = self.pattern[mark]
        if c.lower() in "dswp":
            raise self.error("a range ends with a class")
        digits = self.pattern[mark + 1 : self.at].strip("{}")
        return chr(int(digits, 16)) if c == "x" else _CONTROLS.get(c, c)


class Pattern:
    """A regular expression. Raises `InputError` for one that is malformed, too large, or has what is not supported."""

    def __init__(self, pattern: str) -> None:
        parser = _Parser(pattern)
        made = parser.alternatives()
        if parser.at < len(pattern):
            raise parser.error("a parenthesis is closed that was not opened")
        self.text, self.first = pattern, made(0)
        self.states = parser.states
        self.asserts = any(s.assertion for s in self.states)
        self._known: dict[tuple[frozenset[int], str, str, str], frozenset[int]] = {}

    def full_match(self, text: str) -> bool:
        """Whether the whole text matches."""
        states = frozenset([self.first])
        for n, c in enumerate(text):
            before = text[n - 1] if self.asserts and n else ""
            key = (states, before, c, "")
            if (found := self._known.get(key)) is None:
                reached = self._closure(states, before, c)
                found = frozenset(s.next for s in map(self.states.__getitem__, reached) if s.fits is not None and s.fits(c))
                if len(self._known) >= _MAX_SETS:
                    self._known.clear()
                self._known[key] = found
            if not (states := found):
                return False
        return 0 in self._closure(states, text[-1:], "")

    def _closure(self, states: frozenset[int], before: str, after: str) -> set[int]:
        """All states that are reached without a character, between two of them ("" is outside of the text)."""
        found, waiting = set[int](), [*states]
        while waiting:
            if (number := waiting.pop()) in found:
                continue
            found.add(number)
            state = self.states[number]
            if state.fits is None and (not state.assertion or _holds(state.assertion, before, after)):
                waiting += [n for n in (state.next, state.other) if n >= 0]
        return found


def _holds(assertion: str, before: str, after: str) -> bool:
    word = _between(_WORD)
    boundary = (before != "" and word(before)) != (after != "" and word(after))
    match assertion:
        case "start":
            return before == ""
        case "end":
            return after == ""
        case "start_of_line":
            return before in ("", "\n")
        case "end_of_line":
            return after in ("", "\n")
        case "boundary":
            return boundary
    return not boundary
