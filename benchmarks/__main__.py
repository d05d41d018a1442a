"""`python -m benchmarks`: tcomp and its peers side by side on the models of models.py; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .contenders.compare import compare
from .contenders.worker import CONTENDERS
from .models import select


def names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"no contender is named {name!r}; there are {', '.join(CONTENDERS)}")
    return chosen


def counts(text: str) -> list[int]:
    return sorted({int(n) for n in text.split(",")})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="PATTERNS", help="names or glob patterns, comma-separated; default: all but "
                        "light_*, which have the graphs of other models and constant weights")  # fmt: skip
    parser.add_argument("--contenders", type=names, default=list(CONTENDERS), help=f"default: {','.join(CONTENDERS)}")
    parser.add_argument("--baseline", default="onnxruntime", choices=CONTENDERS, help="whose latency is 1")
    parser.add_argument("--threads", type=counts, default=[1, 2], help="thread counts, comma-separated; default: 1,2")
    parser.add_argument("--seconds", type=float, default=1.0, help="timed per model, contender and thread count")
    parser.add_argument("--rounds", type=int, default=5, help="turns into which that time is split")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for any one step of a worker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    models = [m for m in select(args.only) if args.only or not m.name.startswith("light_")]
    return compare(models, args.contenders, args.threads, args.seconds, args.rounds, args.timeout, args.baseline,
                   args.json)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
