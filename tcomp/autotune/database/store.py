"""The database of tuning: what was measured, for which task, on which machine, and what became of it in whole models. One SQLite file.

    tasks         what was tuned (`Workload`, `Program`, `Algorithm`), by key
    records       every candidate that was measured or failed: decisions, steps, times, reason, machine
    verdicts      what whole models said of a task's winner: kept, or rolled back to the default schedule
    sessions      what is being tuned with which options, and how much of the budget is spent: what `resume` continues

Any number of processes may use it at once (write-ahead log, one transaction an entry): a process that is killed loses only what it has not
entered yet. The file may come from anyone: all that is read from it is checked (see `checks`), and a row that is not a valid entry raises a
`DatabaseError` that names it.

Export, import and merge use JSON lines: one entry a line, a task before the entries that are about it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from tcomp.autotune.database import checks
from tcomp.autotune.database.checks import Malformed, expect, parse_json, parse_record, parse_session, parse_task, parse_verdict
from tcomp.autotune.database.records import Record, Session, Verdict
from tcomp.autotune.tasks import Task
from tcomp.errors import DatabaseError
from tcomp.schedules.knobs import encode

APPLICATION = 0x74636D70  # "tcmp": marks a file as a database of tcomp
FORMAT = 1  # of exported lines
_WAIT = 60.0  # seconds for another process to end its transaction
_JSON = ("decisions", "trace", "seconds", "incumbent", "environment")  # columns that hold JSON

E = TypeVar("E")

_MIGRATIONS = (
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
)  # from each version to the next; append, never change
VERSION = len(_MIGRATIONS)


class Database:
    """The file at `path`, made if there is none, unless `create` is False. A context manager, for one thread at a time.

    Raises `DatabaseError` if the file cannot be opened, is not such a database, is damaged, or is of a later version.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(path)
        if not self.path.is_file() and (not create or self.path.exists()):
            raise DatabaseError(f"there is no database {self.path}", hint="`tcomp tune` makes one" if not create else "name a file")
        with self._errors_named():
            self._sql = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)
            self._sql.row_factory = sqlite3.Row
            for setting in ("trusted_schema = OFF", "cell_size_check = ON", "foreign_keys = ON"):
                self._sql.execute(f"PRAGMA {setting}")
            self._migrate()

    def _migrate(self) -> None:
        def value(query: str) -> int:
            return int(self._sql.execute(query).fetchone()[0])

        def version() -> int:
            ours = value("PRAGMA application_id") == APPLICATION
            if not ours and value("SELECT count(*) FROM sqlite_master"):
                raise DatabaseError(f"{self.path} is no database of tcomp", why="it is a database of another program")
            found = value("PRAGMA user_version") if ours else 0
            if not 0 <= found <= VERSION:
                why = f"this is version {VERSION} of tcomp's databases"
                raise DatabaseError(f"{self.path} has version {found}", why=why, hint="update tcomp")
            return found

        if version() < VERSION:
            self._sql.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                for migration in _MIGRATIONS[version() :]:  # asked again: another process may have been quicker
                    for statement in filter(str.strip, migration.split(";")):
                        self._sql.execute(statement)
                self._sql.execute(f"PRAGMA application_id = {APPLICATION}")
                self._sql.execute(f"PRAGMA user_version = {VERSION}")
        self._sql.execute("PRAGMA synchronous = NORMAL")  # entries survive the end of this process, whatever ends it

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DatabaseError(f"the database {self.path} cannot be used", why=str(error), hint=_hint(error)) from error
        except (UnicodeDecodeError, OverflowError) as error:
            raise DatabaseError(f"the database {self.path} is damaged", why=str(error)[:200]) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors_named():
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
        with self._transaction():
            self._enter(entry)
            if session is not None:
                self._write(session)

    def set_trace(self, record: Record, trace: str) -> None:
        """Enter the steps that a record's decisions make."""
        with self._transaction():
            key = (trace, record.task.key, record.decisions, record.when)
            self._sql.execute("UPDATE records SET trace = ? WHERE task = ? AND decisions = ? AND time = ?", key)

    def begin(self, session: Session) -> None:
        """Enter a session, and give it its number."""
        with self._transaction():
            made = self._insert("sessions", {"subject": session.subject, "started": session.started, **_progress(session)})
            session.number = int(made.lastrowid or 0)

    def update(self, session: Session) -> None:
        """Enter what a session has spent and its state."""
        with self._transaction():
            self._write(session)

    def _write(self, session: Session) -> None:
        columns = _progress(session)
        self._sql.execute(f"UPDATE sessions SET {', '.join(f'{n} = ?' for n in columns)} WHERE id = ?", (*columns.values(), session.number))

    def _enter(self, entry: Task | Record | Verdict) -> int:
        """The number of entries that are new by it."""
        if isinstance(entry, Task):
            row = {"key": entry.key, "structure": entry.structure, "task": json.dumps(entry.to_json())}
            return self._insert("tasks", row).rowcount
        self._enter(entry.task)
        row = {n: json.dumps(v) if n in _JSON and not isinstance(v, str) else v for n, v in _columns(entry).items()}
        return self._insert("records" if isinstance(entry, Record) else "verdicts", row).rowcount

    def _insert(self, table: str, row: Mapping[str, Any]) -> sqlite3.Cursor:
        marks = ", ".join("?" * len(row))
        return self._sql.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    # ------------------------------------------------------------ reading

    def tasks(self) -> list[Task]:
        """All tasks, in the order in which they came."""
        return self._rows("task", "tasks ORDER BY rowid", _task_of_row)

    def records(self, key: str | None = None) -> list[Record]:
        """The records of one task, or all, in the order in which they came."""
        return self._entries("record", parse_record, key)

    def verdicts(self, key: str | None = None) -> list[Verdict]:
        """The verdicts on one task, or all, in the order in which they came."""
        return self._entries("verdict", parse_verdict, key)

    def best(self, key: str) -> Record | None:
        """The record of the least cost whose decisions were not rolled back."""
        return next(iter(self.ranked(key)), None)

    def ranked(self, key: str) -> list[Record]:
        """The records whose decisions were not rolled back, each once, the least cost first."""
        lost = {v.decisions for v in self.verdicts(key) if not v.kept}
        found: dict[str, Record] = {}
        for r in sorted((r for r in self.records(key) if r.ok and r.decisions not in lost), key=lambda r: r.cost or 0.0):
            found.setdefault(r.decisions, r)
        return [*found.values()]

    def choice(self, key: str) -> str | None:
        """The decisions that compilations follow: what a whole model said last, else those of the best record; None without either."""
        if found := self.verdicts(key):
            return found[-1].decisions if found[-1].kept else encode({})
        best = self.best(key)
        return None if best is None else best.decisions

    def similar(self, structure: str) -> list[Task]:
        """The tasks of one structure: they differ in sizes and numbers of threads only."""
        return self._rows("task", "tasks WHERE structure = ? ORDER BY rowid", _task_of_row, structure)

    def sessions(self) -> list[Session]:
        """All sessions, in the order in which they came."""
        return self._rows("session", "sessions ORDER BY id", parse_session)

    def _entries(self, kind: str, parse: Callable[[Mapping[str, Any], Mapping[str, Task]], E], key: str | None) -> list[E]:
        values = () if key is None else (key,)
        tasks = {t.key: t for t in self._rows("task", "tasks WHERE key = ?" if values else "tasks", _task_of_row, *values)}

        def entry(row: Mapping[str, Any]) -> E:
            return parse({n: parse_json(v) if n in _JSON and v != "" else v for n, v in row.items() if n != "id"}, tasks)

        return self._rows(kind, f"{kind}s {'WHERE task = ?' if values else ''} ORDER BY id", entry, *values)

    def _rows(self, kind: str, source: str, parse: Callable[[Mapping[str, Any]], E], *values: str) -> list[E]:
        """The rows of a table, in the given order. Raises `DatabaseError` naming one that is malformed."""
        with self._errors_named():
            rows = [dict(row) for row in self._sql.execute(f"SELECT * FROM {source}", values)]
        found = []
        for row in rows:
            try:
                found.append(parse(row))
            except Malformed as error:
                where = f"{kind} {row['key' if kind == 'task' else 'id']}"
                raise DatabaseError(f"the database {self.path} is damaged", where=where, why=f"it {error}") from None
        return found

    # ------------------------------------------------------------ JSON lines

    def lines(self) -> Iterator[str]:
        """The entries as JSON lines, without the sessions."""
        yield json.dumps({"tcomp": "tuning", "format": FORMAT})
        for task in self.tasks():
            yield json.dumps({"kind": "task", "key": task.key, "task": task.to_json()})
        entries: list[Record | Verdict] = [*self.records(), *self.verdicts()]
        for entry in entries:
            parsed = {n: json.loads(v) if n in _JSON and isinstance(v, str) and v else v for n, v in _columns(entry).items()}
            yield json.dumps({"kind": "record" if isinstance(entry, Record) else "verdict", **parsed})

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write the entries to a file, completely or not at all; their number. Raises `DatabaseError`."""
        place, lines = Path(path), [*self.lines()]
        beside = place.with_name(f".{os.getpid()}.{place.name}")
        try:
            beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(beside, place)
        except OSError as error:
            raise DatabaseError(f"cannot write {place}", why=error.strerror or str(error)) from error
        finally:
            beside.unlink(missing_ok=True)
        return len(lines) - 1

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Enter what a file of JSON lines holds, all of it or, if a line is damaged, nothing; the number of entries that are new.

        Raises `DatabaseError` naming file and line.
        """
        try:
            with open(path, "rb") as file:
                return self._take(str(path), (line.decode(errors="replace") for line in iter(lambda: file.readline(checks.LINE_LIMIT + 1), b"")))
        except OSError as error:
            raise DatabaseError(f"cannot read {path}", why=error.strerror or str(error)) from error

    def merge(self, other: Database) -> int:
        """Enter what another database holds; the number of entries that are new."""
        return self._take(str(other.path), other.lines())

    def _take(self, name: str, lines: Iterator[str]) -> int:
        tasks: dict[str, Task] = {}
        new = number = 0
        with self._transaction():
            for number, line in enumerate(lines, 1):
                try:
                    entry = _entry_of_line(line, number, tasks)
                except Malformed as error:
                    why = f"the line {error}"
                    raise DatabaseError(f"{name} is no export of a tuning database", where=f"{name}:{number}", why=why) from None
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


