"""Damaged artifacts for libtcomp, built with sanitizers: `python -m tests.fuzz.libtcomp [CASES]`.

Damage is that of `tests.fuzz.targets`: bytes anywhere, and manifests and tables of sections with checksums that match again. Nothing may crash,
leak, hang or read outside its memory; where checksums do not match, C refuses what Python refuses.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tcomp.errors import ArtifactError
from tcomp.runtime import read_artifact
from tests.fuzz.targets import TARGETS, manifest_of

INCLUDE = Path(__file__).parents[2] / "tcomp/runtime/include"
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BATCH = 500


def build(folder: Path, *sources: Path, flags: Sequence[str] = SANITIZERS) -> Path:
    """A program of these C files."""
    program = folder / sources[0].stem
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run(
        ["cc", *strict, *flags, f"-I{INCLUDE}", *map(str, sources), "-o", str(program), "-ldl", "-lpthread"], check=True, timeout=120
    )
    return program


def cases(numbers: Iterable[int]) -> Iterable[tuple[bytes, bytes]]:
    """(artifact, damaged one)."""
    target = TARGETS["artifact"]
    for number in numbers:
        rng = Random(f"libtcomp {number}")
        whole = rng.choice(target.corpus)
        yield whole, whole if number % 50 == 0 else target.damage(rng, whole)


def sealed(data: bytes) -> bool:
    """Whether header and manifest match their checksum: then Python may refuse fields that C does not look at."""
    return hashlib.sha256(data[:80] + manifest_of(data)).digest() == data[80:112]


def check(program: Path, numbers: Iterable[int]) -> dict[int, int]:
    """How often each code was returned. Raises AssertionError for a program that failed, or accepted what Python refuses."""
    found, content = [*cases(numbers)], bytearray()
    for whole, data in found:
        # Code may only run with the manifest that it was made for.
        same = len(data) == len(whole) and manifest_of(whole) == manifest_of(data) if data[:192] == whole[:192] else False
        content += bytes([same]) + len(data).to_bytes(8, "little") + data
    done = subprocess.run([str(program)], input=bytes(content), capture_output=True, timeout=600, check=False)
    lines = done.stdout.decode(errors="replace").splitlines()
    assert done.returncode == 0 and len(lines) == len(found), f"case {len(lines)} of {numbers}: {done.stderr.decode()[-4000:]}"
    tally: dict[int, int] = {}
    for (_, data), line in zip(found, lines, strict=True):
        words = line.split()
        code = int(words[2] if words[0] == "run" else words[0])
        tally[code] = tally.get(code, 0) + 1
        refused = True
        with suppress(ArtifactError):
            read_artifact(data).verify()
            refused = False
        assert refused or code == 0, f"Python accepts what C refuses: {line}"
        assert code == 0 or words[0] != "run"
        assert not refused or code != 0 or sealed(data), f"C accepts damage that Python refuses: {line}"
    return tally


def main() -> None:
    """So many cases, 20,000 unless told otherwise."""
    total, tally = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000, dict[int, int]()
    with TemporaryDirectory() as folder:
        program = build(Path(folder), Path(__file__).with_name("libtcomp_driver.c"))
        for start in range(0, total, BATCH):
            for code, count in check(program, range(start, min(total, start + BATCH))).items():
                tally[code] = tally.get(code, 0) + count
            print(f"{min(total, start + BATCH)} cases, by code: {dict(sorted(tally.items()))}", flush=True)


if __name__ == "__main__":
    main()
