"""How a command ends: its errors become messages and exit statuses."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tcomp.cli import output
from tcomp.errors import TcompError

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130  # 70 is EX_SOFTWARE of sysexits.h

Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option `--debug`. A `TcompError` is printed as one message (with `--json` also as JSON): status 2. Any other
    exception is a bug of tcomp: one line and status 70."""

    @functools.wraps(command)
    def wrapped(*, debug: bool, **options: Any) -> None:
        try:
            command(**options)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            output.message("interrupted", "yellow")
            raise typer.Exit(INTERRUPTED) from None
        except TcompError as error:
            _report(str(error), debug)
            if options.get("as_json"):
                record = {"kind": type(error).__name__, "what": error.what, "where": error.where, "why": error.why, "hint": error.hint}
                output.print_json({"error": record})
            raise typer.Exit(USER_ERROR) from None
        except Exception as error:  # noqa: BLE001  the last resort: reported as what it is
            text = " ".join(str(error).split())[:300]
            hint = "" if debug else "; run with --debug for the traceback"
            _report(f"internal error: {type(error).__name__}: {text}{hint}", debug)
            if options.get("as_json"):
                output.print_json({"error": {"kind": "internal", "what": f"{type(error).__name__}: {text}"}})
            raise typer.Exit(INTERNAL_ERROR) from None

    signature = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    vars(wrapped)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), extra])
    wrapped.__annotations__ = {**inspect.get_annotations(command, eval_str=True), "debug": Debug}
    return wrapped


def _report(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
    output.message(f"error: {text}", "red")
