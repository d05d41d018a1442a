"""Damage to databases of tuning, by bytes and pages of the file and by SQLite itself; what must come of reading them: entries, or a
`DatabaseError` that names the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random

from tcomp.autotune.database.lookup import recorded
from tcomp.autotune.database.store import Database
from tcomp.autotune.report import page
from tcomp.errors import DatabaseError
from tests.autotune.test_database import HASWELL, filled, record
from tests.fuzz.target import Folders, packed, unpacked

NAME = "fuzz.db"
BESIDE = ("-wal", "-shm", "-journal")  # files of SQLite's
OBJECTS = (  # instead of what the schema holds, or besides it
    "DROP TABLE {t}; CREATE VIEW {t} AS WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT * FROM r",
    "DROP TABLE {t}; CREATE TABLE {t} (a, b AS (zeroblob(1 << 30)))",
    "CREATE TRIGGER g AFTER INSERT ON {t} BEGIN DELETE FROM records; END",
    "CREATE VIRTUAL TABLE g USING fts5 (a)",
    "CREATE VIEW pragma_user_version AS WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r",
    "CREATE INDEX g ON {t} (abs(rowid))",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, 'TEXT', 'BLOB') WHERE name = '{t}'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 2 WHERE name = '{t}'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET type = 'view' WHERE name = '{t}'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = 'sqlite_master' WHERE name = '{t}'",
    "PRAGMA user_version = 0", "PRAGMA user_version = -1", "PRAGMA application_id = 0",
)  # fmt: skip
VALUES = ("x''", "zeroblob(100000)", "NULL", "'{{}}'", "'[[[[]]]]'", "-1", "1e400", "9223372036854775807", "char(0, 27, 65279)",
          "replace(hex(zeroblob(9999)), '0', '[')")  # fmt: skip


class Databases(Folders):
    """A database, at times with a log or journal beside it."""

    @cached_property
    def corpus(self) -> Sequence[bytes]:
        """A small one; one whose tables are trees of several levels, with rows of several pages."""
        filled(self.folder / "small.db").close()
        with Database(self.folder / "large.db") as database:
            database._sql.execute("BEGIN")
            for n in range(300):
                database._enter(record(1e-3, when=float(n), tile=n, text="x" * (9000 if n % 50 == 0 else 10)))
            database._sql.execute("COMMIT")
        return [packed({NAME: (self.folder / name).read_bytes()}) for name in ("small.db", "large.db")]

    def damage(self, rng: Random, data: bytes) -> bytes:
        image = unpacked(data)[NAME]
        if rng.random() < 0.25:
            image = self.changed(rng, image)
            if rng.random() < 0.5:
                return packed({NAME: image})
        files = {NAME: damaged_pages(rng, image)}
        if rng.random() < 0.05:
            files[NAME + "-wal"] = rng.randbytes(5000)
        if rng.random() < 0.05:
            files[NAME + "-journal"] = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + rng.randbytes(5000)
        return packed(files)

    def changed(self, rng: Random, image: bytes) -> bytes:
        """A database that was changed with SQLite itself, where SQLite does not refuse that."""
        self.write(packed({NAME: image}))
        self.remove(*BESIDE)
        sql = sqlite3.connect(self.folder / NAME)
        try:
            table = rng.choice(("tasks", "records", "verdicts", "sessions"))
            columns = [row[1] for row in sql.execute(f"PRAGMA table_info({table})")]
            update = f"UPDATE {table} SET {rng.choice(columns)} = {rng.choice(VALUES)}" if columns else "PRAGMA user_version = 1"
            sql.executescript(rng.choice((*OBJECTS, update, update, update, update)).format(t=table))
        except sqlite3.Error:
            pass
        sql.close()
        return (self.folder / NAME).read_bytes()

    def remove(self, *ends: str) -> None:
        for end in ends:
            Path(f"{self.folder / NAME}{end}").unlink(missing_ok=True)

    def read(self, data: bytes) -> None:
        self.remove("", *BESIDE)
        self.write(data)
        try:
            with Database(self.folder / NAME, create=False) as database:
                for task in database.tasks():
                    database.ranked(task.key), database.choice(task.key)
                database.records()
                page(database)
            recorded(self.folder / NAME, HASWELL, 1)
        except DatabaseError as error:
            assert NAME in str(error), error
            raise


def damaged_pages(rng: Random, data: bytes) -> bytes:
    """Bytes, numbers and whole pages of a file of SQLite's changed, or its end cut off."""
    image, size = bytearray(data), int.from_bytes(data[16:18], "big") or 4096
    pages = len(image) // size
    for _ in range(rng.choice((1, 1, 2, 5, 50)) if pages else 0):
        at = rng.randrange(pages) * size
        match rng.randrange(7):
            case 0:
                image[rng.randrange(len(image))] = rng.randrange(256)
            case 1:  # where pages say what they hold
                image[at + (100 if at == 0 else 0) + rng.randrange(12)] = rng.choice((0, 1, 2, 5, 10, 13, 128, 255))
            case 2:  # numbers of pages
                where = at + rng.randrange(size - 4)
                image[where : where + 4] = rng.randrange(pages + 2).to_bytes(4, "big")
            case 3:
                other = rng.randrange(pages) * size
                image[at : at + size], image[other : other + size] = image[other : other + size], image[at : at + size]
            case 4:
                image[at : at + size] = data[(other := rng.randrange(pages) * size) : other + size].ljust(size, b"\0")
            case 5:
                image[rng.randrange(100)] = rng.randrange(256)
            case 6:
                bit = rng.randrange(8 * len(image))
                image[bit // 8] ^= 1 << bit % 8
        del image[pages * size :]
    return bytes(image[: rng.randrange(len(image) + 1)] if rng.random() < 0.1 else image)
