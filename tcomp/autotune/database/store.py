"""The database of tuning: what was measured, for which task, on which machine, and what became of it in whole models. One SQLite file.

    tasks         what was tuned (`Workload`, `Program`), by key
    records       every candidate that was measured or failed: decisions, steps, times, reason, machine
    verdicts      what whole models said of a task's winner: kept, or rolled back to the default schedule
    sessions      what is being tuned with which options, and how much of the budget is spent: what `resume` continues

Any number of processes may use it at once (write-ahead log, one transaction an entry): a process that is killed loses what it has not
entered yet, and nothing else. The file may come from anyone. All that is read from it is checked as text from the network would be:
a row that is no entry of ours raises `DatabaseError` naming it. Nothing in it is executed; a schedule function is only ever named.

Export, import and merge speak JSON lines: one entry a line, a task before the entries that are about it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import llvmlite.binding
import numpy as np

import tcomp
from tcomp.autotune.measurement.measurer import STATUSES, Measurement
from tcomp.autotune.tasks import Task, task_from_json
from tcomp.cache import source_version
from tcomp.codegen.cuda import nvrtc
from tcomp.errors import DatabaseError, TcompError
from tcomp.machine import processor
from tcomp.runtime.cuda import gpu_name
from tcomp.schedules.knobs import decode, encode
from tcomp.schedules.trace import read_record
from tcomp.target import Target

APPLICATION = 0x74636D70  # "tcmp": marks a file as ours
FORMAT = 1  # of exported lines
LINE_LIMIT = 32 << 20  # characters of a line, or of a text in a row
_WAIT = 60.0  # seconds for another process to end its transaction
_LIST_LIMIT, _NAME_LIMIT, _TEXT_LIMIT, _DEPTH_LIMIT = 4096, 2000, 4000, 8
_SPACE = re.compile(r"|[\w.]+:[\w.<>]+")  # as `Program.space`; a name in it is looked up only to tune that very function
_DIM = re.compile(r"[^\s\x00-\x1f]{1,200}")

E = TypeVar("E")

_STEPS = (
    """
    CREATE TABLE tasks (key TEXT PRIMARY KEY, structure TEXT NOT NULL, task TEXT NOT NULL) STRICT;
    CREATE INDEX tasks_by_structure ON tasks (structure);
    CREATE TABLE records (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL REFERENCES tasks (key), decisions TEXT NOT NULL, trace TEXT NOT NULL,
        status TEXT NOT NULL, reason TEXT NOT NULL, seconds TEXT NOT NULL, incumbent TEXT NOT NULL, cost REAL, predicted REAL,
        environment TEXT NOT NULL, time REAL NOT NULL, UNIQUE (task, decisions, time)
    ) STRICT;
    CREATE TABLE verdicts (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL REFERENCES tasks (key), decisions TEXT NOT NULL, kept INTEGER NOT NULL,
        before REAL NOT NULL, after REAL NOT NULL, environment TEXT NOT NULL, time REAL NOT NULL, UNIQUE (task, decisions, time)
    ) STRICT;
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY, subject TEXT NOT NULL, options TEXT NOT NULL, state TEXT NOT NULL, spent REAL NOT NULL,
        trials INTEGER NOT NULL, summary TEXT NOT NULL, started REAL NOT NULL
    ) STRICT;
    """,
)  # what makes version n + 1 of version n; append, never change
VERSION = len(_STEPS)


@dataclass(frozen=True)
class Record:
    """One candidate. `decisions` are as `space.encode` writes them, `trace` as `Trace.to_json`: the steps that they
    make, entered for winners only ("" for others), as they follow from the decisions.

    `cost` is its time in seconds, on the scale of the task's first measurement (see `tuner.Tuning.cost`); None where it did not run
    rightly. `predicted` is what the model expected, on the same scale. `when` is in seconds since 1970.
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
        return self.cost is not None


