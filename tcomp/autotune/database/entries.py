"""The entries of the tuning database: records of candidates, verdicts of whole models, and sessions of the tuner; and how they are read from
JSON that anyone may have written, in a database or in a file of JSON lines.

Each field is checked by one function, which returns its value or raises `Malformed`. Nothing is executed; a schedule function is only ever
named.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import llvmlite.binding
import numpy as np

import tcomp
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.autotune.tasks import Task, task_from_json
from tcomp.backends import Backend, backend_of
from tcomp.cache import source_version
from tcomp.errors import TcompError
from tcomp.runtime.host import processor_name
from tcomp.schedules.knobs import decode, encode
from tcomp.schedules.trace import read_record
from tcomp.target import Target

LINE_LIMIT = 32 << 20  # characters of a line, or of a text in a row
REASON_LIMIT = 4000  # characters
_LIST_LIMIT, _DEPTH_LIMIT = 4096, 8  # elements of a list, lists inside of each other


@dataclass(frozen=True)
class Record:
    """One candidate. `decisions` are as `knobs.encode` writes them; `trace`, as `Trace.to_json` writes it, are the steps that they make,
    entered for winners only ("" for others), as they follow from the decisions.

    `cost` is its time in seconds, on the scale of the task's first measurement (see `tuner`); None if it failed. `predicted` is what the
    cost model expected, on the same scale. `when` is in seconds since 1970.
    """

    task: Task
    decisions: str
    trace: str
    measurement: Measurement
    cost: float | None
    predicted: float | None
    environment: Mapping[str, str]
    when: float

    @property
    def ok(self) -> bool:
        """Whether it ran and computed the right result."""
        return self.cost is not None

    def to_json(self) -> dict[str, Any]:
        """What `parse_record` reads."""
        m = self.measurement
        return {
            **_entry_json(self), "trace": self.trace and json.loads(self.trace), "status": m.status, "reason": m.reason[:REASON_LIMIT],
            "seconds": m.seconds, "incumbent": m.incumbent, "cost": self.cost, "predicted": self.predicted,
        }  # fmt: skip


class Judgement(StrEnum):
    """What became of a task's winner in a whole model."""

    KEPT = "kept"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class Verdict:
    """What a whole model said of a task's winner; `before` and `after` are the seconds that its kernels take in a run of the untuned and of
    the tuned model."""

    task: Task
    decisions: str
    judgement: Judgement
    before: float
    after: float
    environment: Mapping[str, str]
    when: float

    @property
    def kept(self) -> bool:
        """Whether compilations follow the decisions."""
        return self.judgement is Judgement.KEPT

    def to_json(self) -> dict[str, Any]:
        """What `parse_verdict` reads."""
        return {**_entry_json(self), "kept": int(self.kept), "before": self.before, "after": self.after}


def _entry_json(e: Record | Verdict) -> dict[str, Any]:
    return {"task": e.task.key, "decisions": json.loads(e.decisions), "environment": dict(e.environment), "time": e.when}


class SessionState(StrEnum):
    """How far a call of the tuner got. One that was killed stays "running"."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"


@dataclass
class Session:
    """One call of the tuner. `subject` is a digest of what is tuned, `options` say how (JSON), `spent` is in seconds, `number` is 0 before it
    is entered."""

    subject: str
    options: Mapping[str, Any]
    started: float
    state: SessionState = SessionState.RUNNING
    spent: float = 0.0
    trials: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


def environment(target: Target | Backend) -> dict[str, str]:
    """What a record says of the machine and the software that it was measured with."""
    usable = len(os.sched_getaffinity(0))
    backend = backend_of(target)
    return backend.environment() | {
        "tcomp": tcomp.__version__, "compiler": source_version()[:16], "python": platform.python_version(), "numpy": np.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)), "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(), "cores": f"{usable} of {os.cpu_count()}", "host": str(Target.host()), "target": str(backend.target),
    }  # fmt: skip


# ---------------------------------------------------------------- checks of values

Check = Callable[[Any], Any]


class Malformed(Exception):
    """What was read is not a valid entry; the message says why."""


def expect(condition: bool, otherwise: str) -> None:
    """Raises `Malformed`, which says "otherwise", unless the condition holds."""
    if not condition:
        raise Malformed(otherwise)


def parse_json(text: Any) -> Any:
    """The value of a JSON text of limited length."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(_text(LINE_LIMIT)(text), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not valid JSON: {str(error)[:100]}") from None


