"""`tcomp tune`: faster schedules for a model's kernels, found by measuring; `tcomp db`, `tcomp report`: databases of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import options as opt, output
from tcomp.errors import InputError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from tcomp.autotune.confirm import Confirmation
    from tcomp.autotune.database.store import Database
    from tcomp.autotune.progress import Result, Status, TaskStatus
    from tcomp.autotune.tasks import Task

_BUDGET = "Time in all, as in 60s, 10m, 1h. Default: 60s, unless --trials."
_DATABASE = "Where records are stored; created if there is none."
_WORKERS = "Building processes. Default: all cores."
_CA = "For TLS: the certificate of the authority that signed those of the cluster."
_RESUME = "Go on with the latest tuning in the database, with the rest of its budget."
_SIZE = "The size at which an open symbolic dim is measured. May be repeated."
_RESUMED: dict[str, Any] = {  # options that a database may give, and what they are
    "model": str, "target": str, "threads": int, "workers": int, "seed": int, "direct": bool,
} | dict.fromkeys(("shapes", "dims", "values", "sizes"), dict)  # fmt: skip
_MARK_WIDTH = 28  # columns of why a kernel gets no more trials
MAX_ROWS = 12  # kernels in the live table, so that it stays on the screen

DatabaseFile = Annotated[Path, opt.argument("DATABASE", "A file that `tcomp tune` made.")]


def tune(
    model: Annotated[Path | None, opt.argument("MODEL.onnx", "An ONNX model. With --resume it may be left out.")] = None,
    *,
    budget: Annotated[str | None, opt.option("--budget", "TIME", _BUDGET)] = None,
    trials: Annotated[int | None, opt.option("--trials", "N", "Candidates to measure, at most.", min=1)] = None,
    database: Annotated[Path, opt.option("--database", "FILE", _DATABASE, show_default=True)] = Path("tune.db"),
    resume: Annotated[bool, opt.flag("--resume", _RESUME)] = False,
    workers: Annotated[int | None, opt.option("--workers", "N", _WORKERS, min=1, max=opt.MAX_THREADS)] = None,
    cluster: Annotated[str | None, opt.option("--cluster", "ADDRESS", "Measure on a Dask cluster (tls://host:8786, or tcp://).")] = None,
    cluster_ca: Annotated[Path | None, opt.option("--cluster-ca", "PEM", _CA)] = None,
    cluster_cert: Annotated[Path | None, opt.option("--cluster-cert", "PEM", "For TLS: the certificate of this client.")] = None,
    cluster_key: Annotated[Path | None, opt.option("--cluster-key", "PEM", "For TLS: its private key.")] = None,
    options: opt.CompilationOptions,
    size: Annotated[list[str] | None, opt.option("--size", "NAME=N", _SIZE)] = None,
    threads: opt.Threads = None,
    seed: Annotated[int, opt.option("--seed", "N", "Seed of the search.", min=0, show_default=True)] = 0,
    as_json: opt.Json = False,
) -> None:
    """Search for faster schedules of a model's kernels, for `tcomp compile --database`.

    Give the same --target, --arch, --precision, --threads, --dim, --shape, --value and --direct to `tcomp compile`. Ctrl-C ends the search
    and confirms the best so far.
    """
    from tcomp.autotune.measurement.measurer import Cluster
    from tcomp.autotune.tuner import tune as search

    seconds = None if budget is None else opt.parse_time(budget)
    if model is None:
        if not resume:
            raise InputError("there is no model to tune", hint="tcomp tune MODEL.onnx, or tcomp tune --resume")
        if too_late := [*options.given, *(["--size"] if size else [])]:
            raise InputError(f"{too_late[0]} comes with a model", hint="without one, everything is as it was")
        arguments = _earlier(database)
    else:
        opt.check_model_file(model)
        given = options.compile_options()
        sizes = opt.parse_dims(size, "--size")
        if ranges := [name for name, n in sizes.items() if not isinstance(n, int)]:
            raise InputError(f"--size {ranges[0]} is one number", hint="ranges are for --dim")
        arguments = {
            "model": str(model), "target": given.target, "shapes": given.shapes, "dims": given.dims, "values": given.values,
            "sizes": sizes, "threads": threads, "seed": seed, "workers": workers, "direct": given.direct,
        }  # fmt: skip
    for file in (files := [cluster_ca, cluster_cert, cluster_key]):
        if file is not None:
            opt.check_file(file)
    if cluster is None and any(files):
        raise InputError("there is no cluster for these certificates", hint="--cluster tls://host:8786")
    arguments["cluster"] = None if cluster is None else Cluster(cluster, *(str(file or "") for file in files))
    with _live() as tell:
        result = search(budget=seconds, trials=trials, database=database, resume=resume, progress=tell, **arguments)
    if as_json:
        output.print_json(_record(result))
    else:
        _show(result)
    if result.interrupted:
        raise typer.Exit(output.INTERRUPTED)


def _earlier(database: Path) -> dict[str, Any]:
    """The options of the latest tuning in a database; not its cluster, which could run anything here: databases may come from anyone."""
    opt.check_file(database, "--database")
    with _opened(database) as entries:
        sessions = [s for s in entries.sessions() if s.options.get("model")]
    if not sessions:
        raise InputError(f"there is nothing to resume in {database}", hint="tcomp tune MODEL.onnx")
    options = {name: v for name, v in sessions[-1].options.items() if name not in ("budget", "trials", "cluster")}
    if unknown := options.keys() - _RESUMED.keys():
        why = f"there is no option {min(unknown)!r}"
        raise InputError(f"the tuning in {database} is one of another version of tcomp", why=why, hint="tcomp tune MODEL.onnx")
    for name, value in options.items():
        if not isinstance(value, _RESUMED[name] | None):
            raise InputError(f"the tuning in {database} cannot be resumed", why=f"its option {name!r} is {value!r:.60}")
    if isinstance(options.get("dims"), dict):
        saved = options["dims"].items()
        options["dims"] = {n: tuple(d) if isinstance(d, list) else d["exact"] if isinstance(d, dict) else d for n, d in saved}
    opt.check_model_file(Path(options["model"]))
    return options


@contextmanager
def _live() -> Iterator[Callable[[Status], None]]:
    """A table on stderr while the block runs, if that is a terminal: yields what takes a `Status`."""
    console = output.console(error=True)
    if not console.is_terminal:
        yield lambda status: None
        return
    from rich.live import Live

    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield lambda status: live.update(_table(status, console.width))


def _table(status: Status, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    before, after = (sum(getattr(t, name) for t in status.tasks if t.timed) for name in ("before", "after"))
    words = [
        status.phase,
        output.seconds(status.elapsed) + (f" of {output.seconds(status.budget)}" if status.budget else ""),
        f"{status.trials}{f' of {status.limit}' if status.limit else ''} trials",
    ]
    if status.budget and status.elapsed < status.budget:
        words.append(f"{output.seconds(status.budget - status.elapsed)} left")
    words += [f"kernels alone: {output.seconds(before)} -> {output.seconds(after)}"] if before else []
    words += [f"the cost model is off by {status.error:.0%}"] if status.error is not None else []
    grid = Table(title=Text("; ".join(words)), box=None, pad_edge=False, title_justify="left", header_style="bold")
    columns, rows = ("kernel", "before", "best", "of bound", "trials", "failed", ""), list[tuple[str, ...]]()
    for task in sorted(status.tasks, key=lambda t: -t.before)[:MAX_ROWS]:
        mark = "<-" if task is status.current and status.phase == "search" else printable(task.stopped)[:_MARK_WIDTH]
        times = (output.seconds(task.before), output.seconds(task.after), f"{task.share:.0%}") if task.timed else ("-", "-", "-")
        rows.append((printable(_calls(task)), *times, str(task.trials), str(task.failed), mark))
    taken = sum(1 + max(map(len, column)) for column in zip(*(row[1:] for row in (columns, *rows)), strict=True))
    for name in columns:
        grid.add_column(name, justify="left" if name in ("kernel", "") else "right", no_wrap=True)
    for kernel, *rest in rows:  # names are cut so that numbers are not
        short = Text(kernel)
        short.truncate(max(12, width - taken), overflow="ellipsis")
        grid.add_row(short, *map(Text, rest))
    if len(status.tasks) > MAX_ROWS:
        grid.add_row(Text(output.count(len(status.tasks) - MAX_ROWS, "other kernel"), "dim"))
    return grid


def _calls(task: TaskStatus) -> str:
    return f"{task.calls} x {task.title}" if task.calls > 1 else task.title


def _show(result: Result) -> None:
    c, tasks = result.confirmation, {t.task.key: t for t in result.tasks}
    rows = [
        (_calls(tasks[key]), output.seconds(before), output.seconds(after), tasks[key].trials, _judgement(c, key))
        for key, (before, after) in sorted(c.kernels.items(), key=lambda item: item[1][1] - item[1][0])
        if key in tasks
    ]
    if rows:
        output.table("in the model", ("kernel", "before>", "after>", "trials>", ""), rows)
        output.line()
    output.line(f"{output.count(result.trials, 'trial')} of {output.count(len(tasks), 'kernel')}; {output.stages(result.seconds)}", "dim")
    for note in c.notes:
        output.line(note, "yellow")
    if c.kept:
        gain = f"{output.seconds(c.before)} -> {output.seconds(c.after)}: {c.ratio:.3f} of the untuned model's time, in a fresh process"
        output.line(gain, "green")
    else:
        output.line("no kernel was made faster: the model stays as it is")
    if result.interrupted:
        output.line(f"interrupted; `tcomp tune --resume --database {result.database}` goes on", "yellow")


def _judgement(c: Confirmation, key: str) -> str:
    if key not in c.kept:
        return "rolled back"
    return "tuned, within noise" if key in c.within_noise else "tuned"


def _record(result: Result) -> dict[str, Any]:
    c = result.confirmation
    kernels = [
        {
            "kernel": t.title,
            "key": t.task.key,
            "tuned": t.task.key in c.kept,
            "rolled_back": t.task.key in c.rolled_back,
            "within_noise": t.task.key in c.within_noise,
        }
        | {name: getattr(t, name) for name in ("calls", "trials", "failed", "before", "after", "bound", "stopped")}
        for t in result.tasks
    ]
    record = {name: getattr(result, name) for name in ("database", "trials", "seconds", "overhead", "interrupted")}
    return record | {"ratio": c.ratio, "before": c.before, "after": c.after, "notes": c.notes, "kernels": kernels}


def _opened(path: Path, create: bool = False) -> Database:
    """A database that is there, unless it may be created."""
    from tcomp.autotune.database.store import Database

    if not create:
        opt.check_file(path)
    return Database(path, create=create)


def show(
    database: DatabaseFile,
    task: Annotated[str | None, opt.option("--task", "KEY", "Show the records of this task (the start of its key).")] = None,
    as_json: opt.Json = False,
) -> None:
    """Show what was tuned: kernels, trials, the default schedule's time and the best one's."""
    with _opened(database) as entries:
        if task is not None:
            return _show_records(entries, task, as_json)
        rows = [_summary(entries, task) for task in entries.tasks()]
    if as_json:
        return output.print_json({"tasks": rows})
    cells = [
        (r["key"][:12], r["task"], r["threads"], r["records"], r["failed"], *(_seconds(r[n]) for n in ("default", "best")), r["verdict"])
        for r in rows
    ]
    columns = ("key", "task", "threads>", "records>", "failed>", "default>", "best>", "in the model")
    output.table(output.count(len(rows), "task"), columns, cells)


def _summary(entries: Database, task: Task) -> dict[str, Any]:
    from tcomp.autotune.subject import title

    records, verdicts, best = entries.records(task.key), entries.verdicts(task.key), entries.best(task.key)
    default = next((r.cost for r in records if r.decisions == "{}" and r.ok), None)
    row = {"key": task.key, "task": title(task), "target": task.target, "threads": task.threads, "dims": dict(task.dims)}
    row |= {"records": len(records), "failed": sum(not r.ok for r in records), "default": default, "best": best and best.cost}
    return row | {"decisions": entries.choice(task.key), "verdict": verdicts[-1].judgement if verdicts else ""}


def _show_records(entries: Database, start: str, as_json: bool) -> None:
    from tcomp.schedules.trace import Trace

    found = [task for task in entries.tasks() if task.key.startswith(start)]
    if len(found) != 1:
        raise InputError(f"{len(found)} tasks have keys that start with `{start}`", hint=f"tcomp db show {entries.path} lists them")
    records, best, summary = entries.records(found[0].key), entries.best(found[0].key), _summary(entries, found[0])
    if as_json:
        described = [
            {name: getattr(r.measurement, name) for name in ("status", "seconds", "incumbent", "reason")}
            | {name: getattr(r, name) for name in ("cost", "decisions", "predicted", "environment")}
            | {"time": r.when}
            for r in records
        ]
        return output.print_json({**summary, "text": found[0].text, "entries": described})
    ranked = sorted(records, key=lambda r: (not r.ok, r.cost or 0.0))
    cells = [(r.measurement.status, _seconds(r.cost), r.decisions, r.measurement.reason) for r in ranked]
    output.table(summary["task"], ("status", "time>", "decisions", "reason"), cells)
    if best is not None and best.trace:
        output.line("\nthe best one", "bold")
        output.line(str(Trace.from_json(best.trace)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else output.seconds(value)


def _tell(what: str, number: int, as_json: bool) -> None:
    output.answer(f"{what}: {number} {'entry' if number == 1 else 'entries'}", {"entries": number}, as_json)


def export(database: DatabaseFile, out: Annotated[Path, opt.out_file("The file to write.")], as_json: opt.Json = False) -> None:
    """Write all records as JSON lines, for another machine or another version."""
    opt.check_writable(out)
    with _opened(database) as entries:
        _tell(f"wrote {out}", entries.export(out), as_json)


def import_(
    database: DatabaseFile,
    files: Annotated[list[Path], opt.argument("FILE...", "Files that `tcomp db export` wrote.")],
    as_json: opt.Json = False,
) -> None:
    """Enter records that were exported; those that are there already are passed over. A damaged file is refused as a whole."""
    for path in files:
        opt.check_file(path)
    with _opened(database, create=True) as entries:
        _tell(f"{database} is up to date", sum(entries.import_(path) for path in files), as_json)


def merge(
    database: DatabaseFile,
    others: Annotated[list[Path], opt.argument("OTHER...", "Databases whose records to take.")],
    as_json: opt.Json = False,
) -> None:
    """Enter the records of other databases."""
    for path in others:
        opt.check_file(path)
    new = 0
    with _opened(database, create=True) as entries:
        for path in others:
            with _opened(path) as other:
                new += entries.merge(other)
    _tell(f"{database} is up to date", new, as_json)


def report(
    database: DatabaseFile,
    out: Annotated[Path, opt.out_file("The page to write.", show_default=True)] = Path("report.html"),
    as_json: opt.Json = False,
) -> None:
    """Write an HTML page about a tuning: convergence, predictions, gains, the winning schedules."""
    from tcomp.autotune.report import page
    from tcomp.runtime.artifact import replacing

    opt.check_writable(out)
    with _opened(database) as entries, replacing(out, error=InputError) as (file,):
        file.write(page(entries).encode())
    output.answer(f"wrote {out}", {"report": out}, as_json)