@dataclass(frozen=True)
class Verdict:
    """What became of a task's winner in a whole model: `kept`, or rolled back; `before` and `after` are the seconds that its kernels take
    in a run of the untuned and of the tuned model."""

    task: Task
    decisions: str
    kept: bool
    before: float
    after: float
    environment: Mapping[str, str]
    when: float


@dataclass
class Session:
    """One call of the tuner. `subject` tells what is tuned, `options` how (JSON); `state` is "running", "interrupted" or "finished"."""

    subject: str
    options: Mapping[str, Any]
    started: float
    state: str = "running"
    spent: float = 0.0
    trials: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


STATES = ("running", "interrupted", "finished")


class Database:
    """The file at `path`, made if there is none, unless `create` is False. A context manager; one thread's at a time.

    Raises `DatabaseError` where it cannot be opened, is no such file, is damaged, or is of a later version.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(path)
        if not self.path.is_file() and (not create or self.path.exists()):
            raise DatabaseError(f"there is no database {self.path}", hint="`tcomp tune` makes one" if not create else "name a file")
        with self._named():
            self._sql = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)
            self._sql.row_factory = sqlite3.Row
            for setting in ("trusted_schema = OFF", "cell_size_check = ON", "foreign_keys = ON"):
                self._sql.execute(f"PRAGMA {setting}")
            self._open()

    def _open(self) -> None:
        def pragma(name: str) -> int:
            return int(self._sql.execute(f"PRAGMA {name}").fetchone()[0])

        def version() -> int:
            ours = pragma("application_id") == APPLICATION
            if not ours and self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise DatabaseError(f"{self.path} is no database of tcomp", why="it is a database of something else")
            found = pragma("user_version") if ours else 0
            if not 0 <= found <= VERSION:
                raise DatabaseError(
                    f"{self.path} has version {found}", why=f"this is version {VERSION} of tcomp's databases", hint="update tcomp"
                )
            return found

        if version() < VERSION:
            self._sql.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                for step in range(version(), VERSION):  # asked again: another process may have been quicker
                    for statement in filter(str.strip, _STEPS[step].split(";")):
                        self._sql.execute(statement)
                self._sql.execute(f"PRAGMA application_id = {APPLICATION}")
                self._sql.execute(f"PRAGMA user_version = {VERSION}")
        self._sql.execute("PRAGMA synchronous = NORMAL")  # what is entered survives this process, whatever ends it

    def close(self) -> None:
        self._sql.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DatabaseError(f"the database {self.path} cannot be used", why=str(error), hint=_hint(error)) from error
        except (UnicodeDecodeError, OverflowError) as error:
            raise DatabaseError(f"the database {self.path} is damaged", why=str(error)[:200]) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    # ------------------------------------------------------------ writing

    def add(self, entry: Record | Verdict, session: Session | None = None) -> None:
        """Enter a record or a verdict, and what the session has spent by now, in one transaction."""
        with self._named(), self._transaction():
            self._enter(entry)
            if session is not None:
                self._write(session)

    def describe(self, record: Record, trace: str) -> None:
        """Enter the steps that a record's decisions make."""
        with self._named(), self._transaction():
            key = (trace, record.task.key, record.decisions, record.when)
            self._sql.execute("UPDATE records SET trace = ? WHERE task = ? AND decisions = ? AND time = ?", key)

    def begin(self, session: Session) -> None:
        """Enter a session; it is known by its number then."""
        with self._named(), self._transaction():
            columns = (
                session.subject,
                json.dumps(dict(session.options)),
                session.state,
                session.spent,
                session.trials,
                "{}",
                session.started,
            )
            made = self._sql.execute("INSERT INTO sessions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", columns)
            session.number = int(made.lastrowid or 0)

    def update(self, session: Session) -> None:
        """Enter what a session has spent and how it stands."""
        with self._named(), self._transaction():
            self._write(session)

    def _write(self, session: Session) -> None:
        values = (
            json.dumps(dict(session.options)),
            session.state,
            session.spent,
            session.trials,
            json.dumps(dict(session.summary)),
            session.number,
        )
        self._sql.execute("UPDATE sessions SET options = ?, state = ?, spent = ?, trials = ?, summary = ? WHERE id = ?", values)

    def _enter(self, entry: Task | Record | Verdict) -> int:
        """The number of entries that are new by it."""
        if isinstance(entry, Task):
            columns = (entry.key, entry.structure, json.dumps(entry.to_json()))
            return self._sql.execute("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", columns).rowcount
        self._enter(entry.task)
        row = _columns(entry)
        marks, names = ", ".join("?" * len(row)), ", ".join(row)
        table = "records" if isinstance(entry, Record) else "verdicts"
        return self._sql.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(row.values())).rowcount

    # ------------------------------------------------------------ reading

    def tasks(self) -> list[Task]:
        """All, in the order in which they came."""
        return list(self._tasks("ORDER BY rowid"))

    def records(self, key: str | None = None) -> list[Record]:
        """Those of one task, or all, in the order in which they came."""
        return self._entries("records", _record, key)

    def verdicts(self, key: str | None = None) -> list[Verdict]:
        """Those of one task, or all, in the order in which they came."""
        return self._entries("verdicts", _verdict, key)

    def best(self, key: str) -> Record | None:
        """The record of the least cost whose decisions were not rolled back."""
        return next(iter(self.ranked(key)), None)

    def ranked(self, key: str) -> list[Record]:
        """The records whose decisions were not rolled back, each once, the least cost first."""
        lost = {v.decisions for v in self.verdicts(key) if not v.kept}
        found = sorted((r for r in self.records(key) if r.cost is not None and r.decisions not in lost), key=lambda r: r.cost or 0.0)
        once: dict[str, Record] = {}
        for r in found:
            once.setdefault(r.decisions, r)
        return [*once.values()]

    def choice(self, key: str) -> str | None:
        """The decisions that compilations follow: what a whole model said last, else those of the best record; None without either."""
        if found := self.verdicts(key):
            return found[-1].decisions if found[-1].kept else encode({})
        best = self.best(key)
        return None if best is None else best.decisions

    def near(self, structure: str) -> list[Task]:
        """The tasks of one structure: they differ in sizes and numbers of threads only."""
        return list(self._tasks("WHERE structure = ? ORDER BY rowid", structure))

    def sessions(self) -> list[Session]:
        """All, in the order in which they came."""
        with self._named():
            rows = self._sql.execute("SELECT * FROM sessions ORDER BY id").fetchall()
        return [self._checked("session", row["id"], _session, row) for row in rows]

    def _tasks(self, condition: str, *values: str) -> Iterator[Task]:
        with self._named():
            rows = self._sql.execute(f"SELECT * FROM tasks {condition}", values).fetchall()
        for row in rows:
            yield self._checked("task", row["key"], lambda r: _task(r["key"], _json(r["task"], "the task")), row)

    def _entries(self, table: str, make: Callable[[Mapping[str, Any], Mapping[str, Task]], E], key: str | None) -> list[E]:
        tasks = {t.key: t for t in self._tasks("" if key is None else "WHERE key = ?", *([] if key is None else [key]))}
        with self._named():
            condition, values = ("", ()) if key is None else ("WHERE task = ?", (key,))
            rows = self._sql.execute(f"SELECT * FROM {table} {condition} ORDER BY id", values).fetchall()
        return [self._checked(table[:-1], row["id"], lambda r: make(_fields(r), tasks), row) for row in rows]

    def _checked(self, kind: str, name: object, make: Callable[[sqlite3.Row], E], row: sqlite3.Row) -> E:
        try:
            return make(row)
        except _Malformed as error:
            raise DatabaseError(f"the database {self.path} is damaged", where=f"{kind} {name}", why=str(error)) from None

    # ------------------------------------------------------------ JSON lines

    def lines(self) -> Iterator[str]:
        """The entries as JSON lines; sessions stay here."""
        yield json.dumps({"tcomp": "tuning", "format": FORMAT})
        for task in self.tasks():
            yield json.dumps({"kind": "task", "key": task.key, "task": task.to_json()})
        entries: list[Record | Verdict] = [*self.records(), *self.verdicts()]
        for entry in entries:
            parsed = {n: json.loads(v) if n in _JSON and v else v for n, v in _columns(entry).items()}
            yield json.dumps({"kind": "record" if isinstance(entry, Record) else "verdict", **parsed})

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write the entries to a file, completely or not at all; their number. Raises `DatabaseError`."""
        place, count = Path(path), -1
        beside = place.with_name(f".{os.getpid()}.{place.name}")
        try:
            with open(beside, "w", encoding="utf-8") as file:
                for line in self.lines():
                    file.write(line + "\n")
                    count += 1
            os.replace(beside, place)
        except OSError as error:
            raise DatabaseError(f"cannot write {place}", why=error.strerror or str(error)) from error
        finally:
            beside.unlink(missing_ok=True)
        return count

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Enter what a file of JSON lines holds, all of it or, where a line is damaged, nothing; the number of entries that are new.

        Raises `DatabaseError` naming file and line.
        """
        try:
            with open(path, "rb") as file:
                return self._take(str(path), (line.decode(errors="replace") for line in iter(lambda: file.readline(LINE_LIMIT + 1), b"")))
        except OSError as error:
            raise DatabaseError(f"cannot read {path}", why=error.strerror or str(error)) from error

    def merge(self, other: Database) -> int:
        """Enter what another database holds; the number of entries that are new."""
        return self._take(str(other.path), other.lines())

    def _take(self, name: str, lines: Iterator[str]) -> int:
        tasks: dict[str, Task] = {}
        new = number = 0
        with self._named(), self._transaction():
            for number, line in enumerate(lines, 1):
                try:
                    entry = _entry(line, number, tasks)
                except _Malformed as error:
                    raise DatabaseError(f"{name} is no export of a tuning database", where=f"{name}:{number}", why=str(error)) from None
                if isinstance(entry, Task):
                    tasks[entry.key] = entry
                if entry is not None:
                    new += self._enter(entry)
            if number == 0:
                raise DatabaseError(f"{name} is no export of a tuning database", why="it is empty")
        return new


