"""Texts that keep to a grammar: of the tokens that may follow, only those are chosen with which it can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tcomp.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text may be: JSON that fits a schema (as text), what a regular expression matches, or a grammar as Lark writes it."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that fits a schema; {"type": "object"} is any object."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What a regular expression matches, from its start to its end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """What a context-free grammar, in the syntax of the package Lark, derives from `start`."""
        return cls("lark", grammar)


class Grammars:
    """What makes constraints of grammars, for the tokens of one tokenizer; by the package llguidance, which bounds what they may take."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int]) -> None:
        """Raises `InputError` without the package, or for a tokenizer that it does not know."""
        try:
            import llguidance
        except ImportError as error:
            raise InputError("texts by a grammar need a package", why=str(error), hint="pip install 'tcomp[generate]'") from error
        self._package = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=sorted(end_tokens) or None)
        except Exception as error:  # noqa: BLE001  the package raises what Rust says
            raise InputError("the tokenizer cannot be used with grammars", why=str(error)[:200]) from None

    def constraint(self, grammar: Grammar) -> Constraint:
        """A text by a grammar, at its beginning. Raises `InputError` for a grammar that is none, or too large."""
        matcher = self._package.LLMatcher
        try:
            made = getattr(matcher, f"grammar_from_{grammar.kind}")(grammar.text)
        except ValueError as error:
            raise InputError("the grammar cannot be read", why=str(error)[:200]) from None
        constraint = Constraint(matcher(self._tokenizer, made, log_level=0))
        constraint.check()
        return constraint


class Constraint:
    """What may follow in one text."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def check(self) -> None:
        """Raises `InputError` where the grammar is none, or took too much."""
        if self._matcher.is_error():
            raise InputError("the grammar cannot be followed", why=str(self._matcher.get_error())[:200])

    def allowed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits, minus infinity for tokens that may not follow. Raises `InputError` where there are none that may."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
        self.check()
        result = np.full_like(logits, -np.inf)
        result[: len(bits)][bits != 0] = logits[: len(bits)][bits != 0]
        return result

    def accept(self, token: int) -> None:
        """It does follow. Raises `InputError` where it may not."""
        self._matcher.consume_token(token)
        self.check()
