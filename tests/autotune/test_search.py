"""The search: new candidates that can be made, the same for the same seed, and better ones sooner than by chance."""

from __future__ import annotations

from math import log
from random import Random
from statistics import mean

import pytest

from tcomp.autotune.cost_model import CostModel
from tcomp.autotune.database.entries import Record
from tcomp.autotune.measurement.results import Measurement, Outcome
from tcomp.autotune.search import Search, neighbours
from tcomp.autotune.tasks import Program, Task, instantiate, sample
from tcomp.errors import ScheduleError
from tcomp.schedules import Schedule
from tcomp.schedules.knobs import Decisions, Knobs, decode, encode
from tcomp.target import CpuTarget, CudaTarget, Target
from tests.autotune.spaces import product, refused, scaled, split_scaled

HASWELL = CpuTarget.parse("cpu -march=x86_64 -mcpu=haswell")
SKYLAKE = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512")
SCALED = Program.of(scaled(), HASWELL, 2, schedule=split_scaled)


def measured(task: Task, decisions: Decisions, cost: float | None) -> Record:
    measurement = Measurement(Outcome.OK, (cost,), "", (1.0,)) if cost is not None else Measurement(Outcome.CRASH, reason="it died")
    return Record(task, encode(decisions), "", measurement, cost, None, {}, 0.0)


def test_it_is_deterministic() -> None:
    task = Program.of(product(), HASWELL, 1)

    def run() -> list[str]:
        search, records, rng = Search(HASWELL), [measured(task, {}, 1.0)], Random(7)
        for _ in range(2):
            records += [measured(task, d, 1.0 + len(encode(d)) / 100) for d in search(task, records, 4, rng)]
        return [r.decisions for r in records]

    first = run()
    assert first == run() and len(first) == 9


@pytest.mark.parametrize("target", [HASWELL, CudaTarget.parse("cuda -arch=sm_90a")], ids=str)
def test_what_is_proposed_is_new_and_can_be_made(target: Target) -> None:
    task, rng = Program.of(product(64, 64, 64) if isinstance(target, CudaTarget) else product(), target, 1), Random(1)
    search, records = Search(target), [measured(task, {}, 1.0)]
    for _ in range(4):
        proposed = search(task, records, 5, rng)
        assert 0 < len(proposed) <= 5
        records += [measured(task, d, 1.0) for d in proposed]
    made = [instantiate(task, d) for d in [{}, *search(task, records, 5, rng)]]
    identities = [c.identity for c in made] + [instantiate(task, decode(r.decisions)).identity for r in records[1:]]
    assert len(set(identities)) == len(identities)
    assert not any(name.endswith("threads") for c in made for name in c.decisions)  # there is one thread


def test_options_beside_one() -> None:
    assert neighbours((1, 2, 4, 8), 4) == [2, 8] and neighbours(("a", "b"), "a") == ["b"] and neighbours((1, 2), 3) == []
    assert neighbours(((1, 2), (4, 2), (2, 2), (2, 4)), (2, 2)) == [(1, 2), (4, 2), (2, 4)]
    tiles = (((0,), 8, 1), ((0,), 8, 2), ((0,), 8, 4), ((0, 1), 8, 2), ((2,), 8, 2))  # along axes of an image
    assert neighbours(tiles, tiles[1]) == [tiles[0], tiles[2], tiles[3]]


def test_a_space_is_searched_to_its_end() -> None:
    search, records, rng = Search(HASWELL), [measured(SCALED, {}, 1.0)], Random(2)
    for _ in range(40):
        proposed = search(SCALED, records, 3, rng)
        if not proposed:
            break
        records += [measured(SCALED, d, 1.0 + len(records) / 10) for d in proposed]
    assert len({r.decisions for r in records}) == len(records) == 1 + 3 * 4


def test_what_is_refused_is_not_proposed() -> None:
    task = Program.of(scaled(), HASWELL, 1, schedule=refused)
    assert Search(HASWELL)(task, [measured(task, {}, 1.0)], 4, Random(3)) == []


