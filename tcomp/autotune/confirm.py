"""End-to-end confirmation: what won alone must win in the whole model, or it is not used.

A kernel alone has the caches and the threads for itself, and its winner was the best of many noisy measurements. So the tuned model is timed
against the untuned one, in a fresh process, and the profiles of both tell how fast each kernel is there. Heats go through the best few
candidates of all kernels at once; the final is between the untuned model and that with the best of each kernel, those left out that are
slower than before. If the model as a whole is no faster even so, the culprits are found by bisection, the kernels halved by their shares of
the time; what is not proved to gain in the time given is rolled back. A model that is not faster is not tuned: the untuned one is what is
left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tcomp.autotune.measurement.ab_comparison import Contest, Rounds, summed
from tcomp.autotune.subject import Subject
from tcomp.schedules.knobs import Decisions, encode

MOST = 16  # contests: halving many kernels again and again finds ever less

_Found = tuple[dict[str, Decisions], Contest]  # winners, and the contest in which they took part


@dataclass(frozen=True)
class Gain:
    """Seconds that the kernels of one task take in a run, before and after."""

    before: float
    after: float


@dataclass
class Confirmation:
    """What was kept, by the keys of tasks, `tried`, all that ran in the model, and what the whole gained: seconds of a run (`before`,
    `after`), `ratio` their ratio, from neighbouring runs; 1 where nothing is left. `kernels` are those that were tuned. `notes` say why
    something was rolled back."""

    kept: dict[str, Decisions] = field(default_factory=dict)
    tried: dict[str, list[Decisions]] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    ratio: float = 1.0
    kernels: dict[str, Gain] = field(default_factory=dict)
    contests: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def rolled_back(self) -> set[str]:
        """Tasks of which nothing was kept."""
        return self.tried.keys() - self.kept.keys()


def confirm(
    subject: Subject,
    candidates: Mapping[str, Sequence[Decisions]],
    seconds: float,
    deadline: float = float("inf"),
    tell: Callable[[int], None] = lambda contests: None,
) -> Confirmation:
    """Judge the best candidates of each task, by its key, the most promising first. A contest takes `seconds` beside building the model; none
    starts after `deadline` (of `time.monotonic`) but the first, and none after `MOST`. `tell` hears how many there were."""
    return _Trial(subject, seconds, deadline, tell).judge(candidates)


class _Trial:
    def __init__(self, subject: Subject, seconds: float, deadline: float, tell: Callable[[int], None]) -> None:
        self._subject, self._seconds, self._deadline, self._tell = subject, seconds, deadline, tell
        self._longest = 0.0
        self._result = Confirmation()
        self._seen: dict[str, dict[str, Rounds]] = {}  # of each task, by candidate, in all contests

    def judge(self, candidates: Mapping[str, Sequence[Decisions]]) -> Confirmation:
        result = self._result
        if not candidates:
            return result
        first = {key: options[0] for key, options in candidates.items()}
        won, contest = self._winners(candidates, first, self._contest(first))
        result.kept = won
        result.before = contest.whole.seconds[0] if contest.whole.before else 0.0
        result.ratio = contest.whole.ratio if won else 1.0
        result.after = result.before * result.ratio
        for key, rounds in contest.kernels.items():
            if key in won:
                result.kernels[key] = _gain(rounds)
        return result

    def _winners(self, candidates: Mapping[str, Sequence[Decisions]], first: dict[str, Decisions], opening: Contest) -> _Found:
        """Candidates that together make the model faster, and the contest that shows it; none, and the opening one."""
        found: list[_Found] = [(first, opening)]
        for n in range(1, max(map(len, candidates.values()))):
            if not self._time_left(2):  # for the final as well
                break
            heat = {key: options[min(n, len(options) - 1)] for key, options in candidates.items()}
            found.append((heat, self._contest(heat)))
        best = self._best(candidates)
        if best and best not in (decisions for decisions, _ in found) and self._time_left():
            found.append((best, self._contest(best)))
        if not any(map(_won, found)) and (bisected := self._bisected(best)) is not None:
            found.append(bisected)
        for _, contest in found:
            if contest.reason:
                self._note(contest.reason)
        # What is put together of the best, kernel by kernel, needs to win, not to win by more than each heat: a single ratio is that uncertain.
        final = next((f for f in found if f[0] == best and _won(f)), None)
        return final or min(filter(_won, found), key=_ratio, default=({}, opening))

    def _best(self, candidates: Mapping[str, Sequence[Decisions]]) -> dict[str, Decisions]:
        """Of each kernel, the candidate that was the fastest in the model, unless that is slower than what was there before."""
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
        for key, d in decisions.items():
            if d not in (tried := self._result.tried.setdefault(key, [])):
                tried.append(d)
            if key in contest.kernels:
                self._result.kernels[key] = _gain(contest.kernels[key])
                seen = self._seen.setdefault(key, {})
                seen[encode(d)] = seen.get(encode(d), Rounds()) + contest.kernels[key]
        return contest

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)

    def _time_left(self, contests: int = 1) -> bool:
        return self._result.contests + contests <= MOST and time.monotonic() + contests * self._longest < self._deadline


def _gain(rounds: Rounds) -> Gain:
    return Gain(*rounds.seconds)


def _ratio(found: _Found) -> float:
    return found[1].whole.ratio


def _won(found: _Found) -> bool:
    """Whether the model is faster. Where other kernels, or other programs, make too much noise for that to be seen, it has to be faster as
    measured, and what was tuned has to be so in more rounds than chance explains."""
    decisions, contest = found
    tuned = [rounds for key, rounds in contest.kernels.items() if key in decisions]
    together = Rounds(summed([r.before for r in tuned]), summed([r.after for r in tuned]))
    return contest.whole.won or (contest.whole.ratio < 1 and together.won)
