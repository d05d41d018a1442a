"""Measures the contenders side by side: every one in its own processes, all of them in one interleaved run.

For each model a worker is started per contender and thread count. All are loaded and checked against the reference
first; then they are timed in turns, a slice each, for several rounds, so that a slow or busy spell of the machine
hits all of them alike. A worker that fails, crashes or hangs costs only its own entry, which then says why.
"""

from __future__ import annotations

import json
import math
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from ..models import Model, Unavailable, compile_arguments, load_arrays, obtain

Result = dict[str, Any]
PAUSE_S = 0.02  # before each turn, for the spinning threads of the one before to go to sleep


class Failed(Exception):
    """What a worker was asked to do did not happen; the message says why."""


class Process:
    """A worker process and the dialogue with it."""

    def __init__(self, contender: str, timeout: float, environment: dict[str, str] | None = None) -> None:
        self.timeout = timeout
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders.worker", contender],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.replies: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, stdout: TextIO) -> None:
        for line in stdout:
            self.replies.put(line)
        self.replies.put(None)

    def ask(self, do: str, **arguments: Any) -> Result:
        """The reply's fields. Raises Failed for an error in the worker, its death, or none within the timeout."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.replies.get(timeout=self.timeout)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            self.close()
            raise Failed(f"{do}: no answer within {self.timeout:g} s") from None
        if line is None:
            raise Failed(f"{do}: {self._obituary()}")
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise Failed(f"{do}: {reply['error']}")
        return reply

    def _obituary(self) -> str:
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.log.seek(0)
        last = (self.log.read().strip().splitlines() or ["nothing printed"])[-1]
        return f"crashed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'}): {last[:200]}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def versions(contenders: Iterable[str], timeout: float) -> tuple[dict[str, str], dict[str, str]]:
    """(version by contender that can be used, reason by contender that can not)."""
    present, absent = {}, {}
    for contender in contenders:
        process = Process(contender, timeout)
        try:
            present[contender] = process.ask("hello")["version"]
        except Failed as e:
            absent[contender] = str(e).removeprefix("hello: ")
        finally:
            process.close()
    return present, absent


def fixed_dims(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes of the file's named dims under `shapes`, but for names with two sizes: some exporters write "?"."""
    sizes: dict[str, set[int]] = {}
    for entry in json.loads(path.with_suffix(".json").read_text())["inputs"]:
        for dim, size in zip(entry["dims"], shapes.get(entry["name"], ()), strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, set()).add(size)
    return {dim: size.pop() for dim, size in sizes.items() if len(size) == 1}


def compile_tcomp(job: Result, timeout: float, folder: Path) -> Result:
    """Compiles twice, each time in a new process: with an empty kernel cache, then with the one that this filled."""
    environment, figures = {"TCOMP_CACHE": str(folder / "kernels")}, {}
    for key in ("compile_s", "recompile_s"):
        process = Process("tcomp", timeout, environment)
        try:
            figures[key] = process.ask("compile", **job)["compile_s"]
            figures["compile_rss_mb"] = max(process.ask("rss")["peak_rss_mb"], figures.get("compile_rss_mb", 0))
        finally:
            process.close()
    return figures


def size_of(path: Path) -> float:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files) / 1e6


def measure(model: Model, contenders: Iterable[str], threads: list[int], seconds: float, rounds: int, timeout: float) -> list[Result]:
    """One result per contender and thread count; failures have "failure" instead of the figures that they prevented.

    Raises Unavailable where the model's file can not be had.
    """
    path = obtain(model)
    arguments = compile_arguments(model, load_arrays(path, "inputs"))
    arguments["fixed"] = fixed_dims(path, arguments.get("shapes", {}))
    results, live = [], []
    with tempfile.TemporaryDirectory(prefix="tcomp-bench-") as scratch:
        artifact = Path(scratch) / f"{model.name}.tcomp"
        try:
            for contender in contenders:
                common: Result = {"model": model.name, "contender": contender}
                job = {"path": str(path), "artifact": str(artifact), "arguments": arguments}
                if contender == "tcomp":
                    try:
                        common |= compile_tcomp({**job, "threads": max(threads)}, timeout, Path(scratch))
                    except Failed as e:
                        common["failure"] = str(e)
                common["size_mb"] = size_of(artifact if contender == "tcomp" else path)
                for n in threads:
                    result = {**common, "threads": n, "times_ms": []}
                    results.append(result)
                    if "failure" in result:
                        continue
                    process = Process(contender, timeout)
                    live.append((process, result))
                    try:
                        result |= process.ask("load", **job, threads=n)
                        result |= process.ask("check")
                        result["correct"] = result["error"] <= model.tolerance
                    except Failed as e:
                        result["failure"] = str(e)
            for _ in range(rounds):
                for process, result in live:
                    if "failure" in result:
                        continue
                    time.sleep(PAUSE_S)
                    try:
                        result["times_ms"] += process.ask("time", seconds=seconds / rounds)["times_ms"]
                        result |= process.ask("rss")
                    except Failed as e:
                        result["failure"] = str(e)
        finally:
            for process, _ in live:
                process.close()
    for result in results:
        times = result.pop("times_ms")
        if times and "failure" not in result:
            result |= {"runs": len(times), "min_ms": min(times), "median_ms": statistics.median(times)}
    return results


