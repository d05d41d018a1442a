"""Kills `tcomp tune` at random moments, goes on with `--resume` each time, and looks whether anything is lost.

python -m tests.autotune.killing [moments] [model.onnx]
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.autotune.models import two_layers

ROOT = Path(__file__).parents[2]
LATEST = 8.0  # seconds after it begins, at the latest, that a tuner is killed
PATIENCE = 120.0  # seconds to begin


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def outlived(processes: Sequence[int], patience: float = 30.0) -> list[int]:
    """Those of some processes that do not end."""
    end = time.monotonic() + patience
    while (left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def rows(path: Path, what: str) -> list[tuple[Any, ...]]:
    """What a query finds in a database that others write to; nothing where there is none yet."""
    if not path.exists():
        return []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return connection.execute(what).fetchall()
        except sqlite3.OperationalError:  # the tables are not there yet
            return []


def tune(model: Path, path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tcomp", "tune", str(model), "--threads", "1", "--database", str(path), "--json", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def killed(model: Path, path: Path, moments: int, seed: int) -> set[tuple[Any, ...]]:
    """Kill the tuner of a model so often; the records that were seen in the database. Raises `AssertionError` for what is lost or left."""
    rng, seen = random.Random(seed), set[tuple[Any, ...]]()
    for n in range(moments):
        begun = bool(rows(path, "SELECT id FROM sessions"))
        process = tune(model, path, "--budget", "1h", *(["--resume"] if begun else []))
        start, known = time.monotonic(), rows(path, "SELECT spent FROM sessions")
        while rows(path, "SELECT spent FROM sessions") == known and time.monotonic() - start < PATIENCE and rng.random() > 0.0004:
            assert process.poll() is None, process.communicate()  # it may be killed before it has begun, too
            time.sleep(0.02)
        time.sleep(rng.uniform(0, LATEST))
        offspring = children(process.pid)
        seen.update(rows(path, "SELECT task, decisions, status, seconds, cost, time FROM records"))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (left := outlived(offspring)), f"processes {left} are left behind"
        if path.exists():
            with sqlite3.connect(path) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = rows(path, "SELECT task, decisions, status, seconds, cost, time FROM records")
        assert seen <= set(found), f"{len(seen - set(found))} records are lost"
        print(f"kill {n + 1}: {time.monotonic() - start:5.1f} s, {len(offspring)} processes, {len(found)} records", flush=True)
    return seen


def goes_on(model: Path, path: Path) -> dict[str, Any]:
    """What the tuner says that goes on to its end."""
    trials = rows(path, "SELECT trials FROM sessions ORDER BY id")
    output, errors = (process := tune(model, path, "--resume", "--trials", "4")).communicate(timeout=600)
    assert process.returncode == 0, errors
    result: dict[str, Any] = json.loads(output)
    assert result["trials"] == trials[-1][0] + 4, (result["trials"], trials)
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TCOMP_CACHE"] = str(Path(folder) / "cache")
        moments = int(sys.argv[1]) if len(sys.argv) > 1 else 20
        model = Path(sys.argv[2]) if len(sys.argv) > 2 else two_layers(Path(folder) / "net.onnx")
        seen = killed(model, Path(folder) / "t.db", moments, 7)
        result = goes_on(model, Path(folder) / "t.db")
    print(
        f"{moments} kills: all {len(seen)} records seen before are there, nothing is left running; then {result['trials']} trials, {result['ratio']:.3f}"
    )


if __name__ == "__main__":
    main()
