"""The entries of the tuning database: records of candidates, verdicts of whole models, and sessions of the tuner; and how they are read
from JSON that anyone may have written, in a database or in a file of JSON lines: each field is checked, nothing is executed."""

from __future__ import annotations

import json
import os
import platform
import re
import reprlib
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

LINE_LIMIT = 4 << 20  # characters of a line, or of a text in a row
_NOISE = 0.02  # of the time of a kernel in the model
REASON_LIMIT = 4000  # characters
_LIST_LIMIT, _DEPTH_LIMIT = 4096, 8  # elements of a list, lists inside of each other


@dataclass(frozen=True)
class Record:
    """One candidate. `decisions` are as `knobs.encode` writes them; `trace`, as `Trace.to_json` writes it, are the steps that they make,
    entered for winners only ("" for others), as they follow from the decisions. `cost` is its time in seconds, on the scale of the task's
    first measurement (see `tuner`), None if it failed; `predicted` is what the cost model expected. `when` is in seconds since 1970."""

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
        """The fields, as `parse` reads them."""
        m = self.measurement
        return {
            **_entry_json(self), "trace": self.trace and json.loads(self.trace), "status": m.status, "reason": m.reason[:REASON_LIMIT],
            "seconds": m.seconds, "incumbent": m.incumbent, "cost": self.cost, "predicted": self.predicted,
        }  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The judgement of a whole model on a task's winner: compilations use it if it was `kept`. `before` and `after` are the seconds that
    its kernels take in a run of the untuned and of the tuned model."""

    task: Task
    decisions: str
    kept: bool
    before: float
    after: float
    environment: Mapping[str, str]
    when: float

    @property
    def judgement(self) -> str:
        """The judgement in words. Decisions that are kept made the model faster together; a single one may be no faster, within noise."""
        if not self.kept:
            return "rolled back"
        ratio = self.after / self.before if self.before else 1.0
        return "kept" if ratio < 1 - _NOISE else "kept, within noise" if ratio < 1 + 2 * _NOISE else "kept, though slower"

    def to_json(self) -> dict[str, Any]:
        """The fields, as `parse` reads them."""
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
    """One call of the tuner. `subject` is a digest of what is tuned, `options` say how (JSON), `spent` is in seconds, `number` is 0 before
    it is entered."""

    subject: str
    options: Mapping[str, Any]
    started: float
    state: SessionState = SessionState.RUNNING
    spent: float = 0.0
    trials: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields, as `parse` reads them."""
        return {**{n: v for n, v in vars(self).items() if n != "number"}, "id": self.number or None}


def environment(target: Target | Backend) -> dict[str, str]:
    """The machine and the software of a measurement, by name, as records store them."""
    usable, backend = len(os.sched_getaffinity(0)), backend_of(target)
    return backend.environment() | {
        "tcomp": tcomp.__version__, "compiler": source_version()[:16], "python": platform.python_version(), "numpy": np.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)), "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(), "cores": f"{usable} of {os.cpu_count()}", "host": str(Target.host()), "target": str(backend.target),
    }  # fmt: skip


class Malformed(Exception):
    """An entry that is not valid; the message says why."""


Check = Callable[[Any], Any]
"""Returns what a JSON value stands for. Raises `Malformed`."""


def check(wanted: str, condition: Check, read: Check = lambda value: value) -> Check:
    """The check of values that satisfy a condition and can be read; else it says that something else was `wanted`."""

    def checked(value: Any) -> Any:
        if not condition(value):
            raise Malformed(f"is {reprlib.repr(value)}, not {wanted}")
        try:
            return read(value)
        except TcompError as error:
            raise Malformed(f"is not {wanted}: {' '.join(str(error).split())[:300]}") from None

    return checked


def parse_json(text: Any) -> Any:
    """The value of a JSON text of limited length."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(_text(LINE_LIMIT)(text), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not valid JSON: {str(error)[:100]}") from None


def _fields(entry: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The values of the fields of an object, which must have exactly the fields of `checks`."""
    if odd := sorted(json_object(entry).keys() ^ checks.keys()):
        raise Malformed(f"has missing or unknown fields: {', '.join(odd)[:200]}")
    found = {}
    for name, checked in checks.items():
        try:
            found[name] = checked(entry[name])
        except Malformed as error:
            raise Malformed(f"has a wrong field `{name}`: it {error}") from None
    return found


def _text(limit: int = 2000, pattern: str = "") -> Check:
    wanted = f"a text of at most {limit} characters" + (f", of the form {pattern}" if pattern else "")
    return check(wanted, lambda v: isinstance(v, str) and len(v) <= limit and (not pattern or re.fullmatch(pattern, v)))


def _integer(limit: int) -> Check:
    return check(f"an integer from 0 to {limit - 1}", lambda v: type(v) is int and 0 <= v < limit)


