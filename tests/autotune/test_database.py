"""The database: nothing that was entered is lost, whatever happens to processes; nothing that is read is believed unchecked."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tcomp.autotune.database import entries, store as module
from tcomp.autotune.database.entries import Record, Session, SessionState, Verdict, environment
from tcomp.autotune.database.store import Database
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.autotune.tasks import Program, Task
from tcomp.backends import backend_of
from tcomp.errors import DatabaseError, TcompError
from tcomp.schedules.knobs import encode
from tcomp.schedules.trace import Step, Trace
from tcomp.target import CpuTarget
from tests.autotune.spaces import product, scaled, split_scaled

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
PRODUCT = Program.of(product(), HASWELL, 1)
SCALED = Program.of(scaled(), HASWELL, 2, schedule=split_scaled)
TRACE = Trace((Step("split", ("C.i", 4)), Step("set_kind", ("C.i.i", "vectorized"), (("reassociate", True),)))).to_json()


def record(cost: float | None = 1e-3, task: Task = PRODUCT, when: float = 1.0, **decisions: Any) -> Record:
    measured = (
        Measurement(Outcome.CRASH, reason="killed by SIGSEGV") if cost is None else Measurement(Outcome.OK, (cost, 2 * cost), "", (cost,))
    )
    return Record(task, encode(decisions), TRACE if cost else "", measured, cost, 2e-3, {"processor": "a <b> & 'c' µ"}, when)


def filled(path: Path) -> Database:
    database = Database(path)
    for n, cost in enumerate((3e-3, 1e-3, None, 2e-3)):
        database.add(record(cost, when=float(n), tile=(n, 2), pack=bool(n % 2)))
    database.add(record(5e-6, SCALED, 9.0, factor=8))
    database.add(Verdict(SCALED, encode({"factor": 8}), False, 1e-5, 2e-5, {"a": "b"}, 10.0))
    return database


def test_entries_come_back(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db") as database:
        assert database.tasks() == [PRODUCT, SCALED]
        first, _, crashed, _ = database.records(PRODUCT.key)
        assert first == record(3e-3, when=0.0, tile=(0, 2), pack=False)
        assert not crashed.ok and crashed.measurement.reason == "killed by SIGSEGV" and crashed.cost is None
        assert len(database.records()) == 5 and database.records("no such key") == []
        best = database.best(PRODUCT.key)
        assert best is not None and best.cost == 1e-3
        assert database.tasks(PRODUCT.structure) == [PRODUCT] and database.tasks("0" * 64) == []
    with Database(tmp_path / "a.db", create=False) as again:
        assert len(again.records()) == 5


def test_what_compilations_follow(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db") as database:
        assert database.choice(PRODUCT.key) == encode({"tile": (1, 2), "pack": True})
        assert database.choice("unknown") is None
        assert database.best(SCALED.key) is None and database.choice(SCALED.key) == "{}"  # rolled back
        database.add(record(4e-6, SCALED, 11.0, factor=16))
        best = database.best(SCALED.key)
        assert best is not None and best.decisions == encode({"factor": 16})
        assert database.choice(SCALED.key) == "{}"  # until a whole model says otherwise
        database.add(Verdict(SCALED, encode({"factor": 16}), True, 1e-5, 9e-6, {}, 12.0))
        assert database.choice(SCALED.key) == encode({"factor": 16})


def test_an_entry_is_entered_once(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db") as database:
        database.add(record())
        database.add(record())
        assert len(database.records()) == 1


def test_sessions(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db") as database:
        session = Session("subject", {"budget": 60, "model": "m.onnx"}, 5.0)
        database.add(session)
        session.spent, session.trials = 12.5, 3
        database.add(record(), session)
        session.state = SessionState.INTERRUPTED
        database.add(session)
        assert database.sessions() == [session]


def test_environment_names_machine_and_versions() -> None:
    found = environment(backend_of(HASWELL))
    assert {"tcomp", "python", "llvm", "processor", "cores", "target", "compiler"} <= found.keys()
    assert all(isinstance(v, str) for v in found.values())


# ---------------------------------------------------------------- processes


WRITER = """
import sys
from tests.autotune.test_database import PRODUCT, record
from tcomp.autotune.database.store import Database
with Database(sys.argv[1]) as database:
    for n in range(int(sys.argv[3])):
        database.add(record(1e-3, when=float(n), writer=sys.argv[2], n=n))
        print(n, flush=True)
