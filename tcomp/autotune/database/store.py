"""The database of tuning: tasks, records of what was measured, verdicts of whole models, and sessions, in one SQLite file. Any number of
processes may use it at once (write-ahead log, one transaction an entry). The file may come from anyone: it has to have the tables and
indexes that are made here, with the same SQL, and nothing else, before anything is read from them; statements have limits; all that is
read is checked (see `entries`). Export, import and merge use JSON lines: one entry a line, a task before the entries that are about it."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tcomp.autotune.database import entries
from tcomp.autotune.database.entries import Malformed, Record, Session, Verdict, check, json_object, parse_json
from tcomp.autotune.tasks import Task
from tcomp.errors import DatabaseError
from tcomp.runtime.artifact import replacing
from tcomp.schedules.knobs import encode

APPLICATION = 0x74636D70  # "tcmp": marks a file as a database of tcomp
FORMAT = 1  # of exported lines
_WAIT = 60.0  # seconds for another process to end its transaction
_STEPS_BETWEEN, _STEPS_LIMIT = 100_000, 300_000_000  # instructions of SQLite's machine: a few seconds; reading a row takes some twenty
_LIMITS = {  # of SQLite, far above what entries need
    sqlite3.SQLITE_LIMIT_LENGTH: 4 * entries.LINE_LIMIT, sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000, sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 32, sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 4, sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1, sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
}  # fmt: skip
_JSON = {  # columns that hold lists and objects, as JSON
    "task": ("task",), "record": ("decisions", "trace", "seconds", "incumbent", "environment"), "verdict": ("decisions", "environment"),
    "session": ("options", "summary"),
}  # fmt: skip

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
_OBJECTS = 100  # tables and indexes that are looked at, more than there ever are


class Database(AbstractContextManager["Database"]):
    """The file at `path`, made if there is none, unless `create` is False; for one thread at a time. Raises `DatabaseError` if the file
    cannot be opened, is not such a database, is damaged, or is of a later version."""

    def __init__(self, path: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(path)
        self._check_file(create)
        with self._errors_named():
            self._sql = sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)
        try:
            with self._errors_named():
                self._prepare()
        except BaseException:
            self._sql.close()
            raise

    def _check_file(self, create: bool) -> None:
        """Raises `DatabaseError` if there is none to open, or something else than a file."""
        try:
            odd = not stat.S_ISREG(os.stat(self.path).st_mode)
        except FileNotFoundError:
            odd = not create
        except (OSError, ValueError) as error:  # a name with NUL
            raise DatabaseError(f"there is no database {str(self.path)!r}", why=getattr(error, "strerror", "") or str(error)) from error
        if odd:  # opening a pipe would wait for a writer
            raise DatabaseError(f"there is no database {self.path}", hint="`tcomp tune` makes one" if not create else "name a file")

    def _prepare(self) -> None:
        for limit, value in _LIMITS.items():
            self._sql.setlimit(limit, value)
        self._sql.set_progress_handler(self._count_steps, _STEPS_BETWEEN)
        self._sql.row_factory = sqlite3.Row
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "foreign_keys = ON"):
            self._execute(f"PRAGMA {setting}")
        if self._version() < VERSION:
            with self._transaction():
                for migration in _MIGRATIONS[self._version() :]:  # read again: another process may have done this in the meantime
                    for statement in filter(str.strip, migration.split(";")):
                        self._execute(statement)
                self._execute(f"PRAGMA application_id = {APPLICATION}")
                self._execute(f"PRAGMA user_version = {VERSION}")
        with suppress(sqlite3.OperationalError):  # without waiting: whoever holds the file now, a later opening changes the mode
            self._execute("PRAGMA journal_mode = WAL")
        self._execute("PRAGMA synchronous = NORMAL")  # entries survive the end of this process, whatever ends it

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Every statement goes through here: each has `_STEPS_LIMIT` instructions."""
        self._steps = 0
        return self._sql.execute(statement, values)

    def _count_steps(self) -> bool:
        """Called every so many instructions; True ends the statement. Instructions, not seconds: waiting for another process takes none."""
        self._steps += _STEPS_BETWEEN
        return self._steps > _STEPS_LIMIT

    def _version(self) -> int:
        """That of the file, 0 for an empty one. What its schema holds is looked at before it is used: a view could be named as a table, or
        as a function of SQLite's. In one transaction, as another process may be making the database."""
        outer = self._sql.in_transaction
        if not outer:
            self._execute("BEGIN")
        try:
            found = {tuple(row) for row in self._execute(f"SELECT type, name, tbl_name, sql FROM main.sqlite_master LIMIT {_OBJECTS}")}
            ours, version = (int(self._execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version"))
        finally:
            if not outer:
                self._execute("COMMIT")
        if ours != APPLICATION:
            if found:
                raise DatabaseError(f"{self.path} is not a database of tcomp", why="it is a database of another program")
            return 0
        if not 0 <= version <= VERSION:
            raise DatabaseError(f"{self.path} has version {version}", why=f"this tcomp knows versions up to {VERSION}", hint="update tcomp")
        wanted = _schema(_MIGRATIONS[:version])
        if found != wanted:
            odd, how = (found - wanted, "has another") if found - wanted else (wanted - found, "lacks the")
            why = f"it {how} {' '.join(map(str, min(odd, key=str)[:2]))!r:.200}"
            raise DatabaseError(
                f"{self.path} is not a database that tcomp made", why=why, hint="`tcomp db import` makes a new one of an export"
            )
        return version

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            match getattr(error, "sqlite_errorcode", 0) & 0xFF:  # its low byte is the primary result code
                case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                    hint = "another process holds it"
                case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_FULL:
                    hint = ""
                case sqlite3.SQLITE_INTERRUPT:
                    raise DatabaseError(
                        f"the database {self.path} takes too long to read", why="it is damaged, or made for that"
                    ) from error
                case _:
                    hint = "`tcomp db import` makes a new one of an export"
            raise DatabaseError(f"the database {self.path} cannot be used", why=str(error), hint=hint) from error
        except (UnicodeDecodeError, OverflowError) as error:
            raise DatabaseError(f"the database {self.path} is damaged", why=str(error)[:200]) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors_named():
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
                self._execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:  # SQLite itself ends it where the disk is full
                    self._execute("ROLLBACK")
                raise

    def add(self, *given: Record | Verdict | Session) -> None:
        """Enter records and verdicts, and what sessions have spent by now, in one transaction. A new session gets its number."""
        with self._transaction():
            for entry in given:
                self._enter(entry)

    def set_trace(self, record: Record, trace: str) -> None:
        """Enter the steps that a record's decisions make."""
        with self._transaction():
            key = (trace, record.task.key, record.decisions, record.when)
            self._execute("UPDATE records SET trace = ? WHERE task = ? AND decisions = ? AND time = ?", key)

    def _enter(self, entry: Task | Record | Verdict | Session) -> int:
        """The number of entries that are new by it."""
        table, row, conflict = f"{type(entry).__name__.lower()}s", entry.to_json(), "DO NOTHING"
        if isinstance(entry, Record | Verdict):
            self._enter(entry.task)
        elif isinstance(entry, Session):
            conflict = f"(id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in row)}"
        else:
            table, row = "tasks", {"key": entry.key, "structure": entry.structure, "task": row}
        values = [json.dumps(v, separators=(",", ":")) if isinstance(v, dict | list | tuple) else v for v in row.values()]
        insert = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))}) ON CONFLICT {conflict}"
        entered = self._execute(insert, values)
        if isinstance(entry, Session):
            entry.number = entry.number or int(entered.lastrowid or 0)
        return entered.rowcount

    def tasks(self, structure: str | None = None) -> list[Task]:
        """The tasks of one structure, which differ in sizes and numbers of threads only, or all, in the order in which they came."""
        return self._rows("task", "structure", structure)

    def sessions(self) -> list[Session]:
        """All sessions, in the order in which they came."""
        return self._rows("session")

    def records(self, key: str | None = None) -> list[Record]:
        """The records of one task, or all, in the order in which they came."""
        return self._rows("record", "task", key)

    def verdicts(self, key: str | None = None) -> list[Verdict]:
        """The verdicts on one task, or all, in the order in which they came."""
        return self._rows("verdict", "task", key)

    def ranked(self, key: str) -> list[Record]:
        """The records whose decisions were not rolled back, each once, the least cost first."""
        lost = {v.decisions for v in self.verdicts(key) if not v.kept}
        found: dict[str, Record] = {}
        for r in sorted((r for r in self.records(key) if r.ok and r.decisions not in lost), key=lambda r: r.cost or 0.0):
            found.setdefault(r.decisions, r)
        return [*found.values()]

    def best(self, key: str) -> Record | None:
        """The record of the least cost whose decisions were not rolled back."""
        return next(iter(self.ranked(key)), None)

    def choice(self, key: str) -> str | None:
        """The decisions that compilations follow: what a whole model said last, else those of the best record; None without either."""
        if found := self.verdicts(key):
            return found[-1].decisions if found[-1].kept else encode({})
        return best.decisions if (best := self.best(key)) else None

    def _rows(self, kind: str, column: str = "", value: str | None = None) -> list[Any]:
        """The entries of a table, those with a value in a column or all, in order. Raises `DatabaseError` naming one that is malformed."""
        tasks = {t.key: t for t in self._rows("task", "key", value)} if column == "task" else {}  # that they are about
        with self._errors_named():
            rows = self._select(f"{kind}s", column, value)
        surplus = {"task": "structure", "record": "id", "verdict": "id", "session": ""}[kind]  # columns that follow from others
        found = []
        for row in rows:
            try:
                entry = {n: parse_json(v) if n in _JSON[kind] and v != "" else v for n, v in row.items() if n != surplus}
                found.append(entries.parse(kind, entry, tasks))
            except Malformed as error:
                where = f"{kind} {row['key' if kind == 'task' else 'id']}"
                raise DatabaseError(f"the database {self.path} is damaged", where=where, why=f"it {error}") from None
        return found

    def _select(self, table: str, column: str, value: str | None) -> list[dict[str, Any]]:
        """The rows of a table, in order. What a page holds may be reached many times in a damaged file, so that a few pages are endless
        rows: no row comes twice, and rows have no more characters than the file has bytes. SQLite sorts nothing: no such limit holds
        there."""
        which = "" if value is None else f"WHERE {column} = ?"
        rows: dict[int, dict[str, Any]] = {}
        characters = size = 0
        for row in self._execute(f"SELECT rowid AS number, * FROM {table} {which}", (value,) if which else ()):
            fields = dict(row)
            number = fields.pop("number")
            characters += sum(len(v) for v in fields.values() if isinstance(v, str | bytes))
            if characters > size:
                size = self._size()
            if number in rows or characters > size:
                raise DatabaseError(
                    f"the database {self.path} is damaged", where=f"table {table}", why="it holds the same rows again and again"
                )
            rows[number] = fields
        return [rows[number] for number in sorted(rows)]

    def _size(self) -> int:
        """The bytes of the file and its write-ahead log, which get no fewer as long as a statement reads."""
        size = 0
        for end in ("", "-wal"):
            with suppress(FileNotFoundError):
                size += os.stat(os.path.realpath(self.path) + end).st_size
        return size

    def lines(self) -> Iterator[str]:
        """The entries as JSON lines, without the sessions."""
        yield json.dumps({"tcomp": "tuning", "format": FORMAT})
        yield from (json.dumps({"kind": "task", "key": task.key, "task": task.to_json()}) for task in self.tasks())
        for kind in ("record", "verdict"):
            yield from (json.dumps({"kind": kind, **entry.to_json()}) for entry in self._rows(kind, "task"))

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write the entries to a file, completely or not at all; their number. Raises `DatabaseError`."""
        lines = [*self.lines()]
        with replacing(Path(path), error=DatabaseError) as (file,):
            file.write("".join(f"{line}\n" for line in lines).encode())
        return len(lines) - 1

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Enter what a file of JSON lines holds, all of it or, if a line is damaged, nothing; the number of entries that are new. Raises
        `DatabaseError` naming file and line."""
        try:
            with open(path, "rb") as file:
                lines = iter(lambda: file.readline(entries.LINE_LIMIT + 1), b"")
                return self._take(str(path), (line.decode(errors="replace") for line in lines))
        except (OSError, ValueError) as error:
            raise DatabaseError(f"cannot read {os.fspath(path)!r}", why=getattr(error, "strerror", "") or str(error)) from error

    def merge(self, other: Database) -> int:
        """Enter what another database holds; the number of entries that are new."""
        return self._take(str(other.path), other.lines())

    def _take(self, name: str, lines: Iterator[str]) -> int:
        tasks: dict[str, Task] = {}
        what, new, number = f"{name} is not an export of a tuning database", 0, 0
        with self._transaction():
            for number, line in enumerate(lines, 1):
                try:
                    record = json_object(parse_json(line))
                    if number == 1:  # says what the file is
                        _header(record)
                        continue
                    entry = entries.parse(_kind(record.pop("kind", None)), record, tasks)
                except Malformed as error:
                    raise DatabaseError(what, where=f"{name}:{number}", why=f"the line {error}") from None
                if isinstance(entry, Task):
                    tasks[entry.key] = entry
                new += self._enter(entry)
            if number == 0:
                raise DatabaseError(what, why="it is empty")
        return new


@functools.cache
def _schema(migrations: tuple[str, ...]) -> frozenset[tuple[str, str, str, str | None]]:
    """What SQLite's schema table holds (type, name, table, SQL) after these migrations."""
    with closing(sqlite3.connect(":memory:")) as sql:
        sql.executescript(";".join(migrations))
        return frozenset(sql.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


_kind = check("of a kind that is known", lambda v: v in ("task", "record", "verdict"))
_header = check(f'the header {{"tcomp": "tuning", "format": {FORMAT}}}', lambda v: v.get("tcomp") == "tuning" and v.get("format") == FORMAT)