def picky(s: Schedule, knobs: Knobs) -> None:
    _outer, inner = s.split("B.i", knobs.choice("factor", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20), 4))
    again = knobs.flag("again", False)
    if again and knobs.asked["factor"].value != 8:
        raise ScheduleError("only eights may be cut again")
    if again:
        s.split(inner, knobs.choice("second", (1, 2, 4), 1))


def test_decisions_that_hang_on_others() -> None:
    task = Program.of(scaled(), HASWELL, 1, schedule=picky)
    search, records, rng = Search(HASWELL), [measured(task, {}, 1.0)], Random(4)
    for _ in range(12):
        records += [measured(task, d, 1.0) for d in search(task, records, 4, rng)]
    found = [decode(r.decisions) for r in records]
    assert all(d.get("factor") == 8 for d in found if d.get("again"))
    assert len(found) == 1 + 11 + 3  # all but what is refused


def test_failures_are_not_proposed_again_and_do_not_lead() -> None:
    task = Program.of(product(), HASWELL, 1)
    search, rng = Search(HASWELL), Random(5)
    records = [measured(task, {}, 1.0)]
    for _ in range(3):
        records += [measured(task, d, None) for d in search(task, records, 4, rng)]
    proposed = search(task, records, 4, rng)
    assert proposed and not {encode(d) for d in proposed} & {r.decisions for r in records}
    assert search.predicted(task, proposed[0]) is not None


def test_records_of_an_earlier_run_are_learned_from() -> None:
    task = Program.of(product(), HASWELL, 1)
    rng = Random(6)
    records = [measured(task, sample(task, rng).decisions, 1.0) for _ in range(12)]
    known = {r.decisions for r in records}
    assert not known & {encode(d) for d in Search(HASWELL)(task, records, 6, Random(6))}
    odd = measured(task, {"no such": 1, "C.acc.tile": (999, 1)}, 0.5)  # of an earlier version
    assert Search(HASWELL)(task, [*records, odd], 6, Random(6))


def test_no_structure_gets_all_places() -> None:
    search = Search(HASWELL)
    proposed = search(SCALED, [measured(SCALED, {}, 1.0)], 6, Random(8))
    structures = [encode({n: v for n, v in d.items() if isinstance(v, bool)}) for d in proposed]
    assert max(map(structures.count, structures)) <= 3


def test_predictions_are_on_the_scale_of_the_records() -> None:
    task, search, rng = Program.of(product(), HASWELL, 1), Search(HASWELL), Random(9)
    assert search.predicted(task, {}) is None
    records = [measured(task, {}, 250.0)]
    proposed = search(task, records, 4, rng)
    assert search.predicted(task, {"never": "proposed"}) is None
    for decisions in proposed:
        predicted = search.predicted(task, decisions)
        assert predicted is not None and 2.5 < predicted < 25_000


def test_it_finds_better_ones_than_chance() -> None:
    """A synthetic cost over the real space of a matrix product, of which the analytic model knows nothing."""
    task = Program.of(product(64, 256, 64), SKYLAKE, 1)

    def cost(decisions: Decisions) -> float:
        answers = instantiate(task, decisions).answers
        rows, vectors = answers["C.acc.tile"].value
        packed = answers["B.pack"].value
        return 1.0 + abs(log(rows / 7)) + 0.5 * abs(log(vectors / 3)) + (0.0 if packed else 0.4)

    search, rng = Search(SKYLAKE, CostModel()), Random(0)
    records = [measured(task, {}, cost({}))]
    while len(records) < 33:
        records += [measured(task, d, cost(d)) for d in search(task, records, 8, rng)]
    found = [r.cost for r in records if r.cost is not None]
    rng, drawn = Random(10), {}
    while len(drawn) < 33:
        c = sample(task, rng)
        drawn[c.identity] = cost(c.decisions)
    assert min(found) < 1.3 and mean(found) < mean(drawn.values())