def _hint(error: sqlite3.Error) -> str:
    said = str(error)
    if "locked" in said:
        return "another process holds it"
    return "" if any(word in said for word in ("readonly", "unable to open", "full")) else "`tcomp db import` makes a new one of an export"


def environment(target: Target) -> dict[str, str]:
    """What a record says of the machine and the software that it was measured with."""
    usable = len(os.sched_getaffinity(0))
    gpu = {"gpu": gpu_name(), "nvrtc": nvrtc.version()} if target.kind == "cuda" else {}
    return gpu | {
        "tcomp": tcomp.__version__, "compiler": source_version()[:16], "python": platform.python_version(), "numpy": np.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)), "system": f"{platform.system()} {platform.release()}",
        "processor": processor(), "cores": f"{usable} of {os.cpu_count()}", "host": str(Target.host()), "target": str(target),
    }  # fmt: skip


# ---------------------------------------------------------------- rows


_JSON = ("decisions", "trace", "seconds", "incumbent", "environment")  # columns that hold JSON


def _columns(entry: Record | Verdict) -> dict[str, Any]:
    """The row of an entry."""
    common = {"task": entry.task.key, "decisions": entry.decisions, "environment": json.dumps(dict(entry.environment)), "time": entry.when}
    if isinstance(entry, Verdict):
        return {**common, "kept": int(entry.kept), "before": entry.before, "after": entry.after}
    m = entry.measurement
    return {
        **common, "trace": entry.trace, "status": m.status, "reason": m.reason[:_TEXT_LIMIT], "seconds": json.dumps(m.seconds),
        "incumbent": json.dumps(m.incumbent), "cost": entry.cost, "predicted": entry.predicted,
    }  # fmt: skip


