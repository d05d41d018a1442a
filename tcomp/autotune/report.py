"""A page about a database: one HTML file with plots and without scripts. What comes from the database appears as text, never as markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate
from math import ceil, floor, inf, log10

from tcomp.autotune.database.entries import Record, Session, Verdict
from tcomp.autotune.database.store import Database
from tcomp.autotune.subject import title
from tcomp.autotune.tasks import Task
from tcomp.errors import TcompError
from tcomp.schedules.knobs import encode
from tcomp.schedules.trace import Trace

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 240, 60, 34  # of a plot, and the margins with its scales, in pixels
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - 10
_COLOURS = {"kept": "kept", "kept, within noise": "dim"}
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1b2733; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2.2em } h3 { font-size: 1em; margin: 1.6em 0 .3em; font-family: monospace }
table { border-collapse: collapse; width: 100% } td, th { padding: .25em .7em; text-align: left; border-bottom: 1px solid #e3e8ee }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.name { font-family: monospace; overflow-wrap: anywhere }
pre { background: #f5f7fa; padding: .8em; overflow-x: auto; font-size: 12px } svg { margin: .3em 1em .3em 0 }
.kept { color: #14733d } .back { color: #a33b12 } .dim { color: #68798c }
figure { display: inline-block; margin: 0 } figcaption { font-size: 12px }
"""


class _Tuned:
    def __init__(self, task: Task, database: Database) -> None:
        self.task, self.title, self.records = task, title(task), database.records(task.key)
        self.verdict: Verdict | None = next(reversed(database.verdicts(task.key)), None)
        ok = [r for r in self.records if r.ok]
        self.default = next((r for r in ok if r.decisions == encode({})), None)
        self.best = min(ok, key=lambda r: r.cost or 0.0, default=None)


def page(database: Database) -> str:
    """The page as HTML."""
    tuned = sorted((_Tuned(task, database) for task in database.tasks()), key=lambda t: -(t.verdict.before if t.verdict else 0.0))
    records = [r for t in tuned for r in t.records]
    failures = Counter((r.measurement.status, r.measurement.reason[:120]) for r in records if not r.ok).most_common(20)
    machines = sorted({tuple(sorted(r.environment.items())) for r in records})
    sections = {
        "Runs": _sessions(database.sessions()), "Kernels": _kernels(tuned),
        "What failed": _table(("", "candidates>", "reason"), [(status, n, reason) for (status, reason), n in failures]),
        "Predicted and measured": _predictions(records), "Convergence": "".join(map(_convergence, tuned)),
        "Winning schedules": "".join(map(_winner, tuned)),
        "Measured on": "".join(_table(("",), [(f"{name}: {value}",) for name, value in machine]) for machine in machines),
    }  # fmt: skip
    name = escape(database.path.name)
    head = f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style></head>'
    body = "".join(f"<h2>{escape(section)}</h2>{content}" for section, content in sections.items() if content)
    return f"{head}<body><h1>Tuning: {name}</h1>{body}</body></html>\n"


def _sessions(sessions: Sequence[Session]) -> str:
    rows = []
    for s in sessions:
        ratio, spent, notes = (s.summary.get(name) for name in ("ratio", "seconds", "notes"))
        gain = f"{ratio:.3f}" if isinstance(ratio, float) and s.summary.get("comparisons") else "-"
        phases = ", ".join(f"{n} {_time(v)}" for n, v in spent.items() if isinstance(v, float)) if isinstance(spent, dict) else ""
        said = "; ".join(map(str, notes)) if isinstance(notes, list) else ""
        rows.append((s.options.get("model") or "a program", s.state, _time(s.spent), s.trials, gain, phases, said))
    return _table(("model.", "state", "time>", "trials>", "tuned / untuned>", "spent on", ""), rows)


def _kernels(tuned: Sequence[_Tuned]) -> str:
    rows = []
    for t in tuned:
        default, best, v = t.default, t.best, t.verdict
        times = [_time(r.cost) if r and r.cost else "-" for r in (default, best)]
        times.append(f"{(best.cost or 0) / default.cost:.3f}" if best and default and default.cost else "-")
        times += (_time(v.before), _time(v.after), f"{v.after / v.before:.3f}" if v.before else "-") if v else ("-", "-", "-")
        verdict = (v.judgement, _COLOURS.get(v.judgement, "back")) if v else ("not confirmed", "dim")
        rows.append((t.title, len(t.records), sum(not r.ok for r in t.records), *times, verdict))
    columns = ("kernel.", "trials>", "failed>", "default>", "best>", "alone>", "before, in a run>", "after>", "in the model>", "")
    return _table(columns, rows)