def _columns(entry: Record | Verdict) -> dict[str, Any]:
    """The columns of an entry."""
    common = {"task": entry.task.key, "decisions": entry.decisions, "environment": dict(entry.environment), "time": entry.when}
    if isinstance(entry, Verdict):
        return {**common, "kept": int(entry.kept), "before": entry.before, "after": entry.after}
    m = entry.measurement
    return {
        **common, "trace": entry.trace, "status": str(m.status), "reason": m.reason[:checks.REASON_LIMIT], "seconds": m.seconds,
        "incumbent": m.incumbent, "cost": entry.cost, "predicted": entry.predicted,
    }  # fmt: skip


def _progress(session: Session) -> dict[str, Any]:
    """The columns of a session that change."""
    texts = {"options": json.dumps(dict(session.options)), "summary": json.dumps(dict(session.summary)), "state": str(session.state)}
    return {**texts, "spent": session.spent, "trials": session.trials}


def _task_of_row(row: Mapping[str, Any]) -> Task:
    return parse_task(row["key"], parse_json(row["task"]))


def _entry_of_line(line: str, number: int, tasks: Mapping[str, Task]) -> Task | Record | Verdict | None:
    """The entry in a line; None for the first one, which says what the file is."""
    record = parse_json(line)
    expect(isinstance(record, dict), "is not a JSON object")
    if number == 1:
        expect(record.get("tcomp") == "tuning", 'is not {"tcomp": "tuning", ...}')
        expect(record.get("format") == FORMAT, f"has the format {record.get('format')!r:.20}; only format {FORMAT} is read")
        return None
    match record.pop("kind", None):
        case "task":
            expect(record.keys() == {"key", "task"}, "has missing or unknown fields")
            return parse_task(record["key"], record["task"])
        case "record":
            return parse_record(record, tasks)
        case "verdict":
            return parse_verdict(record, tasks)
        case kind:
            raise Malformed(f"has the kind {kind!r:.40}, which is unknown")
