"""A page for people: the models, and plots of their last minutes. One file without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tcomp.serve.metrics import HISTORY
from tcomp.serve.served import ServedModel
from tcomp.serve.state import ServerState

_WIDTH, _HEIGHT = 220, 60  # pixels of a plot
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse } td, th { padding: .3em .8em; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
polyline { fill: none; stroke: #26c; stroke-width: 1.5 } svg { background: #f6f6f8 } small { color: #666 }
"""


def status_page(state: ServerState) -> str:
    """The page, in HTML."""
    word = "stopping" if state.stopping else "ready" if state.ready else "not ready"
    titles = ("model", "requests/s", "p50 ms", "p99 ms", "waiting", "rows of a batch", "instances busy %")
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    rows = "".join(map(_row, state.repository.models))
    failed = "".join(
        f"<p><b>{escape(row['name'])} {escape(row['version'])}</b>: {escape(row['reason'])}</p>"
        for row in state.repository.index()
        if row["state"] != "READY"
    )
    about = f"The server is <b>{word}</b>. Plots show the last {HISTORY // 60} minutes; figures for machines are at /metrics."
    begin = f'<meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>tcomp serve</title><style>{_STYLE}</style>'
    body = f"<h1>tcomp serve</h1><p>{about}</p><table><tr>{head}</tr>{rows}</table>{failed}"
    return f'<!doctype html><html lang="en"><head>{begin}</head><body>{body}</body></html>'


def _row(model: ServedModel) -> str:
    points = list(model.metrics.history)
    series: Sequence[Sequence[float]] = (
        [p.requests for p in points], [p.p50 * 1e3 for p in points], [p.p99 * 1e3 for p in points], [p.waiting for p in points],
        [p.rows for p in points], [100 * p.busy for p in points],
    )  # fmt: skip
    how = "batched" if model.loaded.batched else f"not batched: {model.loaded.not_batched}"
    about = f"<b>{escape(model.name)}</b> version {escape(model.version)}<br><small>{escape(how)}<br>"
    about += "<br>".join(escape(str(wire.spec)) for wire in (*model.inputs.values(), *model.outputs.values()))
    return f"<tr><td>{about}</small></td>{''.join(f'<td>{_plot(values)}</td>' for values in series)}</tr>"


def _plot(values: Sequence[float]) -> str:
    """The last value, the largest, and a line."""
    if not values:
        return ""
    top = max(values) or 1.0
    points = " ".join(
        f"{_WIDTH - (len(values) - 1 - n) * _WIDTH / HISTORY:.1f},{_HEIGHT - value / top * (_HEIGHT - 4) - 2:.1f}"
        for n, value in enumerate(values)
    )
    line = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><polyline points="{points}"/></svg>'
    return f"{values[-1]:.4g} <small>(most {max(values):.4g})</small><br>{line}"
