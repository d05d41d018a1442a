"""Mutations of database files, and what must come of reading them: entries or `DatabaseError`, soon. Run many more of them than the tests
do with `python -m tests.autotune.fuzz_database COUNT [SEED]`."""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tcomp.autotune.database.lookup import recorded
from tcomp.autotune.database.store import Database
from tcomp.autotune.report import page
from tcomp.errors import DatabaseError
from tests.autotune.test_database import HASWELL, filled, record

HANG = 10  # seconds

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
VALUES = (
    "x''",
    "zeroblob(100000)",
    "NULL",
    "'{{}}'",
    "'[[[[]]]]'",
    "-1",
    "1e400",
    "9223372036854775807",
    "char(0, 27, 65279)",
    "replace(hex(zeroblob(9999)), '0', '[')",
)


def originals(folder: Path) -> list[bytes]:
    """Databases to mutate: a small one; one whose tables are trees of several levels, with rows of several pages."""
    filled(folder / "small.db").close()
    with Database(folder / "large.db") as database:
        database._sql.execute("BEGIN")
        for n in range(300):
            database._enter(record(1e-3, when=float(n), tile=n, text="x" * (9000 if n % 50 == 0 else 10)))
        database._sql.execute("COMMIT")
    return [(folder / name).read_bytes() for name in ("small.db", "large.db")]


def mutated(data: bytes, path: Path, rng: random.Random) -> None:
    """Write a mutation of a database to `path`."""
    for end in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    if rng.random() < 0.25:
        path.write_bytes(data)
        changed(path, rng)
        if rng.random() < 0.5:
            return
        data = path.read_bytes()
    image, size = bytearray(data), int.from_bytes(data[16:18], "big") or 4096
    pages = max(1, len(image) // size)
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
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
    path.write_bytes(image[: rng.randrange(len(image))] if rng.random() < 0.1 else image)
    if rng.random() < 0.05:
        Path(f"{path}-wal").write_bytes(rng.randbytes(5000))
    if rng.random() < 0.05:
        Path(f"{path}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + rng.randbytes(5000))


def changed(path: Path, rng: random.Random) -> None:
    """Change a database with SQLite itself."""
    sql = sqlite3.connect(path)
    table = rng.choice(("tasks", "records", "verdicts", "sessions"))
    columns = [row[1] for row in sql.execute(f"PRAGMA table_info({table})")]
    update = f"UPDATE {table} SET {rng.choice(columns)} = {rng.choice(VALUES)}"
    try:
        sql.executescript(rng.choice((*OBJECTS, update, update, update, update)).format(t=table))
    except sqlite3.Error:
        pass  # a change that SQLite refuses
    sql.close()


def read(path: Path) -> str:
    """What reading a database as commands do comes to. Raises what is no `DatabaseError`."""
    try:
        with Database(path, create=False) as database:
            for task in database.tasks():
                database.ranked(task.key), database.choice(task.key)
            found = f"{min(len(database.records()), 1)} records"
            page(database)
        recorded(path, HASWELL, 1)
        return found
    except DatabaseError as error:
        assert "fuzz.db" in str(error), error
        return error.what.replace(str(path), "")


def fuzz(folder: Path, count: int, seed: int) -> Counter[str]:
    """How so many mutations ended. Raises for one that hangs, crashes or raises something else, naming its number."""

    def hung(*_: object) -> None:
        raise TimeoutError(f"no answer within {HANG} s")

    before, results, data = signal.signal(signal.SIGALRM, hung), Counter[str](), originals(folder)
    try:
        for n in range(count):
            rng = random.Random(f"{seed} {n}")
            mutated(rng.choice(data), folder / "fuzz.db", rng)
            signal.alarm(HANG)
            try:
                results[read(folder / "fuzz.db")] += 1
            except Exception as error:
                raise AssertionError(f"mutation {n} of seed {seed}: {error!r}") from error
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return results


def main(arguments: Sequence[str]) -> None:
    """Fuzz, and print how often what came of it, and the seconds of all."""
    start, seed = time.monotonic(), int(arguments[1]) if len(arguments) > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        for what, number in fuzz(Path(folder), int(arguments[0]), seed).most_common():
            print(f"{number:8} {what}")
    print(f"{time.monotonic() - start:.0f} s, seed {seed}")


if __name__ == "__main__":
    main(sys.argv[1:])