def add_ratios(results: list[Result], baseline: str) -> None:
    """To each result the latency over the baseline's for the same model and threads, by median and by minimum."""
    base = {(r["model"], r["threads"]): r for r in results if r["contender"] == baseline}
    for r in results:
        b = base.get((r["model"], r["threads"]), {})
        for figure in ("median", "min"):
            if f"{figure}_ms" in r and f"{figure}_ms" in b:
                r[f"{figure}_ratio"] = r[f"{figure}_ms"] / b[f"{figure}_ms"]


def geomeans(results: list[Result]) -> list[Result]:
    """Per contender and thread count, over the models where it is right and the baseline ran too."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for r in results:
        if "median_ratio" in r and r["correct"]:
            groups.setdefault((r["contender"], r["threads"]), []).append(r)
    return [
        {"contender": c, "threads": n, "models": len(rs)}
        | {k: math.exp(statistics.fmean(math.log(r[k]) for r in rs)) for k in ("median_ratio", "min_ratio")}
        for (c, n), rs in groups.items()
    ]


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}" if value > 0 else f"{value:g}"


def latency_table(results: list[Result], contenders: list[str], baseline: str) -> Table:
    title = f"Latency in ms: min / median, and median over {baseline}'s"
    table = Table("model", "threads", box=box.MARKDOWN, title=title)
    for c in contenders:
        table.add_column(c, justify="right", no_wrap=True)
        if c != baseline:
            table.add_column("ratio", justify="right", no_wrap=True)
    cells = {(r["model"], r["threads"], r["contender"]): r for r in results}
    for model, n in dict.fromkeys((r["model"], r["threads"]) for r in results):
        row = [model, str(n)]
        for c in contenders:
            r = cells.get((model, n, c), {})
            cell = "failed" if r else "–"
            if "median_ms" in r:
                cell = f"{_number(r['min_ms'])} / {_number(r['median_ms'])}{'' if r['correct'] else ' wrong'}"
            row.append(cell)
            if c != baseline:
                row.append(f"{r['median_ratio']:.2f}" if "median_ratio" in r else "–")
        table.add_row(*row)
    means = {(g["contender"], g["threads"]): g for g in geomeans(results)}
    for n in dict.fromkeys(r["threads"] for r in results):
        row = ["geomean", str(n)]
        for c in contenders:
            g = means.get((c, n))
            row.append(f"{g['models']} models" if g else "–")
            if c != baseline:
                row.append(f"{g['median_ratio']:.2f}" if g else "–")
        table.add_row(*row, style="bold")
    return table


def cost_table(results: list[Result], threads: int) -> Table:
    table = Table(box=box.MARKDOWN, title=f"Everything but latency, at {threads} thread{'s' * (threads > 1)}")
    table.add_column("model")
    table.add_column("contender")
    for column in ("compile s", "again s", "load ms", "1st run ms", "peak MB", "file MB", "max rel. error"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in results:
        if r["threads"] == threads:
            figures = ("compile_s", "recompile_s", "load_ms", "first_run_ms", "peak_rss_mb", "size_mb")
            error = f"{r['error']:.1e}" if "error" in r else "–"
            table.add_row(r["model"], r["contender"], *(_number(r.get(k)) for k in figures), error)
    return table


def machine() -> Result:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}


def compare(
    models: list[Model],
    contenders: list[str],
    threads: list[int],
    seconds: float,
    rounds: int,
    timeout: float,
    baseline: str,
    report: Path | None,
) -> int:
    """Measures, prints the tables, writes the JSON report; returns 1 if anything was wrong or failed, else 0."""
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 200
    present, absent = versions(contenders, timeout)
    results: list[Result] = []
    skipped: dict[str, str] = {}
    try:
        for k, model in enumerate(models):
            progress.print(f"[{k + 1}/{len(models)}] {model.name}", highlight=False, markup=False)
            try:
                results += measure(model, present, threads, seconds, rounds, timeout)
            except Unavailable as e:
                skipped[model.name] = str(e)
    except KeyboardInterrupt:
        progress.print("interrupted: what follows is what was measured so far")
    add_ratios(results, baseline)
    console.print("contenders: " + ", ".join(f"{c} {v}" for c, v in present.items()), highlight=False)
    for what, why in (*absent.items(), *skipped.items()):
        console.print(f"absent: {what}: {why}", highlight=False, markup=False)
    if results:
        console.print(latency_table(results, list(present), baseline))
        console.print(cost_table(results, max(threads)))
    bad = [r for r in results if "failure" in r or not r.get("correct")]
    for r in bad:
        why = " ".join(r.get("failure", f"wrong: max relative error {r.get('error', 0):.2e}").split())
        line = f"{r['model']}, {r['contender']}, {r['threads']} threads: {why[:240]}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if report:
        settings = {"threads": threads, "seconds": seconds, "rounds": rounds, "baseline": baseline}
        document = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(), "settings": settings,
            "versions": present, "absent": absent, "skipped": skipped, "geomeans": geomeans(results),
            "results": results,
        }  # fmt: skip
        report.write_text(json.dumps(document, indent=1))
    return int(bool(bad))
