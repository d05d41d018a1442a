"""`python -m tests.targets riscv64`: cases of the ONNX backend suite on another platform, under an emulator or in Node."""

from __future__ import annotations

import argparse
import sys
import time

from tests.conformance.suite import FIXED, PASSED, Suite
from tests.targets.cases import COUNT, run_case, subset
from tests.targets.platforms import PLATFORMS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.targets", description=__doc__)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--cases", type=int, default=COUNT, help="how many, evenly from the suite")
    parser.add_argument("--filter", default="", help="only those whose name contains this")
    parser.add_argument("--part", default="1/1", help="the n-th of m parts of them, as in 1/2")
    args = parser.parse_args()
    if missing := PLATFORMS[args.platform].missing:
        parser.error(f"not installed: {missing}")
    suite = Suite()
    part, parts = map(int, args.part.split("/"))
    names = [name for name in subset(suite, args.cases) if args.filter in name][part - 1 :: parts]
    start, good = time.perf_counter(), 0
    for name in names:
        result = run_case(suite, name, args.platform)
        equal = result.outcome in (PASSED, FIXED)
        good += equal
        if not equal:
            print(f"{result.outcome:8s} {name}  {result.detail}", flush=True)
    print(f"{args.platform}: {good} of {len(names)} cases equal, {time.perf_counter() - start:.0f} s")
    return int(good < len(names))


if __name__ == "__main__":
    sys.exit(main())
