"""Where the time of a run goes, kernel by kernel, and how far each is from what the machine can do: for `tcomp run` and `tcomp bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tcomp.cli import output

if TYPE_CHECKING:
    from tcomp.runtime import LoadedModel

MAX_ROWS = 30  # kernels of a profile that get a line of their own: what fits a screen


def profiled(module: LoadedModel, inputs: Mapping[str, object]) -> list[dict[str, Any]]:
    """One record for each kernel, in program order.

    "bound" is the least time that the kernel's work takes by the roofline of this machine, measured at the first use on it (of a GPU: by
    its data sheet); "light" the share of it in the time taken, the speed of light being 1. Both are None where work depends on data.
    """
    from tcomp.backends import backend_of
    from tcomp.calibration import measured

    on_gpu = module.manifest.triple == "cuda"
    model = backend_of(f"cuda -arch={module.manifest.cpu}").cost_model() if on_gpu else backend_of().cost_model(module.threads, measured())
    records = []
    for (name, seconds), facts in zip(module.profile(inputs), module.facts(inputs), strict=True):
        record: dict[str, Any] = {"name": name, "seconds": seconds, "flops": None, "bytes": None, "bound": None, "light": None}
        if facts.work is not None:
            bound, limit = model.roof.seconds(**{key: facts.work[key] for key in ("slots", "divisions", "bytes")})
            record |= {"flops": facts.work["flops"], "bytes": facts.work["bytes"], "bound": bound, "limit": limit}
            record["light"] = bound / seconds if seconds > 0 else None
        records.append(record | {"layout": facts.layout, "not_fused": list(facts.not_fused)})
    return records


def show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, the kernels that take longest first."""
    total = sum(r["seconds"] for r in records) or 1.0
    ranked = sorted(enumerate(records), key=lambda item: -item[1]["seconds"])
    rows = []
    for number, r in ranked[:MAX_ROWS]:
        rate, share = "-", "-"
        if r["light"] is not None:  # the rate of what limits the kernel, and its share of the bound
            amount, unit = (r["flops"], "GFLOP/s") if r["limit"] == "arithmetic" else (r["bytes"], "GB/s")
            rate, share = f"{amount / r['seconds'] / 1e9:.3g} {unit}", f"{r['light']:.0%}"
        time = output.seconds(r["seconds"]), f"{r['seconds'] / total:.1%}"
        rows.append((str(number), r["name"], *time, rate, share, r["layout"], "; ".join(r["not_fused"])))
    if rest := ranked[MAX_ROWS:]:
        spent = sum(r["seconds"] for _, r in rest)
        rows.append(("", output.count(len(rest), "other kernel"), output.seconds(spent), f"{spent / total:.1%}", "", "", "", ""))
    if all(r["light"] is not None for r in records):
        title += f", the bound is {output.seconds(sum(r['bound'] for r in records))}"
    output.table(title, ("#>", "kernel", "time>", "share>", "speed>", "of bound>", "layout", "not fused"), rows)
