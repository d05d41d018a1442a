"""A page about a database: one HTML file with plots and without scripts. What comes from the database appears as text, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from tcomp.autotune.database.records import Record, Session, Verdict
from tcomp.autotune.database.store import Database
from tcomp.autotune.subject import title
from tcomp.autotune.tasks import Task
from tcomp.errors import TcompError
from tcomp.schedules.knobs import encode
from tcomp.schedules.trace import Trace

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 240, 60, 34  # of a plot, and the margins with its scales
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1b2733; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2.2em } h3 { font-size: 1em; margin: 1.6em 0 .3em; font-family: monospace }
table { border-collapse: collapse; width: 100% } td, th { padding: .25em .7em; text-align: left; border-bottom: 1px solid #e3e8ee }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.name { font-family: monospace; overflow-wrap: anywhere }
pre { background: #f5f7fa; padding: .8em; overflow-x: auto; font-size: 12px } svg { margin: .3em 1em .3em 0 }
.kept { color: #14733d } .back { color: #a33b12 } .dim { color: #68798c } figure { display: inline-block; margin: 0 } figcaption { font-size: 12px }
"""


@dataclass(frozen=True)
class _Tuned:
    task: Task
    records: Sequence[Record]
    verdict: Verdict | None

    @property
    def default(self) -> Record | None:
        return next((r for r in self.records if r.ok and r.decisions == encode({})), None)

    @property
    def best(self) -> Record | None:
        return min((r for r in self.records if r.ok), key=lambda r: r.cost or 0.0, default=None)


def page(database: Database) -> str:
    """The page as HTML."""
    verdicts = {v.task.key: v for v in database.verdicts()}
    by_task: dict[str, list[Record]] = {}
    for record in database.records():
        by_task.setdefault(record.task.key, []).append(record)
    tuned = [_Tuned(task, by_task.get(task.key, []), verdicts.get(task.key)) for task in database.tasks()]
    tuned.sort(key=lambda t: -(t.verdict.before if t.verdict else 0.0))
    sections = (_kernels, _failures, _predictions, _convergence, _winners, _machines)
    parts = [_sessions(database.sessions()), *(section(tuned) for section in sections)]
    name = escape(database.path.name)
    head = f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style></head>'
    return f"{head}<body><h1>Tuning: {name}</h1>{''.join(parts)}</body></html>\n"


# ---------------------------------------------------------------- sections


def _sessions(sessions: Sequence[Session]) -> str:
    rows = []
    for s in sessions:
        ratio, spent = s.summary.get("ratio"), s.summary.get("seconds")
        gain = f"{ratio:.3f}" if isinstance(ratio, float) and s.summary.get("contests") else "-"
        phases = ", ".join(f"{n} {_time(v)}" for n, v in spent.items() if isinstance(v, float)) if isinstance(spent, dict) else ""
        notes = s.summary.get("notes")
        said = "; ".join(map(str, notes)) if isinstance(notes, list) else ""
        numbers = map(_number, (_time(s.spent), s.trials, gain))
        rows.append((_cell(s.options.get("model") or "a program", "name"), _cell(s.state), *numbers, _cell(phases), _cell(said)))
    return _section("Runs", _table(("model", "state", "time>", "trials>", "tuned / untuned>", "spent on", ""), rows)) if rows else ""


def _kernels(tuned: Sequence[_Tuned]) -> str:
    rows = []
    for t in tuned:
        default, best, v = t.default, t.best, t.verdict
        alone = f"{(best.cost or 0) / default.cost:.3f}" if best and default and default.cost else "-"
        inside = f"{v.after / v.before:.3f}" if v and v.before else "-"
        verdict = _cell(v.judgement, "kept" if v.kept else "back") if v else _cell("not confirmed", "dim")
        times = [_time(r.cost) if r and r.cost else "-" for r in (default, best)]
        in_model = (_time(v.before), _time(v.after)) if v else ("-", "-")
        numbers = (len(t.records), sum(not r.ok for r in t.records), *times, alone, *in_model, inside)
        rows.append((_cell(title(t.task), "name"), *map(_number, numbers), verdict))
    columns = ("kernel", "trials>", "failed>", "default>", "best>", "alone>", "before, in a run>", "after>", "in the model>", "")
    return _section("Kernels", _table(columns, rows))


def _failures(tuned: Sequence[_Tuned]) -> str:
    counts = Counter((r.measurement.status, r.measurement.reason[:120]) for t in tuned for r in t.records if not r.ok)
    rows = [(_cell(status), _number(n), _cell(reason)) for (status, reason), n in counts.most_common(20)]
    return _section("What failed", _table(("", "candidates>", "reason"), rows)) if rows else ""


def _predictions(tuned: Sequence[_Tuned]) -> str:
    points = [(r.predicted, r.cost) for t in tuned for r in t.records if r.predicted and r.cost]
    if not points:
        return ""
    low, high = min(min(p) for p in points), max(max(p) for p in points)
    plot = _Plot((low, high), (low, high), True)
    plot.line([(low, low), (high, high)], "#b9c4d0")
    plot.dots(points)
    caption = f"{len(points)} candidates; on the line the prediction is right"
    return _section("Predicted and measured", plot.figure("predicted (s)", "measured (s)", caption))


