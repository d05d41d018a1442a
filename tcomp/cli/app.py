"""All commands of `tcomp`, and how they end: their errors become messages and exit statuses."""

from __future__ import annotations

import functools
import inspect
import platform
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from textwrap import indent
from typing import Annotated, Any, get_type_hints

import typer

import tcomp
from tcomp.cli import cache, output
from tcomp.cli.compile import check, compile, explain
from tcomp.cli.demo import demo
from tcomp.cli.generate import generate
from tcomp.cli.machine import doctor
from tcomp.cli.options import flag
from tcomp.cli.package import package
from tcomp.cli.run import bench, run
from tcomp.cli.serve import serve
from tcomp.cli.sign import sign
from tcomp.cli.tuning import export, import_, merge, report, show, tune
from tcomp.cli.verify import verify
from tcomp.errors import TcompError

Debug = Annotated[bool, flag("--debug", "Show the Python traceback of an error.")]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option `--debug`, and with the fields of a parameter that is a dataclass as options of their own. A `TcompError`
    is printed as one message (with `--json` also as JSON): status 2. Any other exception is a bug of tcomp: one line and status 70."""
    groups: dict[str, Any] = {}
    declared: list[tuple[str, Any, Any]] = []  # name, default, annotation
    for p in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(p.annotation):
            groups[p.name], hints = p.annotation, get_type_hints(p.annotation, include_extras=True)
            declared += [(f.name, f.default, hints[f.name]) for f in fields(p.annotation)]
        else:
            declared.append((p.name, p.default, p.annotation))
    declared.append(("debug", False, Debug))

    @functools.wraps(command)
    def wrapped(*, debug: bool, **options: Any) -> None:
        def failed(text: str, record: Mapping[str, str], status: int) -> typer.Exit:
            if debug:
                traceback.print_exc(file=sys.stderr)
            output.message(f"error: {text}", "red")
            if options.get("as_json"):
                output.print_json({"error": record})
            return typer.Exit(status)

        for name, group in groups.items():
            options[name] = group(**{f.name: options.pop(f.name) for f in fields(group)})
        try:
            command(**options)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            output.message("interrupted", "yellow")
            raise typer.Exit(output.INTERRUPTED) from None
        except TcompError as error:
            raise failed(str(error), {"kind": type(error).__name__, **error.parts}, output.USER_ERROR) from None
        except Exception as error:  # noqa: BLE001  the last resort: reported as what it is
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            hint = "" if debug else "; run with --debug for the traceback"
            raise failed(f"internal error: {what}{hint}", {"kind": "internal", "what": what}, output.INTERNAL_ERROR) from None

    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a) for n, d, a in declared]
    vars(wrapped)["__signature__"] = inspect.Signature(parameters)
    wrapped.__annotations__ = {name: annotation for name, _, annotation in declared}
    return wrapped


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tcomp {tcomp.__version__} (Python {platform.python_version()}, {platform.machine()} {platform.system()})")
        raise typer.Exit


def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Compile ONNX models to native code; run, measure and verify them."""


def _paragraphs(text: str) -> str:
    """Help text whose paragraphs are wrapped to the terminal, not as in the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _examples(text: str) -> str:
    """Help text that keeps its line breaks."""
    return "\b\nExamples:\n" + indent(inspect.cleandoc(text), "  ")


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples("tcomp demo\ntcomp compile model.onnx\ntcomp run model.tcomp\ntcomp COMMAND --help"),
)
app.callback()(root)

_COMMANDS: dict[str, dict[Callable[..., None], str]] = {  # by groups of the help, with examples
    "Compile and run": {
        compile: """
            tcomp compile model.onnx
            tcomp compile bert.onnx -o bert.tcomp --dim batch=1 --dim seq=1..512
            tcomp compile net.onnx --shape input=1x3x224x224 --target 'cpu -mcpu=x86-64-v3'
            tcomp compile net.onnx --emit graph,loops --emit-to -""",
        run: """
            tcomp run model.tcomp
            tcomp run model.tcomp --input image=cat.npy --save out.npz
            tcomp run bert.onnx --dim batch=1 --dim seq=128 --profile""",
        check: """
            tcomp check model.onnx
            tcomp check model.onnx --json | jq .missing""",
        package: """
            tcomp package model.onnx --format c -o model-c
            tcomp package model.tcomp --format c --name classifier --weights-at beside""",
        demo: """
            tcomp demo
            tcomp demo --model squeezenet --threads 1""",
    },
    "Measure and tune": {
        bench: """
            tcomp bench model.onnx
            tcomp bench model.onnx --against onnxruntime,openvino --threads 1,2
            tcomp bench model.tcomp --seconds 5 --json""",
        tune: """
            tcomp tune model.onnx --budget 60s
            tcomp tune bert.onnx --dim batch=1 --dim seq=128 --budget 10m --database bert.db
            tcomp tune --resume""",
        report: "tcomp report tune.db -o report.html",
    },
    "Look inside and verify": {
        explain: """
            tcomp explain model.onnx
            tcomp explain model.onnx --target 'cpu -mcpu=znver4'""",
        verify: """
            tcomp verify model.onnx
            tcomp verify bert.onnx --dim seq=16 --full""",
        sign: """
            tcomp sign model.tcomp --key private.pem
            tcomp sign model.tcomp --key private.pem -o signed.tcomp""",
    },
    "Serve": {
        serve: """
            tcomp serve models/ --port 8000 --grpc-port 8001
            tcomp serve model.tcomp --max-batch 16 --instances 2
            curl localhost:8000/v1/models/model:predict -d '{"inputs": {"x": [[1, 2, 3, 4]]}}'""",
        generate: """
            tcomp generate Qwen2-0.5B --weights int8 --prompt 'Once upon a time'
            tcomp compile Qwen2-0.5B --weights int4 --state auto -o qwen.tcomp
            tcomp generate Qwen2-0.5B --artifact qwen.tcomp --temperature 0.8 --top-p 0.9 < prompt.txt""",
    },
    "This machine": {
        doctor: """
            tcomp doctor
            tcomp doctor --json"""
    },
}
_DATABASE_COMMANDS: dict[Callable[..., None], str] = {
    show: "tcomp db show tune.db\ntcomp db show tune.db --task 3f9a",
    export: "tcomp db export tune.db -o records.jsonl",
    import_: "tcomp db import tune.db records.jsonl",
    merge: "tcomp db merge tune.db other.db",
}
database = typer.Typer(no_args_is_help=True, help="Look into databases of tuning records, and move records between them.")
_CACHE_COMMANDS: dict[Callable[..., None], str] = {cache.show: "tcomp cache show", cache.clean: "tcomp cache clean"}
kept = typer.Typer(no_args_is_help=True, help="Look into the cache of what was compiled before ($TCOMP_CACHE), and empty it.")
for typer_group, panels in ((app, _COMMANDS), (database, {None: _DATABASE_COMMANDS}), (kept, {None: _CACHE_COMMANDS})):
    for panel, commands in panels.items():
        for function, examples in commands.items():
            name, text = function.__name__.rstrip("_"), _paragraphs(inspect.getdoc(function) or "")
            typer_group.command(name, help=text, epilog=_examples(examples), rich_help_panel=panel)(guarded(function))
app.add_typer(database, name="db", rich_help_panel="Measure and tune")
app.add_typer(kept, name="cache", rich_help_panel="This machine")
