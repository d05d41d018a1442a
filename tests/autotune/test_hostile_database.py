"""Databases that were made to do harm: they are refused, soon, by every command that opens one."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tcomp.autotune.database.store import Database
from tcomp.autotune.subject import title
from tcomp.autotune.tasks import Workload
from tcomp.cli.app import app
from tcomp.errors import DatabaseError
from tests.autotune.models import two_layers
from tests.autotune.test_database import HASWELL, PRODUCT, filled, record
from tests.fuzz.databases import OBJECTS

ENDLESS = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"


def changed(path: Path, statements: str) -> Path:
    filled(path).close()
    sql = sqlite3.connect(path)
    sql.executescript(statements)
    sql.close()
    return path


@pytest.mark.parametrize("arguments", [["db", "show"], ["db", "export", "-o", "out.jsonl"], ["report"], ["db", "merge", "mine.db"]])
def test_an_endless_view_in_place_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    changed(Path("a.db"), f"DROP TABLE tasks; CREATE VIEW tasks AS {ENDLESS} SELECT n AS key, n AS structure, n AS task FROM r")
    result = CliRunner().invoke(app, [*arguments, "a.db"])
    assert result.exit_code == 2 and "not a database that tcomp made" in result.output and "view tasks" in result.output


def test_a_compilation_that_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(tmp_path / "a.db", f"DROP TABLE tasks; CREATE VIEW tasks AS {ENDLESS} SELECT n AS key, n AS structure, n AS task FROM r")
    model = two_layers(tmp_path / "net.onnx")
    result = CliRunner().invoke(app, ["compile", str(model), "--database", str(path), "-o", str(tmp_path / "net.tcomp")])
    assert result.exit_code == 2 and "not a database that tcomp made" in result.output


@pytest.mark.parametrize("change", OBJECTS)
def test_only_what_is_made_here_is_in_the_schema(tmp_path: Path, change: str) -> None:
    try:
        path = changed(tmp_path / "a.db", change.format(t="records"))
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite has no such object: {error}")
    with pytest.raises(DatabaseError, match=r"a\.db"), Database(path) as database:
        database.records()


def test_pages_that_are_reached_again_and_again(tmp_path: Path) -> None:
    """Inner pages of the tree of `records`, each of which has the next one two hundred times: 200 ** 6 times the same rows."""
    filled(tmp_path / "a.db").close()
    sql = sqlite3.connect(tmp_path / "a.db")
    (root,) = sql.execute("SELECT rootpage FROM sqlite_master WHERE name = 'records'").fetchone()
    (size,) = sql.execute("PRAGMA page_size").fetchone()
    sql.close()
    image = (tmp_path / "a.db").read_bytes()
    last, leaf, pages = len(image) // size, image[(root - 1) * size : root * size], list[bytes]()
    for n in range(6):  # the root, and five new ones; the last one is followed by the leaf
        child = (last + n + 1).to_bytes(4, "big")
        cells = b"".join(child + bytes((0x80 | 1 + k // 128, k % 128)) for k in range(200))
        start = size - len(cells)
        header = b"\x05\0\0" + (200).to_bytes(2, "big") + start.to_bytes(2, "big") + b"\0" + child
        pointers = b"".join((start + 6 * k).to_bytes(2, "big") for k in range(200))
        pages.append((header + pointers).ljust(start, b"\0") + cells)
    image = image[: (root - 1) * size] + pages[0] + image[root * size :] + b"".join(pages[1:]) + leaf
    (tmp_path / "a.db").write_bytes(image[:28] + (len(image) // size).to_bytes(4, "big") + image[32:])
    with pytest.raises(DatabaseError, match="again and again"), Database(tmp_path / "a.db") as database:
        database.records()


def test_rows_of_more_than_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "a.db") as database:
        monkeypatch.setattr(Database, "_size", lambda self: 500)
        with pytest.raises(DatabaseError, match="again and again"):
            database.records()


def test_statements_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcomp.autotune.database.store._STEPS_LIMIT", 10_000_000)
    with filled(tmp_path / "a.db") as database:
        with pytest.raises(DatabaseError, match="takes too long"), database._errors_named():
            database._execute(f"{ENDLESS} SELECT count(*) FROM r")
        assert len(database.records()) == 5


def test_blobs_and_texts_are_bounded(tmp_path: Path) -> None:
    path = changed(tmp_path / "a.db", "UPDATE records SET decisions = hex(zeroblob(20000000)) WHERE id = 1")
    with pytest.raises(DatabaseError, match=r"a\.db"), Database(path) as database:
        database.records()


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    for create in (False, True):
        with pytest.raises(DatabaseError, match="no database"):
            Database(tmp_path / name, create)
    with Database(tmp_path / "b.db") as database, pytest.raises(DatabaseError, match="cannot read"):
        database.import_(tmp_path / name)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(DatabaseError, match="there is no database"):
            Database(odd)


def test_a_full_disk(tmp_path: Path) -> None:
    """Nothing is entered of what does not fit, and the database goes on."""
    with filled(tmp_path / "a.db") as database:
        (pages,) = database._sql.execute("PRAGMA page_count").fetchone()
        database._sql.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(DatabaseError, match="full"):
            database.add(*(record(when=100.0 + n, text="x" * 1000) for n in range(100)))
        assert len(database.records()) == 5
        database._sql.execute("PRAGMA max_page_count = 100000")
        database.add(record(when=99.0))
        assert len(database.records()) == 6


def test_titles_are_found_without_parsing() -> None:
    """In linear time, however nested the text is."""
    text = "graph g(%a: float32[2]) -> (%b, %c) {\n  %b: float32[2] (a), %c: int64[n, 3] = split(%a, axis=" + "(" * 100_000 + ")\n}"
    task = Workload(text, str(HASWELL), 1, ())
    assert title(task) == "split -> float32[2], int64[n, 3]"
    assert title(PRODUCT) == "C" and title(Workload("x" * 100_000, str(HASWELL), 1, ())) != ""
