"""How a command ends: its errors become messages and exit statuses."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from tcomp.cli import output
from tcomp.errors import TcompError

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130  # 70 is EX_SOFTWARE of sysexits.h

Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option `--debug`, and with the fields of a parameter that is a dataclass as options of their own. A `TcompError`
    is printed as one message (with `--json` also as JSON): status 2. Any other exception is a bug of tcomp: one line and status 70."""
    declared = {p.name: (p.default, p.annotation) for p in inspect.signature(command, eval_str=True).parameters.values()}
    groups = {name: kind for name, (_, kind) in declared.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[inspect.Parameter] = []
    for name, (default, annotation) in {**declared, "debug": (False, Debug)}.items():
        hints = get_type_hints(annotation, include_extras=True) if name in groups else {}
        options = [(f.name, f.default, hints[f.name]) for f in fields(annotation)] if name in groups else [(name, default, annotation)]
        parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a) for n, d, a in options]

    @functools.wraps(command)
    def wrapped(*, debug: bool, **options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{f.name: options.pop(f.name) for f in fields(group)})
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
                output.print_json({"error": {"kind": type(error).__name__, **error.parts}})
            raise typer.Exit(USER_ERROR) from None
        except Exception as error:  # noqa: BLE001  the last resort: reported as what it is
            text = " ".join(str(error).split())[:300]
            hint = "" if debug else "; run with --debug for the traceback"
            _report(f"internal error: {type(error).__name__}: {text}{hint}", debug)
            if options.get("as_json"):
                output.print_json({"error": {"kind": "internal", "what": f"{type(error).__name__}: {text}"}})
            raise typer.Exit(INTERNAL_ERROR) from None

    vars(wrapped)["__signature__"] = inspect.Signature(parameters)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _report(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
    output.message(f"error: {text}", "red")
