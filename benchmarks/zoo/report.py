"""A page about results of the zoo: what is right, ratios by structure and by network, compile times, predicted against measured kernels."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..timing import geomean, rank_correlation

Result = Mapping[str, Any]


def ratios(r: Result, clock: str) -> tuple[float, float]:
    """tcomp's least time over ONNX Runtime's, and over that of the fastest peer."""
    times = r[f"{clock}_ms"]
    peers = [ms for name, ms in times.items() if name != "tcomp"]
    return times["tcomp"] / times["onnxruntime"], times["tcomp"] / min(peers)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in head) + "</tr>"]
    for row in rows:
        cells = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in row)
        lines.append("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _plots(measured: Sequence[Result], kernels: Sequence[tuple[str, str, float, float]], clock: str) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>No plots: matplotlib is not installed.</p>"

    def image(figure: Figure) -> str:
        data = io.BytesIO()
        figure.savefig(data, format="png", bbox_inches="tight")
        return f'<img src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'

    found = sorted(measured, key=lambda r: ratios(r, clock)[0])
    figure = Figure(figsize=(9, 2 + 0.16 * len(found)))
    axes = figure.subplots()
    labels = [f"{r['name']} ×{r['batch']}" for r in found]
    for n, (label, color) in enumerate((("ONNX Runtime", "tab:blue"), ("the fastest peer", "tab:orange"))):
        axes.scatter([ratios(r, clock)[n] for r in found], range(len(found)), s=10, label=f"over {label}", color=color)
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.set_yticks(range(len(found)), labels, fontsize=6)
    axes.set_xlabel("time of tcomp over that of the peer")
    axes.legend()
    parts = [image(figure)]
    if kernels:
        figure = Figure(figsize=(6, 6))
        axes = figure.subplots()
        axes.loglog([p for _, _, p, _ in kernels], [t for _, _, _, t in kernels], ".", markersize=2)
        ends = [min(t for _, _, _, t in kernels), max(t for _, _, _, t in kernels)]
        axes.loglog(ends, ends, color="black", linewidth=0.5)
        axes.set_xlabel("predicted, µs")
        axes.set_ylabel("measured, µs")
        parts.append(image(figure))
    return "\n".join(parts)


def page(results: Sequence[Result], clock: str = "wall") -> str:
    """HTML. Ratios are of the least times by the `clock`: "wall" or "own", the process's own time."""
    measured = [r for r in results if f"{clock}_ms" in r and "tcomp" in r[f"{clock}_ms"]]
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for r in measured:
        groups[str(r["batch"]), str(r["threads"]), r["structure"]].append(r)
        groups[str(r["batch"]), str(r["threads"]), "all"].append(r)
    rows = []
    for (batch, threads, structure), members in sorted(groups.items()):
        both = [ratios(r, clock) for r in members]
        over = [n for n, _ in both if n > 1.0]
        rows.append(
            (
                batch,
                threads,
                structure,
                len(members),
                geomean([n for n, _ in both]),
                geomean([n for _, n in both]),
                max(n for n, _ in both),
                len(over),
            )
        )
    wrong = [r for r in results if r["outcome"] != "right"]
    networks = sorted(measured, key=lambda r: -ratios(r, clock)[0])
    kernels = [(r["name"], name, p, t) for r in results for name, p, t in r.get("kernels", ()) if p > 0 and t > 0]
    predicted, taken = [k[2] for k in kernels], [k[3] for k in kernels]
    factors = [max(p / t, t / p) for p, t in zip(predicted, taken, strict=True)]
    off = sorted(zip(factors, kernels, strict=True), key=lambda x: -abs(x[1][3] - x[1][2]))[:40]
    slow = sorted((r for r in results if "compile_s" in r), key=lambda r: -r["compile_s"])[:20]
    compiled = _table(("network", "batch", "seconds to compile"), ((r["name"], r["batch"], float(r["compile_s"])) for r in slow))
    parts = [
        "<!doctype html><meta charset=utf-8><title>tcomp: the zoo</title><style>body{font-family:sans-serif}td,th{padding:0 8px;text-align:left}</style>",
        f"<h1>The zoo</h1><p>{sum(r['outcome'] == 'right' for r in results)} of {len(results)} results are right.</p>",
        "<h2>Time of tcomp over that of its peers, by structure</h2>",
        _table(("batch", "threads", "structure", "networks", "over ONNX Runtime", "over the fastest", "worst", "above 1"), rows),
        "<h2>By network</h2>",
        _table(
            ("network", "structure", "batch", "threads", "ms", "over ONNX Runtime", "over the fastest"),
            ((r["name"], r["structure"], r["batch"], r["threads"], float(r[f"{clock}_ms"]["tcomp"]), *ratios(r, clock)) for r in networks),
        ),
        "<h2>Not right</h2>",
        _table(
            ("network", "batch", "outcome", "detail"),
            ((r["name"], r["batch"], r["outcome"], r.get("detail", r.get("difference", ""))) for r in wrong),
        ),
        "<h2>Slowest to compile, without a cache</h2>",
        compiled,
    ]
    if kernels:
        heading = f"{len(kernels)} kernels, rank correlation {rank_correlation(predicted, taken):.3f}, median factor "
        heading += f"{statistics.median(factors):.2f}. Where most time is off:"
        table = _table(("network", "kernel", "predicted µs", "measured µs", "factor"), ((*k, f) for f, k in off))
        parts += [f"<h2>Kernels: predicted and measured</h2><p>{heading}</p>", table]
    return "\n".join([*parts, _plots(measured, kernels, clock)])