def _one_of(options: Mapping[str, Any]) -> Check:
    return check("one that is known", lambda v: isinstance(v, str) and v in options, options.__getitem__)


def _list(element: Check) -> Check:
    wanted = f"a list of at most {_LIST_LIMIT} elements"
    return check(wanted, lambda v: isinstance(v, list) and len(v) <= _LIST_LIMIT, lambda v: tuple(map(element, v)))


def _mapping(element: Check) -> Check:
    wanted, name = f"a JSON object of at most {_LIST_LIMIT} names", _text()
    return check(wanted, lambda v: isinstance(v, dict) and len(v) <= _LIST_LIMIT, lambda v: {name(n): element(x) for n, x in v.items()})


def _option(value: Any, depth: int = 0) -> Any:
    """A value that a decision may have."""
    if isinstance(value, list) and depth < _DEPTH_LIMIT:
        return _list(lambda v: _option(v, depth + 1))(value)
    return _text()(value) if isinstance(value, str) else _plain_option(value)


_plain_option = check("a decision", lambda v: v is None or (isinstance(v, int | float) and abs(v) < 1 << 62))
_seconds = check("a number of seconds", lambda v: type(v) in (int, float) and 0 <= v < 1e15, float)
_seconds_or_none = check("a number of seconds, or null", lambda v: True, lambda v: v if v is None else _seconds(v))
json_object = check("a JSON object", lambda v: isinstance(v, dict))

_DIM = _text(200, r"[^\s\x00-\x1f]+"), _integer(1 << 48)
_TASK = {
    "text": _text(LINE_LIMIT),
    "target": check("a target", lambda v: True, lambda v: Target.parse(_text()(v))),
    "threads": _integer(1 << 16),
    "dims": _list(
        check("[name, size]", lambda v: isinstance(v, list) and len(v) == 2, lambda v: [f(x) for f, x in zip(_DIM, v, strict=True)])
    ),
}
_TASK_KINDS = {  # by the field that identifies the kind
    "kind": _one_of({"algorithm": "algorithm"}),
    "space": _text(pattern=r"|[\w.]+:[\w.<>]+"),  # a function that is looked up only to tune the very same function
    "constants": _list(_integer(1 << 16)),
}
_ENTRY = {
    "decisions": lambda v: encode(decode(json.dumps(_mapping(_option)(v)))), "environment": _mapping(_text(REASON_LIMIT)), "time": _seconds,
}  # fmt: skip
_RECORD = _ENTRY | {
    "trace": check("a trace", lambda v: True, lambda v: "" if v == "" else read_record(v)[0].to_json()), "reason": _text(REASON_LIMIT),
    "status": _one_of({o.value: o for o in Outcome}), "seconds": _list(_seconds), "incumbent": _list(_seconds),
    "cost": _seconds_or_none, "predicted": _seconds_or_none,
}  # fmt: skip
_VERDICT = _ENTRY | {"kept": _integer(2), "before": _seconds, "after": _seconds}
_SESSION = {
    "id": _integer(1 << 63), "subject": _text(), "options": json_object, "spent": _seconds, "started": _seconds,
    "trials": _integer(1 << 63),
    "state": _one_of({s.value: s for s in SessionState}), "summary": json_object,
}  # fmt: skip


def parse(kind: Any, entry: Any, tasks: Mapping[str, Task]) -> Task | Record | Verdict | Session:
    """The entry in a JSON object; `tasks` are those that a record or verdict may be about, by key. A task is checked against its key; its
    text is parsed by whoever runs it, and checked then. Raises `Malformed`."""
    about = {"task": _one_of(tasks)}
    match kind:
        case "task":
            fields = json_object(entry).get("task")
            name = next((name for name in _TASK_KINDS if isinstance(fields, dict) and name in fields), "constants")
            _fields(entry, {"key": _text(), "task": lambda v: _fields(v, _TASK | {name: _TASK_KINDS[name]})})
            task = task_from_json(entry["task"])
            if entry["key"] != task.key:
                raise Malformed("has a task that does not have this key: its text was changed")
            return task
        case "record":
            r = _fields(entry, _RECORD | about)
            ok, count = r["status"] is Outcome.OK, len(r["seconds"])
            if not ok == (r["cost"] is not None) == (count > 0):
                raise Malformed(f"has the status {r['status']}, {count} times and the cost {r['cost']}")
            measurement = Measurement(r["status"], r["seconds"], r["reason"], r["incumbent"])
            return Record(r["task"], r["decisions"], r["trace"], measurement, r["cost"], r["predicted"], r["environment"], r["time"])
        case "verdict":
            v = _fields(entry, _VERDICT | about)
            return Verdict(v["task"], v["decisions"], bool(v["kept"]), v["before"], v["after"], v["environment"], v["time"])
        case "session":
            s = _fields(entry, _SESSION)
            return Session(number=s.pop("id"), **s)
    raise Malformed(f"has the kind {reprlib.repr(kind)}, which is unknown")