"""


def start(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    paths = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    running = [start(path, str(n), 30) for n in range(3)]
    assert [p.wait(120) for p in running] == [0, 0, 0]
    with Database(path) as database:
        assert len(database.records(PRODUCT.key)) == 90 and len(database.tasks()) == 1


def test_a_database_is_made_by_many_at_once(tmp_path: Path) -> None:
    together = Barrier(4)

    def open_each(_: int) -> None:
        for n in range(50):
            together.wait(60)
            Database(tmp_path / f"{n}.db").close()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(open_each, range(4))] == [None] * 4
    assert sqlite3.connect(tmp_path / "0.db").execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_is_killed_loses_nothing_it_said_it_wrote(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "killed.db"
    process = start(path, "victim", 100_000)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    said = 1 + len(process.stdout.read().split())
    process.wait()
    with Database(path) as database:
        found = database.records()
        assert said <= len(found) <= said + 1  # the last one may have been entered, and not yet said
        database.add(record(when=-1.0))
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


# ---------------------------------------------------------------- versions


def test_an_older_database_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "a.db").close()
    added = "ALTER TABLE records ADD COLUMN extra TEXT NOT NULL DEFAULT 'x'; CREATE TABLE later (id INTEGER PRIMARY KEY) STRICT"
    monkeypatch.setattr(module, "_MIGRATIONS", (*module._MIGRATIONS, added))
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    Database(tmp_path / "a.db").close()
    sql = sqlite3.connect(tmp_path / "a.db")
    assert sql.execute("SELECT count(*) FROM records WHERE extra = 'x'").fetchone() == (5,)
    assert sql.execute("PRAGMA user_version").fetchone() == (module.VERSION,)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "a.db").close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MIGRATIONS", (*module._MIGRATIONS, "CREATE TABLE later (id INTEGER); CREATE TABLE later (id INTEGER)"))
        patch.setattr(module, "VERSION", module.VERSION + 1)
        with pytest.raises(DatabaseError, match=r"a\.db cannot be used"):
            Database(tmp_path / "a.db")
    with Database(tmp_path / "a.db") as database:
        assert len(database.records()) == 5


def test_a_later_database_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a.db").close()
    sqlite3.connect(tmp_path / "a.db").execute("PRAGMA user_version = 99")
    with pytest.raises(DatabaseError, match="has version 99"):
        Database(tmp_path / "a.db")


# ---------------------------------------------------------------- files that are none


def test_what_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="there is no database"):
        Database(tmp_path / "missing.db", create=False)
    with pytest.raises(DatabaseError, match="there is no database"):
        Database(tmp_path)
    (tmp_path / "text.db").write_text("this is not a database, and long enough to look at" * 100)
    with pytest.raises(DatabaseError, match=r"text\.db cannot be used"):
        Database(tmp_path / "text.db")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.commit()
    with pytest.raises(DatabaseError, match="not a database of tcomp"):
        Database(tmp_path / "other.db")
    with pytest.raises(DatabaseError, match="cannot be used"):
        Database(tmp_path / "no such folder" / "a.db")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_database_is_an_error_that_names_it(tmp_path: Path, seed: int) -> None:
    """Bytes overwritten anywhere: everything is read, or refused by name; nothing else is raised."""
    path, rng = tmp_path / "a.db", random.Random(seed)
    filled(path).close()
    for _ in range(12):
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 4, 200))):
            data[rng.randrange(100 if rng.random() < 0.3 else len(data))] = rng.randrange(256)
        (tmp_path / "b.db").write_bytes(bytes(data) if rng.random() < 0.8 else bytes(data[: rng.randrange(len(data))]))
        for leftover in ("b.db-wal", "b.db-shm"):
            (tmp_path / leftover).unlink(missing_ok=True)
        try:
            with Database(tmp_path / "b.db") as database:
                for read in (database.tasks, database.records, database.verdicts, database.sessions):
                    read()
                database.choice(PRODUCT.key)
        except DatabaseError as error:
            assert "b.db" in str(error)


CHANGES: dict[str, str] = {
    "a reason of another type": "UPDATE records SET status = 'fine'",
    "decisions that are not JSON": "UPDATE records SET decisions = '{'",
    "decisions that are a list": "UPDATE records SET decisions = '[1]'",
    "a decision that is a record": "UPDATE records SET decisions = '{\"a\": {}}'",
    "endless decisions": "UPDATE records SET decisions = '" + "[" * 100_000 + "'",
    "a trace of nothing": "UPDATE records SET trace = '{\"version\": 1}'",
    "a primitive with an odd name": 'UPDATE records SET trace = \'{"version": 1, "steps": [["import os", []]]}\'',
    "times that are none": "UPDATE records SET seconds = '[\"x\"]' WHERE status = 'ok'",
    "times that are infinite": "UPDATE records SET seconds = '[Infinity]' WHERE status = 'ok'",
    "a negative cost": "UPDATE records SET cost = -1 WHERE status = 'ok'",
    "a failure with a cost": "UPDATE records SET cost = 1 WHERE status = 'crash'",
    "an environment of another kind": "UPDATE records SET environment = '{\"a\": 1}'",
    "another program under the same key": "UPDATE tasks SET task = replace(task, '32', '33')",
    "another target": "UPDATE tasks SET task = replace(task, 'haswell', 'h4xwell')",
    "a space that is not a name": "UPDATE tasks SET task = replace(task, 'tests.autotune.spaces:split_scaled', 'os;system')",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_was_tampered_with_is_named(tmp_path: Path, change: str) -> None:
    filled(tmp_path / "a.db").close()
    sql = sqlite3.connect(tmp_path / "a.db")
    sql.execute(CHANGES[change])
    sql.commit()
    sql.close()
    with Database(tmp_path / "a.db") as database, pytest.raises(DatabaseError, match=r"(?s)a\.db is damaged.*(record \d|task )"):
        database.records()


# ---------------------------------------------------------------- JSON lines


def test_export_and_import(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db") as database, Database(tmp_path / "b.db") as other:
        assert database.export(tmp_path / "out.jsonl") == 2 + 5 + 1
        assert other.import_(tmp_path / "out.jsonl") == 8
        assert other.import_(tmp_path / "out.jsonl") == 0
        assert (other.tasks(), other.records(), other.verdicts()) == (database.tasks(), database.records(), database.verdicts())
        other.export(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()


def test_merge(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db") as one, Database(tmp_path / "b.db") as other:
        other.add(record(1e-3, when=1.0, tile=(1, 2), pack=True))
        other.add(record(7e-4, when=77.0, tile=(9, 9)))
        assert one.merge(other) == 1  # the other one is known
        best = one.best(PRODUCT.key)
        assert best is not None and best.cost == 7e-4


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda entry: {k: v for k, v in entry.items() if k != name}


LINES: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "no header": (1, lambda e: {"kind": "task"}),
    "another format": (1, lambda e: {**e, "format": 2}),
    "no object": (2, lambda e: [1, 2]),
    "no kind": (2, without("kind")),
    "an unknown kind": (4, lambda e: {**e, "kind": "program"}),
    "a missing field": (4, without("seconds")),
    "a field too many": (4, lambda e: {**e, "code": "x"}),
    "a key of nothing": (4, lambda e: {**e, "task": "f" * 64}),
    "a key that is a list": (4, lambda e: {**e, "task": []}),
    "another text": (2, lambda e: {**e, "task": {**e["task"], "text": "x"}}),
    "a trace too long": (4, lambda e: {**e, "trace": {"version": 1, "steps": [["f", []]] * 100_001}}),
    "a huge number": (4, lambda e: {**e, "cost": 1e300}),
    "true as a number": (4, lambda e: {**e, "cost": True}),
    "too many times": (4, lambda e: {**e, "seconds": [1.0] * 5000}),
    "a long reason": (4, lambda e: {**e, "reason": "x" * 5000}),
    "a deep decision": (4, lambda e: {**e, "decisions": {"a": json.loads("[" * 20 + "]" * 20)}}),
}


@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_is_named_and_nothing_is_entered(tmp_path: Path, damage: str) -> None:
    number, change = LINES[damage]
    with filled(tmp_path / "a.db") as database:
        database.export(tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    lines[number - 1] = json.dumps(change(json.loads(lines[number - 1])))
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    with Database(tmp_path / "b.db") as other:
        with pytest.raises(DatabaseError, match=rf"out\.jsonl:{number}"):
            other.import_(tmp_path / "out.jsonl")
        assert other.tasks() == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b'{"tcomp": "tuning", "format": 1}\n' + b"[" * 100_000, b"\n\n"])
def test_what_is_no_export(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with Database(tmp_path / "b.db") as database, pytest.raises(DatabaseError, match=r"x\.jsonl"):
        database.import_(tmp_path / "x.jsonl")


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "LINE_LIMIT", 1000)
    (tmp_path / "x.jsonl").write_text('{"tcomp": "tuning", "format": 1}\n' + "x" * 5000)
    with Database(tmp_path / "b.db") as database, pytest.raises(DatabaseError, match=r"x\.jsonl:2"):
        database.import_(tmp_path / "x.jsonl")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db") as database:
        with pytest.raises(TcompError, match="cannot write"):
            database.export(tmp_path / "no such folder" / "x")
        with pytest.raises(TcompError, match="cannot read"):
            database.import_(tmp_path / "no such file")


def test_reasons_are_cut(tmp_path: Path) -> None:
    long = replace(record(None), measurement=Measurement(Outcome.ERROR, reason="x" * 10_000))
    with Database(tmp_path / "a.db") as database:
        database.add(long)
        assert len(database.records()[0].measurement.reason) == 4000
