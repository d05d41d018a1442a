"""End-to-end confirmation: what won alone must win in the whole model, or it is not used.

A kernel alone has the caches and the threads for itself, and its winner was the best of many noisy measurements. So A/B comparisons time
the tuned model against the untuned one, in a fresh process, and the profiles of both tell how fast each kernel is there. The first ones go
through the best few candidates of all kernels at once; the last is between the untuned model and the one with the best candidate of each
kernel, without those that are slower than before. If the model as a whole is still no faster, the kernels that slow it down are found by
bisection, in halves of equal shares of the time. What is not proved to gain in the time given is rolled back, and a model that is not faster
stays untuned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tcomp.autotune.measurement.results import Comparison, Rounds
from tcomp.autotune.subject import TuningSubject
from tcomp.schedules.knobs import Decisions, encode

MAX_COMPARISONS = 16  # halving many kernels again and again finds ever less

_Found = tuple[dict[str, Decisions], Comparison]  # what was tuned, and the comparison of the model with it


@dataclass(frozen=True)
class Gain:
    """Seconds that the kernels of one task take in a run, before and after."""

    before: float
    after: float


@dataclass
class Confirmation:
    """What was `kept`, by the keys of tasks, all that was `tried` in the model, and what the whole gained: seconds of a run (`before`, `after`),
    and their `ratio` from neighbouring runs; 1 if nothing was kept. `kernels` are those that were tuned. `notes` say why something was rolled
    back."""

    kept: dict[str, Decisions] = field(default_factory=dict)
    tried: dict[str, list[Decisions]] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    ratio: float = 1.0
    kernels: dict[str, Gain] = field(default_factory=dict)
    comparisons: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def rolled_back(self) -> set[str]:
        """The tasks of which nothing was kept."""
        return self.tried.keys() - self.kept.keys()


def confirm(
    subject: TuningSubject,
    candidates: Mapping[str, Sequence[Decisions]],
    seconds: float,
    deadline: float = float("inf"),
    tell: Callable[[int], None] = lambda comparisons: None,
) -> Confirmation:
    """Judge the best candidates of each task, by its key, the most promising first. A comparison takes `seconds` besides building the model. There
    are at most `MAX_COMPARISONS`, and only the first may start after `deadline` (of `time.monotonic`). `tell` hears their number."""
    return _Judge(subject, seconds, deadline, tell).judge(candidates)


class _Judge:
    def __init__(self, subject: TuningSubject, seconds: float, deadline: float, tell: Callable[[int], None]) -> None:
        self._subject, self._seconds, self._deadline, self._tell = subject, seconds, deadline, tell
        self._longest = 0.0
        self._result = Confirmation()
        self._seen: dict[str, dict[str, Rounds]] = {}  # of each task, by candidate, in all comparisons

    def judge(self, candidates: Mapping[str, Sequence[Decisions]]) -> Confirmation:
        result = self._result
        if not candidates:
            return result
        first = {key: options[0] for key, options in candidates.items()}
        won, comparison = self._winners(candidates, first, self._compare(first))
        result.kept = won
        result.before = comparison.whole.seconds[0] if comparison.whole.before else 0.0
        result.ratio = comparison.whole.ratio if won else 1.0
        result.after = result.before * result.ratio
        for key, rounds in comparison.kernels.items():
            if key in won:
                result.kernels[key] = _gain(rounds)
        return result

    def _winners(self, candidates: Mapping[str, Sequence[Decisions]], first: dict[str, Decisions], opening: Comparison) -> _Found:
        """Candidates that together make the model faster, and the comparison that shows it; none, and the opening one, if there are no such."""
        found: list[_Found] = [(first, opening)]
        for n in range(1, max(map(len, candidates.values()))):
            if not self._time_left(2):  # for the last one as well
                break
            others = {key: options[min(n, len(options) - 1)] for key, options in candidates.items()}
            found.append((others, self._compare(others)))
        best = self._best(candidates)
        if best and best not in (decisions for decisions, _ in found) and self._time_left():
            found.append((best, self._compare(best)))
        if not any(map(_won, found)) and (bisected := self._bisected(best)) is not None:
            found.append(bisected)
        for _, comparison in found:
            if comparison.note:
                self._note(comparison.note)
        # The best candidates of all kernels together only have to win, not by more than the others did: a single ratio is too uncertain.
        final = next((f for f in found if f[0] == best and _won(f)), None)
        return final or min(filter(_won, found), key=_ratio, default=({}, opening))

    def _best(self, candidates: Mapping[str, Sequence[Decisions]]) -> dict[str, Decisions]:
        """Of each kernel, the candidate that was the fastest in the model, unless it is slower than the default schedule."""
        found: dict[str, Decisions] = {}
        for key, options in candidates.items():
            seen = self._seen.get(key, {})
            best = min(options, key=lambda d: seen[encode(d)].ratio if encode(d) in seen else float("inf"))
            if encode(best) not in seen or not seen[encode(best)].lost:
                found[key] = best
        if slower := len(candidates) - len(found):
            self._note(f"{slower} of {len(candidates)} kernels are slower in the model than alone")
        return found

    def _bisected(self, losing: dict[str, Decisions]) -> _Found | None:
        """Of candidates that together lose, some that together gain."""
        if len(losing) < 2 or not self._time_left():
            return None
        best: _Found | None = None
        for half in self._halves(losing):
            if not self._time_left():
                break
            comparison = self._compare(half)
            found = (half, comparison) if _won((half, comparison)) else self._bisected(half)
            if found is None:
                continue
            if best is not None and self._time_left():
                together = {**best[0], **found[0]}
                both = self._compare(together)
                found = min((together, both), best, found, key=_ratio)
            best = found if best is None or _ratio(found) < _ratio(best) else best
        return best

    def _halves(self, keys: dict[str, Decisions]) -> Sequence[dict[str, Decisions]]:
        """Two parts of about equal shares of the time."""
        sides: tuple[dict[str, Decisions], dict[str, Decisions]] = ({}, {})
        weights = [0.0, 0.0]
        for key in sorted(keys, key=self._share, reverse=True):
            lighter = 0 if weights[0] <= weights[1] else 1
            sides[lighter][key] = keys[key]
            weights[lighter] += self._share(key) or 1.0
        return [side for side in sides if side]

    def _share(self, key: str) -> float:
        return self._result.kernels[key].before if key in self._result.kernels else 0.0

    def _compare(self, decisions: Mapping[str, Decisions]) -> Comparison:
        start = time.monotonic()
        comparison = self._subject.compare(decisions, self._seconds)
        self._longest = max(self._longest, time.monotonic() - start)
        self._result.comparisons += 1
        self._tell(self._result.comparisons)
        for key, d in decisions.items():
            if d not in (tried := self._result.tried.setdefault(key, [])):
                tried.append(d)
            if key in comparison.kernels:
                self._result.kernels[key] = _gain(comparison.kernels[key])
                seen = self._seen.setdefault(key, {})
                seen[encode(d)] = seen.get(encode(d), Rounds()) + comparison.kernels[key]
        return comparison

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)

    def _time_left(self, comparisons: int = 1) -> bool:
        return self._result.comparisons + comparisons <= MAX_COMPARISONS and time.monotonic() + comparisons * self._longest < self._deadline


def _gain(rounds: Rounds) -> Gain:
    return Gain(*rounds.seconds)


def _ratio(found: _Found) -> float:
    return found[1].whole.ratio


def _won(found: _Found) -> bool:
    """Whether the model is faster. Where other kernels, or other programs, make too much noise to tell, the model has to be faster as measured,
    and the tuned kernels have to be faster by more than chance explains."""
    decisions, comparison = found
    tuned = [rounds for key, rounds in comparison.kernels.items() if key in decisions]
    return comparison.whole.won or (comparison.whole.ratio < 1 and Rounds.total(tuned).won)
