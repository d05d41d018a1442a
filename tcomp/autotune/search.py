"""What to measure next: decisions that descend from the best so far, chosen by the model of cost.

An evolutionary search (as in L. Zheng et al., Ansor, OSDI 2020) with one more sieve, since making the loops of a candidate takes about as
long as building it: from hundreds of decisions, changed and crossed without any loops being made, trees over the decisions alone pick a
few; these are made, by whoever makes them, so that refusals and repetitions are known, and the model of cost picks from them what is
measured. Some are drawn at random at either stage, and no kind of structure gets all places of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, log2
from random import Random
from statistics import mean
from typing import Any

import numpy as np

from tcomp.autotune.cost_model import CostModel, Sample, regression
from tcomp.autotune.database.store import Record
from tcomp.autotune.features import Features, Made, Vector, decision_vector
from tcomp.autotune.space import realise
from tcomp.autotune.tasks import Task
from tcomp.errors import TcompError
from tcomp.schedules.knobs import Decisions, Option, decode, encode
from tcomp.target import Target

_SAMPLES = 768  # that the model learns from: a fraction of a second's work
_ROUNDS = 3  # of making candidates, as long as too many are refused or known
_FIRST = 12  # candidates that are made before there is anything to go by
_DRAWN = 384  # decisions that go through the first sieve
_MADE = 1.5  # candidates that are made for each one that is asked for
_RANDOM = 0.1  # the share that is left to chance
_PARENTS = 12
_CROSSED = 0.3  # the share of children with two parents
_SECOND = 0.4  # how likely it is that a mutation changes one more decision, and another one after that
_NEAR = 0.5  # how likely it is that a decision moves to an option beside it
_APART = 3  # names with values by which candidates of a batch differ, if there are such: two decisions, or one and a default
_SHARE = 0.5  # of a batch, for candidates of one structure
_THREADS = "threads"  # how a decision's name ends that means nothing where there is one thread

Maker = Callable[[Task, Sequence[Decisions]], Sequence[Made | None]]
"""Makes the loops of candidates; None for those that are refused."""


def make_here(task: Task, wanted: Sequence[Decisions]) -> list[Made | None]:
    """In this process, one after the other."""
    return [_made(task, decisions) for decisions in wanted]


def _made(task: Task, decisions: Decisions) -> Made | None:
    try:
        return Made.of(realise(task, decisions))
    except TcompError:
        return None


class Search:
    """Proposes candidates of any number of tasks of a target, and learns from the records of all. The same calls get the same answers."""

    def __init__(self, target: Target, model: CostModel | None = None, make: Maker = make_here) -> None:
        self.model, self._make = model or CostModel.of(target), make
        self._tasks: dict[str, _Known] = {}

    def __call__(self, task: Task, records: Sequence[Record], count: int, rng: Random, hints: Sequence[Decisions] = ()) -> list[Decisions]:
        """Up to `count` decisions, the most promising first, whose loops are unlike those of all records and of each other; fewer where
        no more are found. `records` are all of this task; `hints` are chosen in any case, if there are such loops."""
        known = self._tasks.setdefault(task.key, _Known(task, self._make))
        known.learn(records)
        samples = [s for other in self._tasks.values() if other is not known for s in other.samples()] + known.samples()
        self.model.fit(samples[-_SAMPLES:])
        hinted = known.make(hints)
        known.explore(self.model, ceil(_MADE * count), rng)
        return known.choose(self.model, count, rng, hinted[:count])

    def predicted(self, task: Task, decisions: Decisions) -> float | None:
        """The cost that the model expects of what was proposed last, on the scale of the task's records; None where it cannot tell."""
        known = self._tasks.get(task.key)
        made = known.made.get(encode(decisions)) if known else None
        samples = known.samples() if known else []
        if made is None or not samples:
            return None
        scores = self.model.scores([made.features, *(s.features for s in samples)])
        return exp(scores[0] + mean(log(s.cost) - score for s, score in zip(samples, scores[1:], strict=True)))


@dataclass(frozen=True, eq=False, slots=True)
class _Found:
    """A candidate whose loops were made: its decisions that are not the defaults, the names of all that can be changed, and those of
    its decisions that are no numbers."""

    decisions: Decisions
    asked: tuple[str, ...]
    structure: str
    features: Features
    vector: Vector


