"""A trace: the steps of a schedule as data. It prints as the Python that repeats it, is stored as JSON, compared, sliced and diffed.

What names of loops, and texts of sizes, mean is decided when a step is applied (`schedule.py`), so a trace fits every kernel with such
loops. In JSON: `{"version": 1, "steps": [["split", ["C.i", 4]], ["set_kind", ["C.i.i", "vectorized"], {"reassociate": true}]]}`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from tcomp.errors import ScheduleError

VERSION = 1  # of the JSON form; a file of another one is refused
# Of a file that is read, in bytes, steps, characters of one text, and lists inside each other: no schedule that is used has as many.
JSON_LIMIT, STEP_LIMIT, TEXT_LIMIT, DEPTH_LIMIT = 64 << 20, 100_000, 1 << 20, 8


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive with its arguments (None, booleans, integers, texts, tuples of them); `options` are those passed by name."""

    primitive: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        listed = [_python(a) for a in self.arguments] + [f"{name}={_python(a)}" for name, a in self.options]
        return f"s.{self.primitive}({', '.join(listed)})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps([self.primitive, self.arguments, *([dict(self.options)] if self.options else ())])


@dataclass(frozen=True, slots=True, repr=False)
class Trace(Sequence[Step]):
    """The steps of a schedule, in order; immutable. Compared by content."""

    steps: tuple[Step, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> Step | Trace:
        return Trace(self.steps[index]) if isinstance(index, slice) else self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def __add__(self, steps: Iterable[Step]) -> Trace:
        return Trace((*self.steps, *steps))

    def __str__(self) -> str:
        """The Python that repeats the steps on a schedule `s`."""
        return "\n".join(map(str, self.steps))

    def __repr__(self) -> str:
        return f"<Trace of {len(self)} steps>"

    def diff(self, other: Trace, before: str = "before", after: str = "after") -> str:
        """The unified diff from the printed steps to those of `other`; empty if they are equal."""
        return "\n".join(difflib.unified_diff(str(self).splitlines(), str(other).splitlines(), before, after, lineterm=""))

    def to_json(self, kernel: str | None = None) -> str:
        """JSON, one step a line; the same bytes for equal traces. `kernel` is the printed kernel that the steps start from, if wanted."""
        head = "" if kernel is None else f'"kernel": {json.dumps(kernel)}, '
        steps = ",\n  ".join(step.to_json() for step in self.steps)
        return f'{{"version": {VERSION}, {head}"steps": [' + (f"\n  {steps}\n" if steps else "") + "]}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """The trace in a text that `to_json` wrote. Raises `ScheduleError` naming the step that is malformed."""
        return read_json(text)[0]


def read_json(text: str | bytes) -> tuple[Trace, str | None]:
    """The trace in a text that `to_json` wrote, and the kernel it starts from, if it says so. Raises `ScheduleError`."""
    if len(text) > JSON_LIMIT:
        raise ScheduleError(f"a trace of {len(text)} bytes is not read", why=f"at most {JSON_LIMIT} are")
    try:
        return read_record(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ScheduleError("this is not a trace", why=f"it is not valid JSON: {error}", hint="Trace.to_json writes one") from None


def read_record(record: Any) -> tuple[Trace, str | None]:
    """`read_json` of what `json.loads` made of the text."""
    if not isinstance(record, dict) or not isinstance(record.get("steps"), list):
        raise ScheduleError("this is not a trace", why='not of the form {"version": 1, "steps": [...]}', hint="Trace.to_json writes one")
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise ScheduleError(f"a trace of version {record.get('version')!r:.40} is not read", why=f"this is version {VERSION}")
    if extra := sorted(set(record) - {"version", "steps", "kernel"}):
        raise ScheduleError(f"a trace has no field {extra[0]!r:.40}")
    if not isinstance(kernel := record.get("kernel"), str | None):
        raise ScheduleError("the kernel of a trace is its printed text")
    if len(record["steps"]) > STEP_LIMIT:
        raise ScheduleError(f"a trace of {len(record['steps'])} steps is not read", why=f"at most {STEP_LIMIT} are")
    return Trace(tuple(_step(number, item) for number, item in enumerate(record["steps"], 1))), kernel


def _malformed(where: str, why: str) -> ScheduleError:
    return ScheduleError("a step of the trace is malformed", where=where, why=why)


def _step(number: int, item: Any) -> Step:
    where = f"step {number}: {json.dumps(item)[:120]}"
    match [*item, {}] if isinstance(item, list) and len(item) == 2 else item:
        case [str(primitive), list(arguments), dict(options)]:
            for name in (primitive, *options):  # a trace is also printed as Python
                if not name.isidentifier():
                    raise _malformed(where, f"`{name[:40]}` is not a name of a primitive or an option")
            named = tuple((name, _plain(a, where)) for name, a in options.items())
            return Step(primitive, tuple(_plain(a, where) for a in arguments), named)
    raise _malformed(where, "it is not of the form [primitive, [arguments], {options}]")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    match value:
        case None | bool():
            return value
        case int() if abs(value) < 1 << 63:
            return value
        case str() if len(value) <= TEXT_LIMIT:
            return value
        case list() if depth < DEPTH_LIMIT:
            return tuple(_plain(v, where, depth + 1) for v in value)
    raise _malformed(where, f"{json.dumps(value)[:60]} is none of: text, an integer of 64 bits, true, false, null, a list of these")


def _python(value: Any) -> str:
    """An argument as Python source."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' * (len(value) == 1)})"
    return json.dumps(value) if isinstance(value, str) else repr(value)
