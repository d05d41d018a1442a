"""End-to-end confirmation: what won alone must win in the whole model, or it is not used.

A kernel alone has the caches and the threads for itself, and its winner was the best of many noisy measurements. So the tuned model is timed
against the untuned one, in a fresh process. Kernels that their model runs slower than before are rolled back. If the model as a whole is no
faster even so, the culprits are found by bisection, the kernels halved by their shares of the time; what is not proved to gain in the
time given is rolled back. A model that is not faster is not tuned: the untuned one is what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tcomp.autotune.contest import Contest, Rounds, summed
from tcomp.autotune.subject import Subject
from tcomp.schedules.knobs import Decisions

_Found = tuple[dict[str, Decisions], Contest]  # winners, and the contest in which they took part


@dataclass(frozen=True)
class Gain:
    """Seconds that the kernels of one task take in a run, before and after."""

    before: float
    after: float


@dataclass
class Confirmation:
    """What was kept, by the keys of tasks, and what the whole gained: seconds of a run (`before`, `after`), `ratio` their ratio, from
    neighbouring runs; 1 where nothing is left. `kernels` are those that were tuned. `notes` say why something was rolled back."""

    kept: dict[str, Decisions] = field(default_factory=dict)
    rolled_back: dict[str, Decisions] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    ratio: float = 1.0
    kernels: dict[str, Gain] = field(default_factory=dict)
    contests: int = 0
    notes: list[str] = field(default_factory=list)


def confirm(
    subject: Subject,
    decisions: Mapping[str, Decisions],
    seconds: float,
    deadline: float = float("inf"),
    tell: Callable[[int], None] = lambda contests: None,
) -> Confirmation:
    """Judge the winners, `decisions` by the keys of their tasks. A contest takes `seconds` beside building the model; none starts after
    `deadline` (of `time.monotonic`) but the first. `tell` hears how many there were."""
    return _Trial(subject, seconds, deadline, tell).judge(dict(decisions))


class _Trial:
    def __init__(self, subject: Subject, seconds: float, deadline: float, tell: Callable[[int], None]) -> None:
        self._subject, self._seconds, self._deadline, self._tell = subject, seconds, deadline, tell
        self._longest = 0.0
        self._result = Confirmation()

    def judge(self, wanted: dict[str, Decisions]) -> Confirmation:
        result = self._result
        won, contest = self._winners(wanted)
        result.kept = won
        result.rolled_back = {key: d for key, d in wanted.items() if key not in won}
        if contest is not None:
            result.before = median(contest.whole.before)
            result.ratio = contest.whole.ratio if won else 1.0
            result.after = result.before * result.ratio
            self._compare(contest, won)
        return result

    def _winners(self, wanted: dict[str, Decisions]) -> tuple[dict[str, Decisions], Contest | None]:
        """Those of some winners that together make the model faster, and the contest that shows it."""
        if not wanted:
            return {}, None
        first = self._contest(wanted)
        self._compare(first, wanted)
        found: list[_Found] = [(wanted, first)]
        rest = wanted
        if slower := {key for key in wanted if key in first.kernels and first.kernels[key].lost}:
            self._note(f"{len(slower)} of {len(wanted)} kernels are slower in the model than alone")
            rest = {key: d for key, d in wanted.items() if key not in slower}
            if rest and self._time_left():
                found.append((rest, self._contest(rest)))
        if not any(map(_won, found)) and (bisected := self._bisected(rest)) is not None:
            found.append(bisected)
        for _, contest in found:
            if contest.reason:
                self._note(contest.reason)
        return min(filter(_won, found), key=_ratio, default=({}, first if first.whole.before else None))

    def _bisected(self, losing: dict[str, Decisions]) -> _Found | None:
        """Of winners that together lose, some that together gain."""
        if len(losing) < 2 or not self._time_left():
            return None
        best: _Found | None = None
        for half in self._halves(losing):
            if not self._time_left():
                break
            contest = self._contest(half)
            found = (half, contest) if _won((half, contest)) else self._bisected(half)
            if found is None:
                continue
            if best is not None and self._time_left():
                together = {**best[0], **found[0]}
                both = self._contest(together)
                found = min((together, both), best, found, key=_ratio)
            best = found if best is None or _ratio(found) < _ratio(best) else best
        return best

    def _halves(self, keys: dict[str, Decisions]) -> Sequence[dict[str, Decisions]]:
        """Of about equal shares of the time."""
        sides: tuple[dict[str, Decisions], dict[str, Decisions]] = ({}, {})
        weights = [0.0, 0.0]
        for key in sorted(keys, key=self._share, reverse=True):
            lighter = 0 if weights[0] <= weights[1] else 1
            sides[lighter][key] = keys[key]
            weights[lighter] += self._share(key) or 1.0
        return [side for side in sides if side]

    def _share(self, key: str) -> float:
        return self._result.kernels[key].before if key in self._result.kernels else 0.0

    def _contest(self, decisions: Mapping[str, Decisions]) -> Contest:
        start = time.monotonic()
        contest = self._subject.contest(decisions, self._seconds)
        self._longest = max(self._longest, time.monotonic() - start)
        self._result.contests += 1
        self._tell(self._result.contests)
        return contest

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)

    def _time_left(self) -> bool:
        return time.monotonic() + self._longest < self._deadline

    def _compare(self, contest: Contest, tuned: Mapping[str, Decisions]) -> None:
        """Keep the times of the tuned kernels."""
        for key, rounds in contest.kernels.items():
            if key in tuned:
                self._result.kernels[key] = Gain(median(rounds.before), median(rounds.after))


def _ratio(found: _Found) -> float:
    return found[1].whole.ratio


def _won(found: _Found) -> bool:
    """Whether the model is faster. Where other kernels, or other programs, make too much noise for that to be seen, it has to be faster as
    measured, and what was tuned has to be so in more rounds than chance explains."""
    decisions, contest = found
    tuned = [rounds for key, rounds in contest.kernels.items() if key in decisions]
    together = Rounds(summed([r.before for r in tuned]), summed([r.after for r in tuned]))
    return contest.whole.won or (contest.whole.ratio < 1 and together.won)
