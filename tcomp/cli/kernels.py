"""Where the time of a run goes, kernel by kernel, and how far each is from what the machine can do: for `tcomp run` and `tcomp bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tcomp.cli import output

if TYPE_CHECKING:
    from tcomp.runtime import LoadedModel
    from tcomp.schedules.cost.roofline import Roof

_MOST_KERNELS = 30  # lines of a profile


def profiled(module: LoadedModel, inputs: Mapping[str, object]) -> list[dict[str, Any]]:
    """One record for each kernel, in program order.

    "bound" is the least time that the kernel's work takes by the roofline of this machine, measured at the first use on it (of a GPU: by
    its data sheet); "light" the share of it in the time taken, the speed of light being 1. Both are None where work depends on data.
    """
    roof = _roof(module)
    records = []
    for (name, seconds), facts in zip(module.profile(inputs), module.facts(inputs), strict=True):
        record: dict[str, Any] = {"name": name, "seconds": seconds, "flops": None, "bytes": None, "bound": None, "light": None}
        if facts.work is not None:
            bound, limit = roof.seconds(**{key: facts.work[key] for key in ("slots", "divisions", "bytes")})
            record |= {"flops": facts.work["flops"], "bytes": facts.work["bytes"], "bound": bound, "limit": limit}
            record["light"] = bound / seconds if seconds > 0 else None
        records.append(record | {"layout": facts.layout, "not_fused": list(facts.not_fused)})
    return records


def _roof(module: LoadedModel) -> Roof:
    from tcomp.backends import backend_of
    from tcomp.calibration import measured

    if module.manifest.triple == "cuda":
        return backend_of(f"cuda -arch={module.manifest.cpu}").roof()
    return backend_of().roof(module.threads, measured())


def show(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, the kernels that take longest first."""
    total = sum(r["seconds"] for r in records) or 1.0
    ranked = sorted(enumerate(records), key=lambda item: -item[1]["seconds"])
    rows = [(str(number), r["name"], *_times(r["seconds"], total), *_speed(r), *_origin(r)) for number, r in ranked[:_MOST_KERNELS]]
    if rest := ranked[_MOST_KERNELS:]:
        spent = sum(r["seconds"] for _, r in rest)
        rows.append(("", output.count(len(rest), "other kernel"), *_times(spent, total), "", "", "", ""))
    if all(r["light"] is not None for r in records):
        title += f", the bound is {output.seconds(sum(r['bound'] for r in records))}"
    output.table(title, ("#>", "kernel", "time>", "share>", "speed>", "of bound>", "layout", "not fused"), rows)


def _times(seconds: float, total: float) -> tuple[str, str]:
    return output.seconds(seconds), f"{seconds / total:.1%}"


def _speed(r: Mapping[str, Any]) -> tuple[str, str]:
    """The rate of what limits the kernel, and its share of the bound."""
    if r["light"] is None:
        return "-", "-"
    amount, unit = (r["flops"], "GFLOP/s") if r["limit"] == "arithmetic" else (r["bytes"], "GB/s")
    return f"{amount / r['seconds'] / 1e9:.3g} {unit}", f"{r['light']:.0%}"


def _origin(r: Mapping[str, Any]) -> tuple[str, str]:
    return r["layout"], "; ".join(r["not_fused"])
