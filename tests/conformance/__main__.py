"""`python -m tests.conformance`: run the suite, or a part of it, and show what became of each case."""

from __future__ import annotations

import argparse
import sys

from . import report
from .pool import run_cases
from .suite import LEVELS, REFUSED, Suite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--filter", default="", help="only cases whose name contains one of these words (comma-separated)")
    parser.add_argument("--interpreter", action="store_true", help="import and NumPy reference only, no native code")
    parser.add_argument("--guarded", action="store_true", help="native code with inaccessible pages around every buffer")
    parser.add_argument("--inline", action="store_true", help="in this process, for debugging")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a case")
    parser.add_argument("--slowest", type=int, default=0, help="list the slowest cases")
    parser.add_argument("--refused", action="store_true", help="list refused cases as well")
    parser.add_argument("--update-exclusions", action="store_true", help="write the refused cases of a full run to exclusions.txt")
    args = parser.parse_args()
    suite, level = Suite(), "interpreter" if args.interpreter else "guarded" if args.guarded else "native"
    cases = [name for name in suite.cases if any(word in name for word in args.filter.split(","))]
    if args.inline:
        results = [suite.run(name, LEVELS[level], report.TOLERANCES.get(name, (0.0, 0.0))) for name in cases]
    else:
        results = list(run_cases(cases, level, report.TOLERANCES, args.workers, args.timeout))
    shown = report.failures(results) + ([r for r in results if r.outcome == REFUSED] if args.refused else [])
    for r in sorted(shown, key=lambda r: (r.outcome, r.case)):
        print(f"{r.outcome:8s} {r.case}  {r.detail}")
    for r in sorted(results, key=lambda r: -r.seconds)[: args.slowest]:
        print(f"{r.seconds:8.2f} s  {r.case}")
    print(report.table(results))
    if args.update_exclusions and not args.filter:
        report.write_exclusions(results)
    return 1 if report.failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
