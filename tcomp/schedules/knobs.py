"""Knobs: the decisions that a schedule function asks for, `factor = knobs.choice("tile", (8, 16, 32), 16)`. The function *is* the search
space. A record answers what it holds, a tuner's function picks among the options, else the default is taken, the analytic model's choice.
Options may depend on earlier answers, so the space is found by walking it: `asked` has what was decided, and what else could have been.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tcomp.errors import ScheduleError

Option = Hashable  # an integer, boolean, text, or a tuple of them: what JSON can say
Decisions = Mapping[str, Option]
Pick = Callable[[str, Sequence[Option], Option], Option]
O = TypeVar("O", bound=Option)


@dataclass(frozen=True, slots=True)
class Answer:
    """One decision: what was chosen, among what, what the analytic model would have chosen, and what `kind` of decision it is ("tile",
    "threads"), whatever it is about."""

    value: Option
    options: tuple[Option, ...]
    default: Option
    kind: str


@dataclass(slots=True)
class Knobs:
    """Answers by `given`, else by `pick`. A given value that is not an option any more is passed over: the space has changed since."""

    given: Decisions = field(default_factory=dict)
    pick: Pick = lambda name, options, default: default
    asked: dict[str, Answer] = field(default_factory=dict)

    def choice(self, name: str | tuple[str, str], options: Sequence[O], default: O) -> O:
        """One of the options, which are in a fixed order and include `default`. The same name asked again gets the same answer.

        A name is a kind of decision ("tile"), or what the decision is about and its kind (("C", "tile"), recorded as "C.tile").

        Raises `ScheduleError` if there is no such option.
        """
        kind, name = (name, name) if isinstance(name, str) else (name[1], ".".join(name))
        if (asked := self.asked.get(name)) is not None and asked.value in options:
            return options[options.index(asked.value)]
        value = self.given.get(name)
        if name not in self.given or value not in options:
            value = self.pick(name, options, default)
        if value not in options or default not in options:
            raise ScheduleError(f"knob `{name}` has no option {value!r}", hint=f"one of {', '.join(map(repr, options))}")
        decided = options[options.index(value)]
        self.asked[name] = Answer(decided, tuple(options), default, kind)
        return decided

    def flag(self, name: str | tuple[str, str], default: bool) -> bool:
        """Yes or no."""
        return self.choice(name, (False, True), default)

    @property
    def decisions(self) -> dict[str, Option]:
        """The decisions that differ from the default, by name."""
        return chosen(self.asked)


def chosen(answers: Mapping[str, Answer]) -> dict[str, Option]:
    """The answers that are not the default."""
    return {name: a.value for name, a in answers.items() if a.value != a.default}


def encode(decisions: Decisions) -> str:
    """JSON; the same text for equal decisions."""
    return json.dumps(dict(decisions), sort_keys=True, separators=(",", ":"))


def decode(text: str) -> dict[str, Option]:
    """The decisions that `encode` wrote: lists are tuples again. Raises `ScheduleError` for what are none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError("these are not decisions", where=text[:120], why=f"it is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ScheduleError("these are not decisions", where=text[:120], why='they are of the form {"name": value, ...}')
    return {name: option_of(value) for name, value in record.items()}


def option_of(value: Any) -> Option:
    """The option that JSON says. Raises `ScheduleError` for what is none."""
    if isinstance(value, list):
        return tuple(option_of(v) for v in value)
    if isinstance(value, str | int | float | bool | None):
        return value
    raise ScheduleError("these are not decisions", where=repr(value)[:120], why="a value is a number, text, boolean, null, or list of them")
