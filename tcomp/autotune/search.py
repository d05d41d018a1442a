"""The choice of candidates to measure: an evolutionary search, guided by the cost model (as in L. Zheng et al., Ansor, OSDI 2020). As
making the loops of a candidate takes about as long as building it, regression trees over the decisions alone pick a few of hundreds of
offspring first; the loops of these are made, and the cost model picks from them what is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, log2
from random import Random
from statistics import mean

import numpy as np

from tcomp.autotune.cost_model import CostModel, Sample, regression
from tcomp.autotune.database.entries import Record
from tcomp.autotune.features import CandidateSummary, Features, Vector, decision_vector
from tcomp.autotune.measurement.measurer import summarize_here
from tcomp.autotune.measurement.results import Measurement
from tcomp.autotune.tasks import Task
from tcomp.schedules.knobs import Answer, Decisions, Option, decode, encode
from tcomp.target import Target

_SAMPLES = 768  # that the model learns from, which takes a fraction of a second
_ROUNDS = 3  # of making candidates, as long as too many are refused or known
_FIRST = 12  # candidates that are made before anything is known
_DRAWN = 384  # decisions that the first stage picks from
_MADE = 1.5  # candidates that are made for each one that is asked for
_RANDOM = 0.1  # the share that is left to chance
_PARENTS = 12
_CROSSED = 0.3  # the share of offspring with two parents
_SECOND = 0.4  # how likely it is that a mutation changes one more decision, and another one after that
_NEIGHBOUR = 0.5  # how likely it is that a decision moves to a neighbouring option
_DISTANCE = 3  # (name, value) pairs by which candidates of a batch differ, if there are such: two decisions, or one and a default
_SHARE = 0.5  # of a batch, for candidates of one structure
_THREADS = "threads"  # the kind of decision that means nothing where there is one thread

Summarize = Callable[[Task, Sequence[Decisions]], Sequence[CandidateSummary | Measurement]]
"""Makes the loops of candidates and describes them, as `Measurer.summarize` does."""


class Search:
    """Proposes candidates of any number of tasks of a target, and learns from the records of all. The same calls get the same answers."""

    def __init__(self, target: Target, model: CostModel | None = None, summarize: Summarize = summarize_here) -> None:
        self.model, self._summarize = model or CostModel.of(target), summarize
        self._tasks: dict[str, _TaskKnowledge] = {}

    def __call__(self, task: Task, records: Sequence[Record], count: int, rng: Random, hints: Sequence[Decisions] = ()) -> list[Decisions]:
        """Up to `count` decisions, the most promising first, whose loops are unlike those of all records and of each other; fewer where
        no more are found. `records` are all of this task; `hints` are chosen in any case, if there are such loops."""
        known = self._tasks.setdefault(task.key, _TaskKnowledge(task, self._summarize))
        known.learn(records)
        samples = [s for other in self._tasks.values() if other is not known for s in other.samples()] + known.samples()
        self.model.fit(samples[-_SAMPLES:])
        hinted = known.make(hints)
        known.explore(self.model, ceil(_MADE * count), rng)
        return known.choose(self.model, count, rng, hinted[:count])

    def predicted(self, task: Task, decisions: Decisions) -> float | None:
        """The cost that the model expects of what was proposed last, on the scale of the task's records; None where it has no estimate."""
        known = self._tasks.get(task.key)
        if known is None or not (samples := known.samples()) or (made := known.made.get(encode(decisions))) is None:
            return None
        scores = self.model.scores([made.features, *(s.features for s in samples)])
        return exp(scores[0] + mean(log(s.cost) - score for s, score in zip(samples, scores[1:], strict=True)))


@dataclass(frozen=True, eq=False, slots=True)
class _Candidate:
    """A candidate whose loops were made: its decisions that are not the defaults, the names of all that can be changed (`asked`), and as
    text those decisions that are not numbers (`structure`)."""

    decisions: Decisions
    asked: tuple[str, ...]
    structure: str
    features: Features
    vector: Vector