def _fields(row: sqlite3.Row) -> dict[str, Any]:
    """A row as an exported line has it."""
    names = [n for n in row.keys() if n != "id"]  # noqa: SIM118  a row iterates over its values
    return {n: _json(row[n], f"`{n}`") if n in _JSON and row[n] != "" else row[n] for n in names}


# ---------------------------------------------------------------- what is believed


class _Malformed(Exception):
    """An entry is none; says why."""


def _entry(line: str, number: int, tasks: Mapping[str, Task]) -> Task | Record | Verdict | None:
    """The entry in a line; None for the first one, which says what the file is."""
    if len(line) > LINE_LIMIT:
        raise _Malformed(f"it has more than {LINE_LIMIT} characters")
    record = _json(line, "the line")
    if not isinstance(record, dict):
        raise _Malformed("it is no JSON object")
    if number == 1:
        if record.get("tcomp") != "tuning":
            raise _Malformed('the first line is not {"tcomp": "tuning", ...}')
        if record.get("format") != FORMAT:
            raise _Malformed(f"format {record.get('format')!r:.20} is not read; this is format {FORMAT}")
        return None
    kind = record.pop("kind", None)
    if kind == "task":
        _only(record, {"key", "task"})
        return _task(record["key"], record["task"])
    if kind == "record":
        return _record(record, tasks)
    if kind == "verdict":
        return _verdict(record, tasks)
    raise _Malformed(f"there are no entries of the kind {kind!r:.40}")