def _convergence(tuned: Sequence[_Tuned]) -> str:
    figures = []
    for t in tuned:
        costs = [r.cost for r in t.records]
        good = [c for c in costs if c]
        if len(good) < 2 or t.default is None or not t.default.cost:
            continue
        base, least = t.default.cost, float("inf")
        best = []
        for n, cost in enumerate(costs):
            least = min(least, cost or least)
            best.append((float(n), least / base))
        dots = [(float(n), min(cost / base, 2.5)) for n, cost in enumerate(costs) if cost]
        plot = _Plot((0.0, float(len(costs) - 1)), (0.0, max(1.1, *(y for _, y in dots))), False)
        plot.line([(0.0, 1.0), (float(len(costs) - 1), 1.0)], "#b9c4d0")
        plot.dots(dots)
        plot.line([p for p in best if p[1] < float("inf")], "#14733d")
        figures.append(plot.figure("trial", "of the default's time", title(t.task)))
    return _section("Convergence", "".join(figures)) if figures else ""


def _winners(tuned: Sequence[_Tuned]) -> str:
    parts = []
    for t in tuned:
        if t.verdict is None or not t.verdict.kept:
            continue
        found = next((r for r in t.records if r.decisions == t.verdict.decisions and r.trace), None)
        try:
            steps = str(Trace.from_json(found.trace)) if found else ""
        except TcompError as error:
            steps = error.what
        parts.append(f"<h3>{escape(title(t.task))}</h3><pre>{escape(t.verdict.decisions)}\n\n{escape(steps)}</pre>")
    return _section("Winning schedules", "".join(parts)) if parts else ""


def _machines(tuned: Sequence[_Tuned]) -> str:
    seen = {tuple(sorted(r.environment.items())) for t in tuned for r in t.records}
    rows = [tuple(_cell(f"{name}: {value}") for name, value in machine) for machine in sorted(seen)]
    return _section("Measured on", "".join(_table((), [(cell,) for cell in row]) for row in rows)) if rows else ""


# ---------------------------------------------------------------- plots


class _Plot:
    """A plot with two scales, both logarithmic or both linear."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], logarithmic: bool) -> None:
        self._log = logarithmic
        self._x, self._y = (self._span(a) for a in (x, y))
        self._shapes: list[str] = []

    def _span(self, ends: tuple[float, float]) -> tuple[float, float]:
        low, high = (log10(e) for e in ends) if self._log else ends
        low, high = (floor(low), ceil(high)) if self._log else (low, high)
        return (low, high) if high > low else (low, low + 1)

    def _at(self, x: float, y: float) -> str:
        a, b = (log10(x), log10(y)) if self._log else (x, y)
        across = _LEFT + (a - self._x[0]) / (self._x[1] - self._x[0]) * (_WIDTH - _LEFT - 10)
        down = (_HEIGHT - _BOTTOM) - (b - self._y[0]) / (self._y[1] - self._y[0]) * (_HEIGHT - _BOTTOM - 10)
        return f"{across:.1f},{down:.1f}"

    def line(self, points: Iterable[tuple[float, float]], color: str) -> None:
        path = " ".join(self._at(*p) for p in points)
        self._shapes.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')

    def dots(self, points: Iterable[tuple[float, float]]) -> None:
        for p in points:
            x, y = self._at(*p).split(",")
            self._shapes.append(f'<circle cx="{x}" cy="{y}" r="2" fill="#2b6cb0" fill-opacity="0.55"/>')

    def figure(self, across: str, up: str, caption: str) -> str:
        """The plot as HTML."""
        marks = []
        for n in range(5):
            fraction = n / 4
            x, y = (low + fraction * (high - low) for low, high in (self._x, self._y))
            px, py = _LEFT + fraction * (_WIDTH - _LEFT - 10), (_HEIGHT - _BOTTOM) - fraction * (_HEIGHT - _BOTTOM - 10)
            marks.append(_text(px, _HEIGHT - _BOTTOM + 14, self._label(x), "middle"))
            marks.append(_text(_LEFT - 6, py + 4, self._label(y), "end"))
        marks.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 4, across, "middle"))
        marks.append(f'<g transform="translate(12 {_HEIGHT / 2}) rotate(-90)">{_text(0, 0, up, "middle")}</g>')
        frame = f'<rect x="{_LEFT}" y="10" width="{_WIDTH - _LEFT - 10}" height="{_HEIGHT - _BOTTOM - 10}" fill="none" stroke="#d5dce4"/>'
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        drawing = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{frame}{"".join(self._shapes)}{"".join(marks)}</svg>'
        return f"<figure>{drawing}<figcaption>{escape(caption[:90])}</figcaption></figure>"

    def _label(self, value: float) -> str:
        return f"{10**value:.2g}" if self._log else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="10" fill="#68798c">{escape(text)}</text>'


# ---------------------------------------------------------------- markup


def _section(name: str, content: str) -> str:
    return f"<h2>{escape(name)}</h2>{content}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` are cells as `_cell` and `_number` make them."""
    head = "".join(f'<th class="n">{escape(c[:-1])}</th>' if c.endswith(">") else f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: object, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(str(value))}</td>'


def _number(value: object) -> str:
    return _cell(value, "n")


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
