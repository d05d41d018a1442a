"""`tcomp tune`: faster schedules for the kernels of a model, found by measuring, kept in a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import check_file, check_model_file
from tcomp.cli.guard import INTERRUPTED
from tcomp.cli.options import CompilationOptions, Json, Threads, option
from tcomp.cli.syntax import parse_dims, parse_time
from tcomp.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tcomp.autotune.progress import Result, Status, TaskStatus

_MODEL = "An ONNX model. With --resume it may be left out."
_DATABASE = "Where records are stored; created if there is none."
_RESUME = "Go on with the latest tuning in the database, with the rest of its budget."
MAX_ROWS = 12  # kernels in the live table, so that it stays on the screen


def tune(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL.onnx", help=_MODEL, show_default=False)] = None,
    *,
    budget: Annotated[str | None, option("--budget", "TIME", "Time in all, as in 60s, 10m, 1h. Default: 60s, unless --trials.")] = None,
    trials: Annotated[int | None, option("--trials", "N", "Candidates to measure, at most.", min=1)] = None,
    database: Annotated[Path, typer.Option("--database", metavar="FILE", help=_DATABASE)] = Path("tune.db"),
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    workers: Annotated[int | None, option("--workers", "N", "Building processes. Default: all cores.", min=1, max=4096)] = None,
    cluster: Annotated[str | None, option("--cluster", "ADDRESS", "Measure on a Dask cluster (tcp://host:8786).")] = None,
    options: CompilationOptions,
    size: Annotated[
        list[str] | None, option("--size", "NAME=N", "The size at which an open symbolic dim is measured. May be repeated.")
    ] = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the search.")] = 0,
    as_json: Json = False,
) -> None:
    """Search for faster schedules of a model's kernels; what wins in the whole model is what `tcomp compile --database` follows.

    Give the same --target, --arch, --precision, --threads, --dim, --shape, --value and --direct to `tcomp compile`. Ctrl-C ends the search
    and confirms the best so far.
    """
    from tcomp.autotune.tuner import tune as search

    seconds = None if budget is None else parse_time(budget)
    if model is None:
        if not resume:
            raise InputError("there is no model to tune", hint="tcomp tune MODEL.onnx, or tcomp tune --resume")
        if too_late := [*options.given, *(["--size"] if size else [])]:
            raise InputError(f"{too_late[0]} comes with a model", hint="without one, everything is as it was")
        arguments = _earlier(database)
    else:
        check_model_file(model)
        given = options.compile_options()
        sizes = parse_dims(size, "--size")
        if ranges := [name for name, n in sizes.items() if not isinstance(n, int)]:
            raise InputError(f"--size {ranges[0]} is one number", hint="ranges are for --dim")
        arguments = {
            "model": str(model), "target": given.target, "shapes": given.shapes, "dims": given.dims, "values": given.values,
            "sizes": sizes, "threads": threads, "seed": seed, "workers": workers, "cluster": cluster, "direct": given.direct,
        }  # fmt: skip
    with _live() as tell:
        result = search(budget=seconds, trials=trials, database=database, resume=resume, progress=tell, **arguments)
    if as_json:
        output.print_json(_record(result))
    else:
        _show(result)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _earlier(database: Path) -> dict[str, Any]:
    """The options of the latest tuning in a database."""
    from tcomp.autotune.database.store import Database
    from tcomp.autotune.tuner import tune

    check_file(database, "--database")
    with Database(database, create=False) as entries:
        sessions = [s for s in entries.sessions() if s.options.get("model")]
    if not sessions:
        raise InputError(f"there is nothing to resume in {database}", hint="tcomp tune MODEL.onnx")
    options = {name: v for name, v in sessions[-1].options.items() if name not in ("budget", "trials")}
    if unknown := options.keys() - signature(tune).parameters:
        why = f"there is no option {min(unknown)!r}"
        raise InputError(f"the tuning in {database} is one of another version of tcomp", why=why, hint="tcomp tune MODEL.onnx")
    if isinstance(options.get("dims"), dict):
        options["dims"] = {name: tuple(n) if isinstance(n, list) else n for name, n in options["dims"].items()}
    check_model_file(Path(options["model"]))
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
        yield lambda status: live.update(_table(status))


def _table(status: Status) -> Table:
    from rich.table import Table
    from rich.text import Text

    before, after = sum(t.before for t in status.tasks), sum(t.after for t in status.tasks)
    words = [
        status.phase,
        output.seconds(status.elapsed) + (f" of {output.seconds(status.budget)}" if status.budget else ""),
        f"{status.trials}{f' of {status.limit}' if status.limit else ''} trials",
    ]
    if status.budget and status.elapsed < status.budget:
        words.append(f"{output.seconds(status.budget - status.elapsed)} left")
    if before:
        words.append(f"kernels alone: {output.seconds(before)} -> {output.seconds(after)}")
    if status.error is not None:
        words.append(f"the cost model is off by {status.error:.0%}")
    grid = Table(title=Text("; ".join(words)), box=None, pad_edge=False, title_justify="left", header_style="bold")
    for name in ("kernel", "before", "best", "of bound", "trials", "failed", ""):
        grid.add_column(name, justify="left" if name in ("kernel", "") else "right", no_wrap=True, overflow="ellipsis")
    for task in sorted(status.tasks, key=lambda t: -t.before)[:MAX_ROWS]:
        mark = "<-" if task is status.current and status.phase == "search" else task.stopped
        numbers = output.seconds(task.before), output.seconds(task.after), f"{task.share:.0%}", str(task.trials), str(task.failed)
        grid.add_row(*map(Text, (_calls(task), *numbers, mark)))
    if len(status.tasks) > MAX_ROWS:
        grid.add_row(Text(output.count(len(status.tasks) - MAX_ROWS, "other kernel"), "dim"))
    return grid


def _calls(task: TaskStatus) -> str:
    return f"{task.calls} x {task.title}" if task.calls > 1 else task.title


def _show(result: Result) -> None:
    c, tasks = result.confirmation, {t.task.key: t for t in result.tasks}
    rows = [
        (_calls(tasks[key]), *map(output.seconds, (g.before, g.after)), tasks[key].trials, "tuned" if key in c.kept else "rolled back")
        for key, g in sorted(c.kernels.items(), key=lambda item: item[1].after - item[1].before)
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


def _record(result: Result) -> dict[str, Any]:
    c = result.confirmation
    kernels = [
        {"kernel": t.title, "key": t.task.key, "tuned": t.task.key in c.kept, "rolled_back": t.task.key in c.rolled_back}
        | {name: getattr(t, name) for name in ("calls", "trials", "failed", "before", "after", "bound", "stopped")}
        for t in result.tasks
    ]
    record = {name: getattr(result, name) for name in ("database", "trials", "seconds", "overhead", "interrupted")}
    return record | {"ratio": c.ratio, "before": c.before, "after": c.after, "notes": c.notes, "kernels": kernels}
