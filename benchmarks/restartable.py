"""Long runs of many cases, each in a process of its own: results go to a file of JSON lines, and a later call does what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def results_of(path: Path) -> list[Result]:
    """What earlier calls wrote; a line that was cut off when one was ended is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def run_missing(
    path: Path, module: str, cases: Iterable[Sequence[str]], keys: Sequence[str], options: Sequence[str] = (), timeout: float = 600.0
) -> Iterator[Result]:
    """Run `python -m MODULE --case ARGUMENTS... OPTIONS...` for each case without a result in the file at `path`, one after the other, and
    append what its last line of output says, a JSON object. `keys` are the fields that hold the arguments. A case that fails, crashes or
    takes longer than `timeout` seconds has an "outcome" that says so. Yields the new results."""
    done = {tuple(str(r[k]) for k in keys) for r in results_of(path)}
    cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        if cut:
            print(file=file)
        for arguments in cases:
            if tuple(arguments) in done:
                continue
            result: Result = dict(zip(keys, arguments, strict=True))
            try:
                command = [sys.executable, "-m", module, "--case", *arguments, *options]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
                lines = ended.stdout.strip().splitlines()
                if ended.returncode == 0 and lines:
                    result |= json.loads(lines[-1])
                else:
                    last = (ended.stderr.strip().splitlines() or ["nothing printed"])[-1]
                    result |= {"outcome": f"exit code {ended.returncode}", "detail": last[:400]}
            except subprocess.TimeoutExpired:
                result |= {"outcome": "timeout", "detail": f"{timeout:g} s"}
            except ValueError as error:
                result |= {"outcome": "no result", "detail": str(error)[:400]}
            print(json.dumps(result), file=file, flush=True)
            yield result