def _record(r: Mapping[str, Any], tasks: Mapping[str, Task]) -> Record:
    names = {"task", "decisions", "trace", "status", "reason", "seconds", "incumbent", "cost", "predicted", "environment", "time"}
    _only(r, names)
    status = _text(r["status"], "`status`")
    if status not in STATUSES:
        raise _Malformed(f"`status` is {status!r:.40}, not one of {', '.join(STATUSES)}")
    measured = Measurement(
        status, _times(r["seconds"], "`seconds`"), _text(r["reason"], "`reason`", _TEXT_LIMIT), _times(r["incumbent"], "`incumbent`")
    )
    cost = None if r["cost"] is None else _number(r["cost"], "`cost`")
    if (status == "ok") != (cost is not None) or (status == "ok") != bool(measured.seconds):
        raise _Malformed(f"a record of the status {status!r} with {len(measured.seconds)} times and the cost {cost}")
    predicted = None if r["predicted"] is None else _number(r["predicted"], "`predicted`")
    return Record(_known(r, tasks), _decisions(r["decisions"]), _trace(r["trace"]), measured, cost, predicted, *_where_and_when(r))


def _verdict(r: Mapping[str, Any], tasks: Mapping[str, Task]) -> Verdict:
    _only(r, {"task", "decisions", "kept", "before", "after", "environment", "time"})
    if r["kept"] not in (0, 1):
        raise _Malformed("`kept` is neither 0 nor 1")
    before, after = (_number(r[n], f"`{n}`") for n in ("before", "after"))
    return Verdict(_known(r, tasks), _decisions(r["decisions"]), bool(r["kept"]), before, after, *_where_and_when(r))


def _session(row: sqlite3.Row) -> Session:
    options, summary = (_json(row[n], f"`{n}`") for n in ("options", "summary"))
    if not isinstance(options, dict) or not isinstance(summary, dict) or row["state"] not in STATES:
        raise _Malformed("it is not of the form that the tuner writes")
    spent, started = _number(row["spent"], "`spent`"), _number(row["started"], "`started`")
    return Session(row["subject"], options, started, row["state"], spent, row["trials"], summary, row["id"])


