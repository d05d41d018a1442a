"""`tcomp db` and `tcomp report`: look into databases of tuning records, and move records between them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcomp.cli import output
from tcomp.cli.files import check_file, check_writable
from tcomp.cli.options import Json, option
from tcomp.errors import InputError

if TYPE_CHECKING:
    from tcomp.autotune.database.store import Database
    from tcomp.autotune.tasks import Task

DatabaseFile = Annotated[Path, typer.Argument(metavar="DATABASE", help="A file that `tcomp tune` made.", show_default=False)]


def show(
    database: DatabaseFile,
    task: Annotated[str | None, option("--task", "KEY", "Show the records of this task (the start of its key).")] = None,
    as_json: Json = False,
) -> None:
    """Show what was tuned: kernels, trials, the default schedule's time and the best one's."""
    with _opened(database) as entries:
        if task is not None:
            _show_records(entries, task, as_json)
            return
        rows = [_summary(entries, task) for task in entries.tasks()]
    if as_json:
        output.print_json({"tasks": rows})
        return
    cells = [
        (r["key"][:12], r["task"], r["threads"], r["records"], r["failed"], *(_seconds(r[n]) for n in ("default", "best")), r["verdict"])
        for r in rows
    ]
    columns = ("key", "task", "threads>", "records>", "failed>", "default>", "best>", "in the model")
    output.table(output.count(len(rows), "task"), columns, cells)


def _opened(path: Path, create: bool = False) -> Database:
    """A database that is there, unless it may be created."""
    from tcomp.autotune.database.store import Database

    if not create:
        check_file(path)
    return Database(path, create=create)


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
        output.print_json({**summary, "text": found[0].text, "entries": described})
        return
    ranked = sorted(records, key=lambda r: (not r.ok, r.cost or 0.0))
    cells = [(r.measurement.status, _seconds(r.cost), r.decisions, r.measurement.reason) for r in ranked]
    output.table(summary["task"], ("status", "time>", "decisions", "reason"), cells)
    if best is not None and best.trace:
        output.line()
        output.line("the best one", "bold")
        output.line(str(Trace.from_json(best.trace)))


def _seconds(value: float | None) -> str:
    return "-" if value is None else output.seconds(value)


def export(
    database: DatabaseFile,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Write all records as JSON lines, for another machine or another version."""
    check_writable(out)
    with _opened(database) as entries:
        _tell(f"wrote {out}", entries.export(out), as_json)


def import_(
    database: DatabaseFile,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that `tcomp db export` wrote.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Enter records that were exported; those that are there already are passed over. A damaged file is refused as a whole."""
    for path in files:
        check_file(path)
    with _opened(database, create=True) as entries:
        _tell(f"{database} is up to date", sum(entries.import_(path) for path in files), as_json)


def merge(
    database: DatabaseFile,
    others: Annotated[list[Path], typer.Argument(metavar="OTHER...", help="Databases whose records to take.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Enter the records of other databases."""
    for path in others:
        check_file(path)
    new = 0
    with _opened(database, create=True) as entries:
        for path in others:
            with _opened(path) as other:
                new += entries.merge(other)
    _tell(f"{database} is up to date", new, as_json)


def _tell(what: str, number: int, as_json: bool) -> None:
    if as_json:
        output.print_json({"entries": number})
    else:
        output.line(f"{what}: {number} {'entry' if number == 1 else 'entries'}")


def report(
    database: DatabaseFile,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page (one file, no scripts) that shows how tuning went: convergence, predictions, gains, the winning schedules."""
    from tcomp.autotune.report import page
    from tcomp.runtime.files import replacing

    check_writable(out)
    with _opened(database) as entries, replacing(out, error=InputError) as (file,):
        file.write(page(entries).encode())
    if as_json:
        output.print_json({"report": out})
    else:
        output.line(f"wrote {out}")
