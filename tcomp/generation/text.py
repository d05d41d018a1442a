"""Tokens as text that is handed on while it grows: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"  # what decoders make of bytes that are not a character yet
MAX_PENDING = 16  # tokens that may be parts of one character; what is none by then is given as it is


class Decoder(Protocol):
    """What turns tokens into text, as `tokenizers.Tokenizer` does."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""


class GrowingText:
    """Text of tokens that come one after the other. `text` is all that has been given; `stopped` whether a stop string ended it."""

    def __init__(self, decoder: Decoder, before: Sequence[int], stop: Sequence[str] = ()) -> None:
        """`before`: tokens in front, whose last ones decide how those after them are written."""
        self._decoder, self._stop = decoder, [s for s in stop if s]
        self._tokens = list(before[-4:])
        self._read = len(self._tokens)
        self._known = self._decode(self._tokens)
        self._held = ""
        self.text, self.stopped = "", False

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(list(tokens), skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        if whole.endswith(INCOMPLETE) and len(self._tokens) - self._read < MAX_PENDING:
            return ""
        new = whole[len(self._known) :]
        # What comes next is compared with the text of these tokens alone, so that the time of a step does not grow.
        self._tokens = self._tokens[-4:]
        self._read, self._known = len(self._tokens), self._decode(self._tokens)
        return self._given(new)

    def finish(self) -> str:
        """What was held back and is not part of a stop string."""
        rest = self._held
        self._held, self.text = "", self.text + rest
        return rest

    def _given(self, new: str) -> str:
        text = self._held + new
        places = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if places:
            self.stopped, self._held = True, ""
            text = text[: min(places)]
            self.text += text
            return text
        held = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - held :]
        text = text[: len(text) - held]
        self.text += text
        return text
