"""`tcomp report`: a page about a database of tuning records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tcomp.cli import output
from tcomp.cli.commands.db import DatabaseFile
from tcomp.cli.files import check_file, check_writable, replacing
from tcomp.cli.options import Json


def report(
    database: DatabaseFile,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a page (one file, no scripts) that shows how tuning went: convergence, predictions, gains, the winning schedules."""
    from tcomp.autotune.database.store import Database
    from tcomp.autotune.report import page

    check_file(database)
    check_writable(out)
    with Database(database, create=False) as entries, replacing(out) as (file,):
        file.write(page(entries).encode())
    if as_json:
        output.print_json({"report": out})
    else:
        output.line(f"wrote {out}")
