"""End-to-end confirmation: what won alone must win in the whole model, or it is rolled back. A kernel alone has the caches and the threads
for itself, and its winner was the best of many noisy measurements. So A/B comparisons time the tuned model against the untuned one: first
the best few candidates of all kernels at once, then the best candidate of each; if these are no faster together, halves of them
(bisection)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from tcomp.autotune.measurement.results import Comparison, Rounds, summed
from tcomp.autotune.subject import TuningSubject
from tcomp.schedules.knobs import Decisions, encode

MAX_COMPARISONS = 16  # halving many kernels again and again finds ever less

Candidates = Mapping[str, Sequence[Decisions]]
"""The best ones of each task, by its key, the most promising first."""


@dataclass
class Confirmation:
    """The result of `confirm`: the decisions `kept`, by the keys of tasks, all that were `tried` in the model, and the gain: seconds of a
    run (`before`, `after`) and their `ratio` from neighbouring runs; 1 if nothing is kept. `kernels` are the seconds (before, after) that
    those of each task that was tuned take in a run; of those kept, `within_noise` are faster by no more than chance explains. `notes` say
    why some were rolled back."""

    kept: dict[str, Decisions] = field(default_factory=dict)
    tried: dict[str, list[Decisions]] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    ratio: float = 1.0
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    comparisons: int = 0
    notes: list[str] = field(default_factory=list)
    within_noise: set[str] = field(default_factory=set)

    @property
    def rolled_back(self) -> set[str]:
        """The tasks none of whose candidates was kept."""
        return self.tried.keys() - self.kept.keys()


class _Trial:
    """The comparison of the model with these decisions. It has won if the model is faster. Where other kernels, or other programs, make too
    much noise to tell, the model has to be faster as measured, and the tuned kernels have to be faster by more than chance explains."""

    def __init__(self, decisions: dict[str, Decisions], comparison: Comparison) -> None:
        self.decisions, self.comparison, self.ratio = decisions, comparison, comparison.whole.ratio
        tuned = [(rounds.before, rounds.after) for key, rounds in comparison.kernels.items() if key in decisions]
        self.won = comparison.whole.won or (self.ratio < 1 and Rounds(*map(summed, zip(*tuned, strict=True))).won)


def confirm(
    subject: TuningSubject, candidates: Candidates, seconds: float, deadline: float = inf, tell: Callable[[], None] = lambda: None
) -> Confirmation:
    """Judge the candidates. A comparison takes `seconds` besides building the model. There are at most `MAX_COMPARISONS`, after each of
    which `tell` is called, and only the first may start after `deadline` (of `time.monotonic`)."""
    judge = _Judge(subject, seconds, deadline, tell)
    result = judge.result
    if candidates:
        won = judge.winner(candidates)
        whole = won.comparison.whole
        result.kept, result.ratio = won.decisions, won.ratio if won.decisions else 1.0
        result.before = whole.seconds[0] if whole.before else 0.0
        result.after = result.before * result.ratio
        result.kernels |= {key: rounds.seconds for key, rounds in won.comparison.kernels.items() if key in won.decisions}
        result.within_noise = {key for key in won.decisions if not won.comparison.kernels.get(key, Rounds()).won}
        result.notes = [*dict.fromkeys(result.notes)]
    return result


@dataclass
class _Judge:
    subject: TuningSubject
    seconds: float
    deadline: float
    tell: Callable[[], None]
    longest: float = 0.0  # comparison, in seconds
    result: Confirmation = field(default_factory=Confirmation)
    seen: dict[tuple[str, str], Rounds] = field(default_factory=dict)  # of each task and candidate, in all comparisons

    def winner(self, candidates: Candidates) -> _Trial:
        """Candidates that together make the model faster, and the comparison that shows it; none, and the opening one, if there are no
        such."""
        found: list[_Trial] = []
        for n in range(max(map(len, candidates.values()))):
            if n and not self.time_left(2):  # for the last one as well
                break
            found.append(self.compare({key: options[min(n, len(options) - 1)] for key, options in candidates.items()}))
        best = self.best(candidates)
        if best and best not in (trial.decisions for trial in found) and self.time_left():
            found.append(self.compare(best))
        if not any(trial.won for trial in found) and (bisected := self.bisected(best)) is not None:
            found.append(bisected)
        self.result.notes += (f"{failure.status}: {failure.reason}" for trial in found if (failure := trial.comparison.failure))
        # The best candidates of all kernels together only have to win, not by more than the others did: a single ratio is too uncertain.
        final = next((trial for trial in found if trial.decisions == best and trial.won), None)
        final = final or min((t for t in found if t.won), key=lambda t: t.ratio, default=_Trial({}, found[0].comparison))
        return self.without_slower(final)

    def without_slower(self, trial: _Trial) -> _Trial:
        """A trial that won, without the kernels in it that are slower in the model: others made up for them."""
        while slower := [key for key, d in trial.decisions.items() if self.seen.get((key, encode(d)), Rounds()).lost]:
            self.result.notes.append(f"{len(slower)} of {len(trial.decisions)} kernels are slower in the model: they are rolled back")
            rest, last = {key: d for key, d in trial.decisions.items() if key not in slower}, trial
            trial = self.compare(rest) if rest and self.time_left() else _Trial(rest, last.comparison)
            if not trial.won:  # than what won with them, it is no slower
                trial = _Trial(rest, last.comparison)
        return trial

    def best(self, candidates: Candidates) -> dict[str, Decisions]:
        """Of each kernel, the candidate that was the fastest in the model, unless it is slower than the default schedule."""
        found: dict[str, Decisions] = {}
        for key, options in candidates.items():
            rounds, best = min(((self.seen.get((key, encode(d)), Rounds()), d) for d in options), key=lambda seen: seen[0].ratio)
            if not rounds.before or not rounds.lost:
                found[key] = best
        if slower := len(candidates) - len(found):
            self.result.notes.append(f"{slower} of {len(candidates)} kernels are slower in the model than alone")
        return found

    def bisected(self, losing: dict[str, Decisions]) -> _Trial | None:
        """Of candidates that together lose, some that together gain: from halves of about equal shares of the time."""
        if len(losing) < 2 or not self.time_left():
            return None
        shares = {key: self.result.kernels.get(key, (0.0, 0.0))[0] for key in losing}
        halves: list[dict[str, Decisions]] = [{}, {}]
        for key in sorted(losing, key=shares.__getitem__, reverse=True):
            min(halves, key=lambda half: sum(shares[k] or 1.0 for k in half))[key] = losing[key]
        winners: list[_Trial] = []
        for half in halves:
            if self.time_left():
                trial = self.compare(half)
                winners += filter(None, (trial if trial.won else self.bisected(half),))
        if len(winners) == 2 and self.time_left():
            winners.insert(0, self.compare(winners[0].decisions | winners[1].decisions))
        return min(winners, key=lambda t: t.ratio, default=None)

    def compare(self, decisions: dict[str, Decisions]) -> _Trial:
        start = time.monotonic()
        comparison = self.subject.compare(decisions, self.seconds)
        self.longest = max(self.longest, time.monotonic() - start)
        self.result.comparisons += 1
        self.tell()
        for key, d in decisions.items():
            if d not in (tried := self.result.tried.setdefault(key, [])):
                tried.append(d)
            if (rounds := comparison.kernels.get(key)) is not None:
                self.result.kernels[key] = rounds.seconds
                self.seen[key, encode(d)] = self.seen.get((key, encode(d)), Rounds()) + rounds
        return _Trial(decisions, comparison)

    def time_left(self, comparisons: int = 1) -> bool:
        return self.result.comparisons + comparisons <= MAX_COMPARISONS and time.monotonic() + comparisons * self.longest < self.deadline