def _task(key: Any, record: Any) -> Task:
    """The task in JSON, checked against its key. Its text is parsed by whoever runs it, and checked then."""
    if not isinstance(record, dict):
        raise _Malformed("the task is no JSON object")
    _only(record, {"text", "target", "threads", "dims", next((name for name in ("kind", "space") if name in record), "constants")})
    if record.get("kind", "algorithm") != "algorithm":
        raise _Malformed(f"there are no tasks of the kind {record['kind']!r:.40}")
    _text(record["text"], "the program", LINE_LIMIT)
    _whole(record["threads"], "`threads`", 1 << 16)
    try:
        Target.parse(_text(record["target"], "the target"))
    except TcompError as error:
        raise _Malformed(error.what) from None
    for dim in _list(record["dims"], "`dims`"):
        name, size = _list(dim, "a dim", 2, 2)
        if not isinstance(name, str) or not _DIM.fullmatch(name):
            raise _Malformed("a dim has no name")
        _whole(size, f"the size {name}", 1 << 48)
    for n in _list(record.get("constants", []), "`constants`"):
        _whole(n, "the number of a constant", 1 << 16)
    if not _SPACE.fullmatch(_text(record.get("space", ""), "the space")):
        raise _Malformed("the space is not of the form module:name")
    task = task_from_json(record)
    if key != task.key:
        raise _Malformed("the task does not have this key: its text was changed")
    return task


def _known(r: Mapping[str, Any], tasks: Mapping[str, Task]) -> Task:
    if not isinstance(r["task"], str) or r["task"] not in tasks:
        raise _Malformed(f"there is no task {r['task']!r:.40} before it")
    return tasks[r["task"]]


def _decisions(value: Any) -> str:
    """Canonical text."""
    if not isinstance(value, dict) or len(value) > _LIST_LIMIT:
        raise _Malformed(f"the decisions are no JSON object of at most {_LIST_LIMIT} names")
    for name, option in value.items():
        _text(name, "the name of a decision")
        _option(option, 0)
    return encode(decode(json.dumps(value)))


def _option(value: Any, depth: int) -> None:
    if isinstance(value, list) and depth < _DEPTH_LIMIT:
        for v in _list(value, "a decision"):
            _option(v, depth + 1)
    elif isinstance(value, str):
        _text(value, "a decision")
    elif not (value is None or isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 1 << 62)):
        raise _Malformed(f"{value!r:.40} decides nothing")


def _trace(value: Any) -> str:
    if value == "":
        return ""
    try:
        return read_record(value)[0].to_json()
    except TcompError as error:
        raise _Malformed(" ".join(str(error).split())[:300]) from None


def _where_and_when(r: Mapping[str, Any]) -> tuple[dict[str, str], float]:
    found = r["environment"]
    if not isinstance(found, dict) or len(found) > 100:
        raise _Malformed("`environment` is no JSON object of at most 100 names")
    return {_text(n, "the environment"): _text(v, "the environment", _TEXT_LIMIT) for n, v in found.items()}, _number(r["time"], "`time`")


def _json(text: Any, what: str) -> Any:
    if not isinstance(text, str) or len(text) > LINE_LIMIT:
        raise _Malformed(f"{what} is no text of at most {LINE_LIMIT} characters")
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"{what} is no valid JSON: {str(error)[:100]}") from None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _only(record: Mapping[str, Any], names: set[str]) -> None:
    if record.keys() != names:
        odd = ", ".join(sorted(record.keys() ^ names))
        raise _Malformed(f"missing, or not known: {odd[:200]}")


def _text(value: Any, what: str, limit: int = _NAME_LIMIT) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise _Malformed(f"{what} is no text of at most {limit} characters")
    return value


def _whole(value: Any, what: str, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise _Malformed(f"{what} is no number from 0 to {limit - 1}")
    return value


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise _Malformed(f"{what} is no number of seconds")
    return float(value)


def _list(value: Any, what: str, least: int = 0, most: int = _LIST_LIMIT) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise _Malformed(f"{what} is no list of at most {most} elements")
    return value


def _times(value: Any, what: str) -> tuple[float, ...]:
    return tuple(_number(v, what) for v in _list(value, what))
