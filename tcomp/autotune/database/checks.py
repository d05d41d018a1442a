"""Checks of entries that anyone may have written, in a database or in a file of JSON lines: each field by one function, which returns its value
or raises `Malformed`. Nothing is executed; a schedule function is only ever named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tcomp.autotune.database.records import Judgement, Record, Session, SessionState, Verdict
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.autotune.tasks import Task, task_from_json
from tcomp.errors import TcompError
from tcomp.schedules.knobs import decode, encode
from tcomp.schedules.trace import read_record
from tcomp.target import Target

LINE_LIMIT = 32 << 20  # characters of a line, or of a text in a row
REASON_LIMIT = 4000  # characters
_LIST_LIMIT, _DEPTH_LIMIT = 4096, 8

Check = Callable[[Any], Any]


class Malformed(Exception):
    """What was read is not a valid entry; the message says why."""


def expect(condition: bool, otherwise: str) -> None:
    """Raises `Malformed`, which says "otherwise", unless the condition holds."""
    if not condition:
        raise Malformed(otherwise)


def parse_json(text: Any) -> Any:
    """The value of a JSON text of limited length."""
    try:
        return json.loads(_text(LINE_LIMIT)(text), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not valid JSON: {str(error)[:100]}") from None


def _no_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


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


# ---------------------------------------------------------------- values


def _text(limit: int = 2000, pattern: str = "") -> Check:
    def check(value: Any) -> Any:
        expect(isinstance(value, str) and len(value) <= limit, f"is not a text of at most {limit} characters")
        expect(not pattern or re.fullmatch(pattern, value) is not None, "is not of the required form")
        return value

    return check


def _integer(limit: int) -> Check:
    def check(value: Any) -> Any:
        expect(type(value) is int and 0 <= value < limit, f"is not an integer from 0 to {limit - 1}")
        return value

    return check


def _seconds(value: Any) -> float:
    expect(type(value) in (int, float) and 0 <= value < 1e15, "is not a number of seconds")
    return float(value)


def _optional_seconds(value: Any) -> float | None:
    return None if value is None else _seconds(value)


def _one_of(options: Mapping[Any, Any]) -> Check:
    def check(value: Any) -> Any:
        expect(isinstance(value, int | str) and value in options, f"is {value!r:.80}, which is unknown")
        return options[value]

    return check


def _list(element: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        expect(isinstance(value, list) and len(value) <= _LIST_LIMIT, f"is not a list of at most {_LIST_LIMIT} elements")
        return tuple(map(element, value))

    return check


def _object(element: Check) -> Check:
    def check(value: Any) -> dict[str, Any]:
        expect(isinstance(value, dict) and len(value) <= _LIST_LIMIT, f"is not a JSON object of at most {_LIST_LIMIT} names")
        return {_text()(name): element(v) for name, v in value.items()}

    return check


def _option(value: Any, depth: int = 0) -> Any:
    """A value that a decision may have."""
    if isinstance(value, list) and depth < _DEPTH_LIMIT:
        return _list(lambda v: _option(v, depth + 1))(value)
    number = isinstance(value, int | float) and abs(value) < 1 << 62
    expect(value is None or number or isinstance(value, str), f"has {value!r:.40}, which is not a decision")
    return _text()(value) if isinstance(value, str) else value


def _decisions(value: Any) -> str:
    """Canonical text."""
    return encode(decode(json.dumps(_object(_option)(value))))


def _trace(value: Any) -> str:
    try:
        return "" if value == "" else read_record(value)[0].to_json()
    except TcompError as error:
        raise Malformed(f"is not a trace: {' '.join(str(error).split())[:300]}") from None


def _target(value: Any) -> None:
    try:
        Target.parse(_text()(value))
    except TcompError as error:
        raise Malformed(f"is not a target: {error.what}") from None


def _dim(value: Any) -> None:
    expect(isinstance(value, list) and len(value) == 2, "has something other than [name, size]")
    _text(200, r"[^\s\x00-\x1f]+")(value[0])
    _integer(1 << 48)(value[1])


# ---------------------------------------------------------------- entries

_TASK = {"text": _text(LINE_LIMIT), "target": _target, "threads": _integer(1 << 16), "dims": _list(_dim)}
_TASK_KINDS = {  # by the field that tells them apart
    "kind": _one_of({"algorithm": "algorithm"}),
    "space": _text(pattern=r"|[\w.]+:[\w.<>]+"),  # a function that is looked up only to tune the very same function
    "constants": _list(_integer(1 << 16)),
}
_ENTRY = {"decisions": _decisions, "environment": _object(_text(REASON_LIMIT)), "time": _seconds}
_RECORD = _ENTRY | {
    "trace": _trace, "status": _one_of({o.value: o for o in Outcome}), "reason": _text(REASON_LIMIT), "seconds": _list(_seconds),
    "incumbent": _list(_seconds), "cost": _optional_seconds, "predicted": _optional_seconds,
}  # fmt: skip
_VERDICT = _ENTRY | {"kept": _one_of({0: Judgement.ROLLED_BACK, 1: Judgement.KEPT}), "before": _seconds, "after": _seconds}
_SESSION = {"spent": _seconds, "started": _seconds, "state": _one_of({s.value: s for s in SessionState})}


def parse_task(key: Any, record: Any) -> Task:
    """The task in a JSON object, checked against its key. Its text is parsed by whoever runs it, and checked then."""
    kind = next((name for name in _TASK_KINDS if isinstance(record, dict) and name in record), "constants")
    checked(record, _TASK | {kind: _TASK_KINDS[kind]})
    task = task_from_json(record)
    expect(key == task.key, "has a task that does not have this key: its text was changed")
    return task


def parse_record(record: Mapping[str, Any], tasks: Mapping[str, Task]) -> Record:
    """The record in a row or line about one of these tasks."""
    r = checked(record, _RECORD | {"task": _one_of(tasks)})
    ok = r["status"] is Outcome.OK
    expect(ok == (r["cost"] is not None) == bool(r["seconds"]), f"has the status {r['status']}, {len(r['seconds'])} times and the cost {r['cost']}")
    measurement = Measurement(r["status"], r["seconds"], r["reason"], r["incumbent"])
    return Record(r["task"], r["decisions"], r["trace"], measurement, r["cost"], r["predicted"], r["environment"], r["time"])


def parse_verdict(record: Mapping[str, Any], tasks: Mapping[str, Task]) -> Verdict:
    """The verdict in a row or line about one of these tasks."""
    v = checked(record, _VERDICT | {"task": _one_of(tasks)})
    return Verdict(v["task"], v["decisions"], v["kept"], v["before"], v["after"], v["environment"], v["time"])


def parse_session(row: Mapping[str, Any]) -> Session:
    """The session in a row."""
    s = checked({name: row[name] for name in _SESSION}, _SESSION)
    options, summary = parse_json(row["options"]), parse_json(row["summary"])
    expect(isinstance(options, dict) and isinstance(summary, dict), "is not of the form that the tuner writes")
    return Session(row["subject"], options, s["started"], s["state"], s["spent"], row["trials"], summary, row["id"])