def _predictions(records: Sequence[Record]) -> str:
    points = [(1e6 * r.predicted, 1e6 * r.cost) for r in records if r.predicted and r.cost]
    if not points:
        return ""
    ends = min(map(min, points)), max(map(max, points))
    plot = _Plot(ends, ends, True)
    plot.line(zip(ends, ends, strict=True), "#b9c4d0")
    plot.dots(points)
    return plot.figure("predicted (µs)", "measured (µs)", f"{len(points)} candidates; on the line the prediction is right")


def _convergence(t: _Tuned) -> str:
    if t.default is None or not t.default.cost or sum(bool(r.cost) for r in t.records) < 2:
        return ""
    relative = [(r.cost or inf) / t.default.cost for r in t.records]
    dots = [(float(n), min(y, 2.5)) for n, y in enumerate(relative) if y < inf]
    last = float(len(relative) - 1)
    plot = _Plot((0.0, last), (0.0, max(1.1, *(y for _, y in dots))), False)
    plot.line([(0.0, 1.0), (last, 1.0)], "#b9c4d0")
    plot.dots(dots)
    plot.line([(float(n), y) for n, y in enumerate(accumulate(relative, min)) if y < inf], "#14733d")
    return plot.figure("trial", "of the default's time", t.title)


def _winner(t: _Tuned) -> str:
    if t.verdict is None or not t.verdict.kept:
        return ""
    found = next((r for r in t.records if r.decisions == t.verdict.decisions and r.trace), None)
    try:
        steps = str(Trace.from_json(found.trace)) if found else ""
    except TcompError as error:
        steps = error.what
    return f"<h3>{escape(t.title)}</h3><pre>{escape(t.verdict.decisions)}\n\n{escape(steps)}</pre>"


class _Plot:
    """A plot with two scales, both logarithmic or both linear."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], logarithmic: bool) -> None:
        ends = [(floor(log10(low)), ceil(log10(high))) if logarithmic else (low, high) for low, high in (x, y)]
        self._x, self._y = ((low, high if high > low else low + 1) for low, high in ends)
        self._log = logarithmic
        self._shapes: list[str] = []

    def _at(self, x: float, y: float) -> tuple[float, float]:
        a, b = (log10(x), log10(y)) if self._log else (x, y)
        across = _LEFT + (a - self._x[0]) / (self._x[1] - self._x[0]) * _INNER_WIDTH
        return across, _HEIGHT - _BOTTOM - (b - self._y[0]) / (self._y[1] - self._y[0]) * _INNER_HEIGHT

    def line(self, points: Iterable[tuple[float, float]], color: str) -> None:
        path = " ".join("{:.1f},{:.1f}".format(*self._at(*p)) for p in points)
        self._shapes.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')

    def dots(self, points: Iterable[tuple[float, float]]) -> None:
        circle = '<circle cx="{:.1f}" cy="{:.1f}" r="2" fill="#2b6cb0" fill-opacity="0.55"/>'
        self._shapes += (circle.format(*self._at(*p)) for p in points)

    def figure(self, across: str, up: str, caption: str) -> str:
        marks = [f'<rect x="{_LEFT}" y="10" width="{_INNER_WIDTH}" height="{_INNER_HEIGHT}" fill="none" stroke="#d5dce4"/>', *self._shapes]
        for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
            values = [low + fraction * (high - low) for low, high in (self._x, self._y)]
            x, y = (f"{10**value:.3g}" if self._log else f"{value:.3g}" for value in values)
            marks.append(_text(_LEFT + fraction * _INNER_WIDTH, _HEIGHT - _BOTTOM + 14, x, "middle"))
            marks.append(_text(_LEFT - 6, _HEIGHT - _BOTTOM - fraction * _INNER_HEIGHT + 4, y, "end"))
        marks.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 4, across, "middle"))
        marks.append(f'<g transform="translate(12 {_HEIGHT / 2}) rotate(-90)">{_text(0, 0, up, "middle")}</g>')
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        drawing = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(marks)}</svg>'
        return f"<figure>{drawing}<figcaption>{escape(caption[:90])}</figcaption></figure>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="10" fill="#68798c">{escape(text)}</text>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A column whose name ends with ">" has numbers, "." names. A cell that is a pair has its class with it. Nothing for no rows."""
    kinds = [{">": "n", ".": "name"}.get(c[-1:], "") for c in columns]
    head = "".join(f'<th class="{kind}">{escape(c.rstrip(">."))}</th>' for c, kind in zip(columns, kinds, strict=True))
    lines = [f"<tr>{head}</tr>"] if any(columns) else []
    for row in rows:
        cells = [cell if isinstance(cell, tuple) else (cell, kind) for cell, kind in zip(row, kinds, strict=True)]
        lines.append("".join(["<tr>", *(f'<td class="{kind}">{escape(str(text))}</td>' for text, kind in cells), "</tr>"]))
    return f"<table>{''.join(lines)}</table>" if rows else ""


def _time(seconds: float) -> str:
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"
