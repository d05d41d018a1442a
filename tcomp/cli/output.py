"""What commands print: tables and notes on stdout, messages and progress on stderr, or one JSON document; and the status
with which they exit."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tcomp.errors import printable

if TYPE_CHECKING:
    from tcomp.options import Progress

FINDING = 1  # exit status: unsupported nodes, a failed verification; 0 where all is well
USER_ERROR = 2  # exit status: a mistake of the user's
INTERNAL_ERROR = 70  # exit status: a bug of tcomp; EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # exit status: 128 and the number of SIGINT, as shells have it

_WIDE = 200  # columns of a table that goes to a file or pipe: nothing is cut off
PRODUCTS_IN = "float32 products of matrices in {}"


def console(error: bool = False) -> Console:
    """Where results go, or messages."""
    stream = sys.stderr if error else sys.stdout
    return Console(stderr=error, markup=False, highlight=False, width=None if stream.isatty() else _WIDE)


def line(text: str = "", style: str = "", error: bool = False) -> None:
    """One line of a result; or, on stderr, something about the result that is not the result."""
    console(error).print(Text(printable(text), style), soft_wrap=True)


message = partial(line, error=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], styles: Sequence[str] = ()) -> None:
    """Print a table. A column whose name ends in ">" is right-aligned; `styles` colours the rows."""
    if title:
        line(title, "bold")
    grid = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        grid.add_row(*(Text(printable(str(cell))) for cell in row), style=style)
    console().print(grid)


def facts(title: str, rows: Mapping[str, object]) -> None:
    """Print names with their values."""
    line(title, "bold")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(printable(f"  {name}")), Text(printable(str(value))))
    console().print(grid)


def answer(text: str, record: Mapping[str, Any], as_json: bool) -> None:
    """A result that is one line, or its record as JSON."""
    if as_json:
        print_json(record)
    else:
        line(text)


def print_json(value: Any) -> None:
    """`value` as JSON on stdout. NumPy scalars become numbers, paths text, infinities and NaN text."""
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    if printable(text) != text:  # JSON itself escapes but the first of the control characters
        text = json.dumps(_plain(value), indent=2, allow_nan=False).replace("\x7f", "\\u007f")
    print(text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item()
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if value is None or (finite and isinstance(value, bool | int | float | str)) else str(value)


def seconds(value: float) -> str:
    """A duration with three significant digits and its unit."""
    factor, unit = next(((factor, unit) for factor, unit in ((1.0, "s"), (1e-3, "ms")) if value >= factor), (1e-6, "µs"))
    return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:.0f} {unit}"


def stages(times: Mapping[str, float]) -> str:
    """The seconds of each stage of a command."""
    return ", ".join(f"{stage} {seconds(spent)}" for stage, spent in times.items())


def size(value: object) -> str:
    """A number of bytes with its unit; an expression as it is."""
    if not isinstance(value, int | float):
        return f"{value} bytes"
    units = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
    return next((f"{value / (1 << shift):.1f} {unit}" for shift, unit in units if value >= 1 << shift), f"{value:.0f} B")


def count(number: int, noun: str) -> str:
    """A number with its noun, which gets an s if it is not one."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr while the block runs, if that is a terminal: yields `tell(stage, done, total)`."""
    terminal = console(error=True)
    if not terminal.is_terminal:
        yield lambda stage, done, total: None
        return
    from rich import progress as bar

    columns = (
        bar.SpinnerColumn(),
        bar.TextColumn("{task.description}", markup=False),
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TimeElapsedColumn(),
    )
    with bar.Progress(*columns, console=terminal, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda stage, done, total: bars.update(task, description=printable(stage), completed=done, total=total)
