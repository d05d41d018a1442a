"""Random graphs are compiled and run, and what comes of each is judged."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx

import tcomp
from tcomp.errors import ImportModelError, InputError, UnsupportedError
from tests.fuzz_graphs import graph
from tests.fuzz_graphs.graph import Graph, Unfit, Value
from tests.fuzz_graphs.operators import OPERATORS

RIGHT, WRONG, REFUSED, REFUSED_BY_BOTH, ERROR, DISPUTED, EMPTY = (
    "right",
    "wrong",
    "refused",
    "refused by both",
    "error",
    "disputed",
    "no graph",
)
TOLERANCE = {
    "float16": 2e-2,
    "float32": 1e-3,
    "float64": 1e-3,
}  # of the largest magnitude: float64 is computed as float32 by some references


SLOW = 60  # seconds of the processor after which a case has failed
STUCK = 10 * SLOW  # likewise, of the clock
FINDINGS = (WRONG, DISPUTED, REFUSED, ERROR)
Found = list[tuple[int, str, str]]  # number, outcome, detail


class Verdict(NamedTuple):
    """What became of a case, why, and the operators in it."""

    outcome: str
    detail: str
    operators: Counter[str]


def build(seed: int, number: int) -> Graph:
    """The graph of a case."""
    g = Graph(f"{seed}/{number}")
    names, wanted = [*OPERATORS], g.rng.randint(1, 9)
    for _ in range(4 * wanted):
        if len(g.nodes) >= wanted:
            break
        try:
            OPERATORS[g.rng.choice(names)](g)
        except Unfit:
            continue
    return g


def judged(g: Graph) -> Verdict:
    """Compile and run a graph."""
    operators = Counter(node.op_type for node in g.nodes)
    if not g.nodes:
        return Verdict(EMPTY, "", operators)
    model = g.model()
    feeds = {v.name: v.array for v in g.inputs if v.name in {i.name for i in model.graph.input}}
    try:
        found = tcomp.compile(model, threads=1).run(feeds)
    except (UnsupportedError, ImportModelError, InputError) as error:
        peer = by_onnxruntime(model, feeds)
        return Verdict(REFUSED if isinstance(peer, dict) else REFUSED_BY_BOTH, f"{type(error).__name__}: {error}", operators)
    problems = [(v, text) for v in g.outputs if (text := difference(v, found[v.name]))]
    if not problems:
        return Verdict(RIGHT, "", operators)
    peer = by_onnxruntime(*needed(model, feeds, {v.name for v, _ in problems}))
    makers = {name: node.op_type for node in g.nodes for name in node.output}
    text = "; ".join(f"{makers[v.name]} {text}" for v, text in problems)
    if isinstance(peer, dict) and not any(difference(v._replace(array=peer[v.name]), found[v.name]) for v, _ in problems):
        return Verdict(RIGHT, f"the reference differs: {text}", operators)
    if isinstance(peer, str):
        steps = by_steps(g)
        if steps is not None and not any(difference(v._replace(array=steps[v.name]), found[v.name]) for v, _ in problems):
            return Verdict(RIGHT, f"the reference differs: {text}", operators)
    agreed = isinstance(peer, dict) and not any(difference(v, peer[v.name]) for v, _ in problems)
    return Verdict(WRONG if agreed else DISPUTED, text, operators)


def by_steps(g: Graph) -> dict[str, np.ndarray] | None:
    """All values of a graph, node by node: of ONNX Runtime, or of the reference where it lacks the operator for some type; None where
    neither takes what came before."""
    known = {v.name: v.array for v in (*g.inputs, *g.constants)}
    for node in g.nodes:
        inner = [name for a in node.attribute for part in a.g.node for name in part.input]
        given = [Value(name, known[name]) for name in dict.fromkeys((*node.input, *inner)) if name in known]
        alone, feeds = graph.model([node], given, list(node.output)), {v.name: v.array for v in given}
        found = by_onnxruntime(alone, feeds)
        if isinstance(found, str):
            try:
                found = dict(zip(node.output, map(np.asarray, graph.evaluated(alone, feeds)), strict=True))
            except Exception:  # noqa: BLE001  errors of many kinds
                return None
        known |= found
    return known


def needed(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: set[str]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """What of a model and its inputs these outputs need: ONNX Runtime lacks some operators for some types."""
    part, read = onnx.ModelProto(), set(names)
    part.CopyFrom(model)
    for node in reversed(model.graph.node):
        if read.intersection(node.output):
            read.update(node.input)
            read.update(name for a in node.attribute for inner in a.g.node for name in inner.input)
    fields: Sequence[tuple[Any, Sequence[Any]]] = (
        (part.graph.node, [n for n in model.graph.node if read.intersection(n.output)]),
        (part.graph.output, [o for o in model.graph.output if o.name in names]),
        (part.graph.input, [i for i in model.graph.input if i.name in read]),
    )
    for field, kept in fields:
        del field[:]
        field.extend(kept)
    return part, {name: array for name, array in feeds.items() if name in read}


def difference(v: Value, found: np.ndarray) -> str:
    """What is wrong with a result, "" if nothing is."""
    wanted = v.array
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{v.name}: {found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.kind in "bui":
        off = np.abs(found.astype(np.int64) - wanted.astype(np.int64)).max(initial=0)
        return f"{v.name}: off by {off}" if off > (0 if v.exact else 1) else ""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    error = np.where(same, 0, np.abs(a - b)).max(initial=0)
    scale = max(np.abs(b[np.isfinite(b)]).max(initial=0), 1.0)
    limit = TOLERANCE[wanted.dtype.name] * scale * (0.1 if v.exact else 1)
    return f"{v.name}: differs by {error:.3g} of {scale:.3g}" if not error <= limit else ""


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray] | str:
    """The outputs of ONNX Runtime, or why it has none."""
    try:
        import onnxruntime
    except ImportError as error:
        return str(error)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    except Exception as error:  # noqa: BLE001  errors of many kinds
        return str(error)


def batch(seed: int, first: int, count: int) -> tuple[Counter[str], Counter[str], Found]:
    """Outcomes, operators and findings of some cases."""
    outcomes, operators, found = Counter[str](), Counter[str](), Found()
    for limit in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(limit, _too_slow)
    for number in range(first, first + count):
        signal.alarm(STUCK)
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        try:
            verdict = judged(build(seed, number))
            outcome, detail = verdict.outcome, verdict.detail
            operators += verdict.operators
        except Exception:  # noqa: BLE001  a raw exception is a finding
            outcome, detail = ERROR, traceback.format_exc()[-1500:]
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        outcomes[outcome] += 1
        if outcome in FINDINGS or (outcome == RIGHT and detail):
            found.append((number, outcome, detail))
    return outcomes, operators, found


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"more than {SLOW} seconds")