def checked(record: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The fields of a JSON object that has exactly these names, checked."""
    expect(isinstance(record, dict), "is not a JSON object")
    expect(record.keys() == checks.keys(), f"has missing or unknown fields: {', '.join(sorted(record.keys() ^ checks.keys()))[:200]}")
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check(record[name])
        except Malformed as error:
            raise Malformed(f"has a wrong field `{name}`: it {error}") from None
    return found


def _is(condition: Callable[[Any], bool], otherwise: str, value_of: Check = lambda value: value) -> Check:
    """The check of what satisfies a condition."""

    def check(value: Any) -> Any:
        expect(condition(value), otherwise)
        return value_of(value)

    return check


def _text(limit: int = 2000, pattern: str = "(?s:.*)") -> Check:
    short = _is(lambda v: isinstance(v, str) and len(v) <= limit, f"is not a text of at most {limit} characters")
    return _is(lambda v: re.fullmatch(pattern, short(v)) is not None, "is not of the required form")


def _integer(limit: int) -> Check:
    return _is(lambda v: type(v) is int and 0 <= v < limit, f"is not an integer from 0 to {limit - 1}")


def _one_of(options: Mapping[Any, Any]) -> Check:
    def check(value: Any) -> Any:
        expect(isinstance(value, int | str) and value in options, f"is {value!r:.80}, which is unknown")
        return options[value]

    return check


def _list(element: Check) -> Check:
    condition, otherwise = lambda v: isinstance(v, list) and len(v) <= _LIST_LIMIT, f"is not a list of at most {_LIST_LIMIT} elements"
    return _is(condition, otherwise, lambda v: tuple(map(element, v)))


def _object(element: Check) -> Check:
    condition, otherwise = lambda v: isinstance(v, dict) and len(v) <= _LIST_LIMIT, f"is not a JSON object of at most {_LIST_LIMIT} names"
    return _is(condition, otherwise, lambda v: {_text()(name): element(x) for name, x in v.items()})


def _readable(kind: str, read: Callable[[Any], Any]) -> Check:
    """The check of what `read` reads."""

    def check(value: Any) -> Any:
        try:
            return read(value)
        except TcompError as error:
            raise Malformed(f"is not a {kind}: {' '.join(str(error).split())[:300]}") from None

    return check


def _option(value: Any, depth: int = 0) -> Any:
    """A value that a decision may have."""
    if isinstance(value, list) and depth < _DEPTH_LIMIT:
        return _list(lambda v: _option(v, depth + 1))(value)
    number = isinstance(value, int | float) and abs(value) < 1 << 62
    expect(value is None or number or isinstance(value, str), f"has {value!r:.40}, which is not a decision")
    return _text()(value) if isinstance(value, str) else value


def _dim(value: Any) -> None:
    expect(isinstance(value, list) and len(value) == 2, "has something other than [name, size]")
    _text(200, r"[^\s\x00-\x1f]+")(value[0])
    _integer(1 << 48)(value[1])


_seconds = _is(lambda v: type(v) in (int, float) and 0 <= v < 1e15, "is not a number of seconds", float)

# ---------------------------------------------------------------- checks of entries

_TASK = {
    "text": _text(LINE_LIMIT), "target": _readable("target", lambda v: Target.parse(_text()(v))), "threads": _integer(1 << 16), "dims": _list(_dim)
}  # fmt: skip
_TASK_KINDS = {  # by the field that tells them apart
    "kind": _one_of({"algorithm": "algorithm"}),
    "space": _text(pattern=r"|[\w.]+:[\w.<>]+"),  # a function that is looked up only to tune the very same function
    "constants": _list(_integer(1 << 16)),
}
_ENTRY = {
    "decisions": lambda v: encode(decode(json.dumps(_object(_option)(v)))), "environment": _object(_text(REASON_LIMIT)), "time": _seconds
}  # fmt: skip
_RECORD = _ENTRY | {
    "trace": _readable("trace", lambda v: "" if v == "" else read_record(v)[0].to_json()), "status": _one_of({o.value: o for o in Outcome}),
    "reason": _text(REASON_LIMIT), "seconds": _list(_seconds), "incumbent": _list(_seconds),
    "cost": lambda v: v if v is None else _seconds(v), "predicted": lambda v: v if v is None else _seconds(v),
}  # fmt: skip
_VERDICT = _ENTRY | {"kept": _one_of({0: Judgement.ROLLED_BACK, 1: Judgement.KEPT}), "before": _seconds, "after": _seconds}
_SESSION = {
    "id": _integer(1 << 63), "subject": _text(), "options": _is(lambda v: isinstance(v, dict), "is not a JSON object"), "spent": _seconds,
    "started": _seconds, "state": _one_of({s.value: s for s in SessionState}), "trials": _integer(1 << 63),
    "summary": _is(lambda v: isinstance(v, dict), "is not a JSON object"),
}  # fmt: skip


def parse_task(record: Any) -> Task:
    """The task in a JSON object, checked against its key. Its text is parsed by whoever runs it, and checked then."""
    expect(isinstance(record, dict) and record.keys() == {"key", "task"}, "has missing or unknown fields")
    task = record["task"]
    kind = next((name for name in _TASK_KINDS if isinstance(task, dict) and name in task), "constants")
    checked(task, _TASK | {kind: _TASK_KINDS[kind]})
    found = task_from_json(task)
    expect(record["key"] == found.key, "has a task that does not have this key: its text was changed")
    return found


def parse_record(record: Any, tasks: Mapping[str, Task]) -> Record:
    """The record in a JSON object about one of these tasks."""
    r = checked(record, _RECORD | {"task": _one_of(tasks)})
    ok = r["status"] is Outcome.OK
    expect(ok == (r["cost"] is not None) == bool(r["seconds"]), f"has the status {r['status']}, {len(r['seconds'])} times and the cost {r['cost']}")
    measurement = Measurement(r["status"], r["seconds"], r["reason"], r["incumbent"])
    return Record(r["task"], r["decisions"], r["trace"], measurement, r["cost"], r["predicted"], r["environment"], r["time"])


def parse_verdict(record: Any, tasks: Mapping[str, Task]) -> Verdict:
    """The verdict in a JSON object about one of these tasks."""
    v = checked(record, _VERDICT | {"task": _one_of(tasks)})
    return Verdict(v["task"], v["decisions"], v["kept"], v["before"], v["after"], v["environment"], v["time"])


def parse_session(row: Any) -> Session:
    """The session in a row of the database."""
    s = checked(row, _SESSION)
    return Session(s["subject"], s["options"], s["started"], s["state"], s["spent"], s["trials"], s["summary"], s["id"])
