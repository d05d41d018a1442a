"""What a model of cost says of a kernel: seconds in all and by component, and the counts behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_POINTS = 1 << 12  # points counted one by one where there is no closed form: an estimate is asked for thousands of candidates


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, in all and by component, and what they were computed from; `print` shows a table.

    `seconds` are those of the components, on a CPU seen by one thread of those that share the work: "arithmetic" (the ports of the vector units,
    and chains of accumulations), "registers" (loads and stores), "l2", "l3", "memory" (traffic from that level), "pages" (translation of
    addresses), "overhead" (loops, threads). `bound` is the roofline; `counts` are numbers, by name.
    """

    time: float
    bound: float
    seconds: Mapping[str, float]
    counts: Mapping[str, float]

    @property
    def features(self) -> dict[str, float]:
        """What a learned model is told: counts and seconds, under stable names."""
        return {**self.counts, **{f"seconds.{name}": s for name, s in self.seconds.items()}, "seconds": self.time, "bound": self.bound}

    def __str__(self) -> str:
        rows = [f"{name:<12}{_micro(s)}" for name, s in self.seconds.items()]
        rows.append(f"{'predicted':<12}{_micro(self.time)}")
        rows.append(f"{'bound':<12}{_micro(self.bound)}" + (f"   {self.bound / self.time:.0%} of the prediction" if self.time else ""))
        return "\n".join(rows)


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:12.2f} µs"