@dataclass(eq=False)
class _Known:
    """What is known of one task: the options of each decision, as far as it was asked for, and candidates by their decisions."""

    task: Task
    maker: Maker
    options: dict[str, tuple[Option, ...]] = field(default_factory=dict)
    defaults: dict[str, Option] = field(default_factory=dict)
    made: dict[str, _Found] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    loops: set[str] = field(default_factory=set)  # that were made, however they were decided upon
    costs: dict[str, float] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)  # whatever came of it

    def make(self, wanted: Sequence[Decisions]) -> list[str]:
        """Enter candidates, those that can be made and are of loops not seen before; returns them, as text."""
        entered = []
        new = {text: decisions for decisions in wanted if (text := encode(decisions)) not in self.tried}
        self.tried.update(new)
        for made in self.maker(self.task, [*new.values()]) if new else ():
            if made is None or made.identity in self.loops:
                continue
            for name, answer in made.answers.items():
                self.options.setdefault(name, answer.options)
                self.defaults.setdefault(name, answer.default)
            asked = tuple(
                n for n, a in made.answers.items() if len(a.options) > 1 and not (self.task.threads == 1 and n.endswith(_THREADS))
            )
            text = encode(made.decisions)
            self.tried.add(text)
            self.loops.add(made.identity)
            self.made[text] = _Found(made.decisions, asked, _structure(made.decisions), made.features, self.vector(made.decisions))
            entered.append(text)
        return entered

    def vector(self, decisions: Decisions) -> Vector:
        return decision_vector({**self.defaults, **decisions})

    # ------------------------------------------------------------ records

    def learn(self, records: Sequence[Record]) -> None:
        self.make([{}])
        self.make([decode(record.decisions) for record in records])
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

    # ------------------------------------------------------------ new ones

    def explore(self, model: CostModel, count: int, rng: Random) -> None:
        """Make the loops of `count` new candidates, if there are so many."""
        for _ in range(_ROUNDS):
            if len(self.made) < _FIRST:
                self.make([self.drawn(rng) for _ in range(_FIRST - len(self.made))])
        expected = self.expected(model)
        parents = [self.made[text] for text in sorted(expected, key=lambda t: (expected[t], t))[:_PARENTS]]
        children: dict[str, Decisions] = {}
        for _ in range(_DRAWN if parents else 0):
            child = self.drawn(rng) if rng.random() < _RANDOM else self.child(parents, rng)
            if (text := encode(child)) not in self.tried:
                children.setdefault(text, child)
        if len(expected) > 1 and children:
            trees = regression(
                np.stack([self.made[text].vector for text in expected]), np.array([*expected.values()]) - mean(expected.values())
            )
            guesses = trees.inplace_predict(np.stack([self.vector(c) for c in children.values()]))
            texts = [*children]  # of equal guesses, the ones that chance brought first
            children = {texts[n]: children[texts[n]] for n in np.argsort(guesses, kind="stable")}
        enough, before = len(self.made) + count, list(children)
        for _ in range(_ROUNDS):
            number = min(enough - len(self.made), len(before))
            self.make([children[before.pop(rng.randrange(len(before)) if rng.random() < _RANDOM else 0)] for _ in range(number)])

    def drawn(self, rng: Random) -> dict[str, Option]:
        """Each decision at random, as far as some candidate was asked for it."""
        asked = rng.choice([*self.made.values()]).asked if self.made else ()
        return self.plain({name: rng.choice(self.options[name]) for name in asked})

    def child(self, parents: Sequence[_Found], rng: Random) -> dict[str, Option]:
        """Of one or two parents, the better ones more often: decisions of either, or some of them changed."""
        first, second = (parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))] for _ in range(2))
        chosen = {name: first.decisions.get(name, self.defaults[name]) for name in first.asked}
        if rng.random() < _CROSSED:
            others = {name: second.decisions.get(name, self.defaults[name]) for name in second.asked}
            return self.plain({name: rng.choice((chosen, others)).get(name, self.defaults[name]) for name in {**chosen, **others}})
        while chosen:
            self.change(chosen, rng)
            if rng.random() >= _SECOND:
                break
        return self.plain(chosen)

    def change(self, chosen: dict[str, Option], rng: Random) -> None:
        """One decision for another option, often for one beside the present one; those with many options more often."""
        (name,) = rng.choices([*chosen], [log2(len(self.options[n])) for n in chosen])
        options, present = self.options[name], chosen[name]
        near = beside(options, present)
        chosen[name] = rng.choice(near if near and rng.random() < _NEAR else [o for o in options if o != present])

    def plain(self, chosen: Mapping[str, Option]) -> dict[str, Option]:
        """Decisions other than the defaults."""
        return {name: value for name, value in chosen.items() if value != self.defaults[name]}

    # ------------------------------------------------------------ the choice

    def choose(self, model: CostModel, count: int, rng: Random, hinted: Sequence[str]) -> list[Decisions]:
        expected = self.expected(model)
        pool = sorted((t for t in self.made if t not in self.measured), key=lambda t: (expected[t], t))
        chosen = [*hinted]
        taken: dict[str, int] = {}
        for most, apart in ((ceil(_SHARE * count), _APART), (count, 1)):
            waiting = [t for t in pool if t not in chosen]
            while waiting and len(chosen) < count:
                found = self.made[waiting.pop(rng.randrange(len(waiting)) if rng.random() < _RANDOM else 0)]
                like = any(len(found.decisions.items() ^ self.made[t].decisions.items()) < apart for t in chosen)
                if taken.get(found.structure, 0) < most and not like:
                    taken[found.structure] = taken.get(found.structure, 0) + 1
                    chosen.append(encode(found.decisions))
        return [self.made[text].decisions for text in sorted(chosen, key=lambda t: (expected[t], t))]


def beside(options: Sequence[Option], present: Option) -> list[Option]:
    """The options next to one: those before and after it; of tuples of numbers those that differ from it in one number, by as little as any."""
    if not (isinstance(present, tuple) and _is_number(present)):
        place = options.index(present) if present in options else -1
        return [options[n] for n in (place - 1, place + 1) if place >= 0 and 0 <= n < len(options)]
    found: dict[tuple[int, bool], tuple[Any, ...]] = {}
    for other in options:
        if isinstance(other, tuple) and len(other) == len(present):
            differing = [n for n, (a, b) in enumerate(zip(other, present, strict=True)) if a != b]
            if len(differing) == 1:
                (n,) = differing
                side = n, other[n] > present[n]
                if side not in found or _gap(other[n], present[n]) < _gap(found[side][n], present[n]):
                    found[side] = other
    return [*found.values()]


def _gap(a: Any, b: Any) -> float:
    """Between two numbers; lists of them are one as far from another as the next."""
    return 1.0 if isinstance(a, tuple) else abs(a - b)


def _structure(decisions: Decisions) -> str:
    return encode({name: value for name, value in decisions.items() if not _is_number(value)})


def _is_number(value: Option) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
