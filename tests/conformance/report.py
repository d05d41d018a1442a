"""A run of the suite against the list of exclusions: the outcome table, and what does not agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .suite import FIXED, OUTCOMES, PASSED, REFUSED, Result

EXCLUSIONS = Path(__file__).with_name("exclusions.txt")
# Cases whose expected values hold rounding noise above the suite's own tolerance (rtol, atol), with the tolerance they get instead.
TOLERANCES: Mapping[str, tuple[float, float]] = {
    "test_dft_inverse": (0.0, 1e-6),  # the exact result is 0, expected is 2e-7 left by a float32 transform
    "test_dft_inverse_opset19": (0.0, 1e-6),
    "test_attention_4d_causal_fp16": (2e-3, 0.0),  # one unit in the last place of float16 is 1e-3; the reference rounds every sum
    "test_attention_4d_causal_fp16_expanded": (2e-3, 0.0),
}
_HEADER = "# Cases of the ONNX backend suite that are refused, one a line: the case, and why. Written by `--update-exclusions`.\n"


def read_exclusions() -> dict[str, str]:
    """Case -> reason."""
    lines = [line for line in EXCLUSIONS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {case: reason.strip() for case, _, reason in (line.partition(" ") for line in lines)}


def write_exclusions(results: Iterable[Result]) -> None:
    """List the refused cases of a run of the whole suite."""
    lines = sorted(f"{r.case}  {r.detail}\n" for r in results if r.outcome == REFUSED)
    EXCLUSIONS.write_text(_HEADER + "".join(lines))


def table(results: Sequence[Result]) -> str:
    """Outcomes and their numbers."""
    counts = Counter(r.outcome for r in results)
    rows = [f"{counts[outcome]:6d}  {label}" for outcome, label in OUTCOMES.items()]
    return "\n".join([*rows, f"{len(results):6d}  cases"])


def passed(results: Iterable[Result]) -> int:
    return sum(r.outcome in (PASSED, FIXED) for r in results)


def failures(results: Iterable[Result]) -> list[Result]:
    """Everything that neither passed nor was refused by name."""
    return [r for r in results if r.outcome not in (PASSED, FIXED, REFUSED)]


def disagreements(results: Iterable[Result], exclusions: Mapping[str, str]) -> list[str]:
    """Refused cases that are not listed, and listed ones that pass or do not exist."""
    results = list(results)
    lines = [f"{r.case} is refused but not listed: {r.detail}" for r in results if r.outcome == REFUSED and r.case not in exclusions]
    lines += [f"{r.case} is listed but passes" for r in results if r.outcome in (PASSED, FIXED) and r.case in exclusions]
    return lines + [f"{case} is listed but no such case exists" for case in exclusions.keys() - {r.case for r in results}]
