"""Damage guided by coverage, with atheris (libFuzzer): the same readers and the same kinds of damage, but what reaches new code is kept
and damaged further."""

from __future__ import annotations

import sys
from random import Random

from tcomp.errors import TcompError

READERS = ("tcomp.ir.text", "tcomp.runtime.", "tcomp.frontends.onnx", "tcomp.ir.verify", "tcomp.autotune.database")  # what is covered


def explore(target: str, seed: int, seconds: int) -> int:
    """Fuzz one target for some time; what raises another error ends the process with its traceback, and is written to a file."""
    try:
        import atheris
    except ImportError:
        sys.exit("this needs atheris: pip install atheris")
    from tests.fuzz.targets import TARGETS

    reader = TARGETS[target]
    corpus = reader.corpus
    longest = max(20_000, 4 * max(map(len, corpus)))  # bytes
    for name in [n for n in sys.modules if n.startswith(READERS)]:
        for value in list(vars(sys.modules[name]).values()):
            for function in [value, *vars(value).values()] if isinstance(value, type) and value.__module__ == name else [value]:
                if hasattr(function, "__code__") and getattr(function, "__module__", "") == name:
                    function.__code__ = atheris.instrument_func(function).__code__

    def mutate(data: bytes, largest: int, number: int) -> bytes:
        rng = Random(f"{seed} {number}")
        return reader.damage(rng, data if data and rng.randrange(10) else rng.choice(corpus))[:largest]

    def once(data: bytes) -> None:
        try:
            if reader.is_case(data):  # what libFuzzer tries first is not made by `mutator`
                reader.read(data)
        except (TcompError, UnicodeDecodeError):
            pass

    def mutator(data: bytes, largest: int, number: int) -> bytes:
        try:
            return mutate(data, largest, number)
        except Exception:  # noqa: BLE001  some damage needs data that parses
            return reader.damage(Random(number), corpus[number % len(corpus)])[:largest]

    options = [sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-max_len={longest}", "-timeout=10", "-rss_limit_mb=4096"]
    atheris.Setup(options, once, custom_mutator=mutator)
    atheris.Fuzz()
    return 0