@dataclass(eq=False)
class _TaskKnowledge:
    """The search state of one task: the decisions that its schedule function has asked for, and candidates by their decisions as text."""

    task: Task
    summarize: Summarize
    answers: dict[str, Answer] = field(default_factory=dict)  # the first one of each decision
    made: dict[str, _Candidate] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    loops: set[str] = field(default_factory=set)  # that were made, however they were decided upon
    costs: dict[str, float] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)  # whatever came of it

    def make(self, wanted: Sequence[Decisions]) -> list[str]:
        """Enter the candidates that can be made and whose loops are new; returns them, as text."""
        entered = []
        new = {text: decisions for decisions in wanted if (text := encode(decisions)) not in self.tried}
        self.tried.update(new)
        for c in self.summarize(self.task, [*new.values()]) if new else ():
            if isinstance(c, Measurement) or c.identity in self.loops:
                continue
            self.answers |= {name: answer for name, answer in c.answers.items() if name not in self.answers}
            asked = tuple(n for n, a in c.answers.items() if len(a.options) > 1 and not (self.task.threads == 1 and a.kind == _THREADS))
            structure = encode({name: value for name, value in c.decisions.items() if not _is_number(value)})
            entered.append(text := encode(c.decisions))
            self.tried.add(text)
            self.loops.add(c.identity)
            self.made[text] = _Candidate(c.decisions, asked, structure, c.features, self.vector(c.decisions))
        return entered

    def vector(self, decisions: Decisions) -> Vector:
        return decision_vector((name, a.kind, decisions.get(name, a.default)) for name, a in self.answers.items())

    def learn(self, records: Sequence[Record]) -> None:
        """Enter the candidates of records, and their costs."""
        self.make([{}, *(decode(record.decisions) for record in records)])
        for record in records:
            self.measured.add(record.decisions)
            if record.cost is not None:
                self.costs[record.decisions] = min(record.cost, self.costs.get(record.decisions, record.cost))

    def samples(self) -> list[Sample]:
        return [Sample(self.task.key, self.made[text].features, cost) for text, cost in self.costs.items() if text in self.made]

    def expected(self, model: CostModel) -> dict[str, float]:
        """The logarithm of the cost of each candidate: measured, else as the model has it, on the scale of the measured ones."""
        scores = dict(zip(self.made, model.scores([m.features for m in self.made.values()]).tolist(), strict=True))
        measured = {text: log(cost) for text, cost in self.costs.items() if text in self.made}
        offset = mean(value - scores[text] for text, value in measured.items()) if measured else 0.0
        failed = self.measured - self.costs.keys()
        return {**{text: score + offset for text, score in scores.items() if text not in failed}, **measured}

    def explore(self, model: CostModel, count: int, rng: Random) -> None:
        """Make the loops of `count` new candidates, or of fewer if there are no more."""
        for _ in range(_ROUNDS):
            if len(self.made) < _FIRST:
                self.make([self.drawn(rng) for _ in range(_FIRST - len(self.made))])
        expected = self.expected(model)
        parents = [self.made[text] for text in sorted(expected, key=lambda t: (expected[t], t))[:_PARENTS]]
        drawn = [self.drawn(rng) if rng.random() < _RANDOM else self.mutated(parents, rng) for _ in range(_DRAWN if parents else 0)]
        waiting = [decisions for text, decisions in {encode(d): d for d in drawn}.items() if text not in self.tried]
        if len(expected) > 1 and waiting:
            costs = np.array([*expected.values()]) - mean(expected.values())
            trees = regression(np.stack([self.made[text].vector for text in expected]), costs)
            guesses = trees.inplace_predict(np.stack([self.vector(d) for d in waiting]))
            waiting = [waiting[n] for n in np.argsort(guesses, kind="stable")]  # of equal guesses, the ones that chance brought first
        enough = len(self.made) + count
        for _ in range(_ROUNDS):
            number = min(enough - len(self.made), len(waiting))
            self.make([waiting.pop(rng.randrange(len(waiting)) if rng.random() < _RANDOM else 0) for _ in range(number)])

    def drawn(self, rng: Random) -> dict[str, Option]:
        asked = rng.choice([*self.made.values()]).asked if self.made else ()
        return self.without_defaults({name: rng.choice(self.answers[name].options) for name in asked})

    def mutated(self, parents: Sequence[_Candidate], rng: Random) -> dict[str, Option]:
        """Decisions of two parents mixed, or those of one with some of them changed; better parents are more likely."""
        first, second = (parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))] for _ in range(2))
        chosen, others = ({name: c.decisions.get(name, self.answers[name].default) for name in c.asked} for c in (first, second))
        if rng.random() < _CROSSED:
            mixed = {name: rng.choice((chosen, others)).get(name, self.answers[name].default) for name in {**chosen, **others}}
            return self.without_defaults(mixed)
        while chosen:  # change one decision, often to a neighbouring option; decisions with many options more often
            (name,) = rng.choices([*chosen], [log2(len(self.answers[n].options)) for n in chosen])
            options, present = self.answers[name].options, chosen[name]
            adjacent = neighbours(options, present)
            chosen[name] = rng.choice(adjacent if adjacent and rng.random() < _NEIGHBOUR else [o for o in options if o != present])
            if rng.random() >= _SECOND:
                break
        return self.without_defaults(chosen)

    def without_defaults(self, chosen: Mapping[str, Option]) -> dict[str, Option]:
        return {name: value for name, value in chosen.items() if value != self.answers[name].default}

    def choose(self, model: CostModel, count: int, rng: Random, hinted: Sequence[str]) -> list[Decisions]:
        """The hinted candidates and the most promising others, of several structures and different from each other."""
        expected = self.expected(model)
        pool = sorted((t for t in self.made if t not in self.measured), key=lambda t: (expected[t], t))
        chosen, taken = [*hinted], Counter[str]()  # how many of each structure
        for most, distance in ((ceil(_SHARE * count), _DISTANCE), (count, 1)):
            waiting = [t for t in pool if t not in chosen]
            while waiting and len(chosen) < count:
                found = self.made[waiting.pop(rng.randrange(len(waiting)) if rng.random() < _RANDOM else 0)]
                alike = any(len(found.decisions.items() ^ self.made[t].decisions.items()) < distance for t in chosen)
                if taken[found.structure] < most and not alike:
                    taken[found.structure] += 1
                    chosen.append(encode(found.decisions))
        return [self.made[text].decisions for text in sorted(chosen, key=lambda t: (expected[t], t))]


def neighbours(options: Sequence[Option], present: Option) -> list[Option]:
    """The options next to one: those before and after it; for tuples of numbers those that differ from it in one number, by the least
    amount."""
    if not (isinstance(present, tuple) and _is_number(present)):
        place = options.index(present) if present in options else -1
        return [options[n] for n in (place - 1, place + 1) if place >= 0 and 0 <= n < len(options)]
    found: dict[tuple[int, bool], tuple[float, Option]] = {}  # by what differs and whether it grows: by how much, and the option
    for other in options:
        if isinstance(other, tuple) and len(other) == len(present):
            differing = [n for n, (a, b) in enumerate(zip(other, present, strict=True)) if a != b]
            if len(differing) == 1:
                a, b = other[differing[0]], present[differing[0]]
                side, gap = (differing[0], a > b), 1.0 if isinstance(a, tuple) else abs(a - b)  # all different tuples are as far
                if side not in found or gap < found[side][0]:
                    found[side] = gap, other
    return [other for _, other in found.values()]


def _is_number(value: Option) -> bool:
    return all(map(_is_number, value)) if isinstance(value, tuple) else isinstance(value, int | float) and not isinstance(value, bool)
