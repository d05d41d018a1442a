"""The errors a user may see.

Every refusal is a `TcompError`. Its message says *what* was refused, *where* (node, loop, file, line), *why*, and *what to do*.
The command line prints the message alone and exits with status 2.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

E = TypeVar("E", bound="TcompError")


def printable(text: str) -> str:
    """Text with what is not printable (but for line ends and tabs) written as escapes: names in a model are of unknown origin, and must not
    control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class TcompError(Exception):
    """Base of every error that tcomp raises on purpose. `what` is one sentence; `where`, `why` and `hint` are optional and printed on lines
    of their own."""

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        what, where, why, hint = (printable(text) for text in (what, where, why, hint))
        self.what, self.where, self.why, self.hint = what, where, why, hint
        parts = (f"  {label}: {text}" for label, text in (("where", where), ("why", why), ("try", hint)) if text)
        super().__init__("\n".join((what, *parts)))

    @property
    def parts(self) -> dict[str, str]:
        """The arguments that the error is made of."""
        return {"what": self.what, "where": self.where, "why": self.why, "hint": self.hint}

    def restated(self, kind: type[E], **parts: str) -> E:
        """The same refusal as an error of another kind, with other parts (`where="..."`) in place of its own."""
        return kind(**(self.parts | parts))

    @property
    def reason(self) -> str:
        """Why, as far as that is known; else what was refused."""
        return self.why or self.what

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **self.parts), ()  # errors cross process boundaries: rebuilt from the parts, not from the joined text


class IRError(TcompError):
    """An expression, tensor expression, graph or loop program is malformed."""


class ParseError(IRError):
    """Text that claims to be printed IR is not."""


class ImportModelError(TcompError):
    """A model file cannot be read, or is not a valid model."""


class UnsupportedError(TcompError):
    """A valid model uses something that tcomp does not (yet) compile. Lists everything missing at once."""


class ProgramError(TcompError):
    """A Python function uses something that has no meaning as a loop program."""


class ScheduleError(TcompError):
    """A schedule step is illegal or does not apply; shows the loops concerned. `witness`, where two iterations would get into conflict, is
    such a pair (a `tcomp.schedules.analysis.legality.Witness`)."""

    witness: object | None = None


class CodegenError(TcompError):
    """No machine code can be made from a loop program for the requested target."""


class TargetError(TcompError):
    """An unknown target, or one that cannot be used on this machine."""


class DeviceError(TcompError):
    """A device (a GPU) cannot be used, or failed."""


class ArtifactError(TcompError):
    """An artifact is damaged, incomplete, of another version, or made for another machine."""


class DatabaseError(TcompError):
    """A database of tuning records is damaged, of another version, or cannot be read or written."""


class StoppedError(TcompError):
    """A run was stopped, by its timeout or by `cancel`; its outputs mean nothing."""


class LimitError(TcompError):
    """A compilation takes more time or memory than it was allowed."""


class InputError(TcompError):
    """Inputs given to a module (or a command) do not fit its signature."""


class OutOfRangeError(InputError, IndexError):
    """An index of a program of your own is out of range, for the sizes or the data given in a call; Python would raise `IndexError`."""
