"""All commands of `tcomp`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from inspect import cleandoc
from textwrap import indent
from typing import Annotated

import typer

import tcomp
from tcomp.cli.commands.bench import bench
from tcomp.cli.commands.check import check
from tcomp.cli.commands.compile import compile
from tcomp.cli.commands.db import export, import_, merge, report, show
from tcomp.cli.commands.demo import demo
from tcomp.cli.commands.doctor import doctor
from tcomp.cli.commands.explain import explain
from tcomp.cli.commands.run import run
from tcomp.cli.commands.tune import tune
from tcomp.cli.commands.verify import verify
from tcomp.cli.guard import guarded


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tcomp {tcomp.__version__} (Python {platform.python_version()}, {platform.machine()} {platform.system()})")
        raise typer.Exit


def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Compile ONNX models to native code; run, measure and verify them."""


def _examples(text: str) -> str:
    """Help text that keeps its line breaks."""
    return "\b\nExamples:\n" + indent(cleandoc(text), "  ")


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples("tcomp demo\ntcomp compile model.onnx\ntcomp run model.tcomp\ntcomp COMMAND --help"),
)
app.callback()(root)

_COMMANDS: dict[Callable[..., None], str] = {
    compile: """
        tcomp compile model.onnx
        tcomp compile bert.onnx -o bert.tcomp --dim batch=1 --dim seq=1..512
        tcomp compile net.onnx --shape input=1x3x224x224 --target 'cpu -mcpu=x86-64-v3'
        tcomp compile net.onnx --emit graph,loops --emit-to -""",
    run: """
        tcomp run model.tcomp
        tcomp run model.tcomp --input image=cat.npy --save out.npz
        tcomp run bert.onnx --dim batch=1 --dim seq=128 --profile""",
    bench: """
        tcomp bench model.onnx
        tcomp bench model.onnx --against onnxruntime,openvino --threads 1,2
        tcomp bench model.tcomp --seconds 5 --json""",
    tune: """
        tcomp tune model.onnx --budget 60s
        tcomp tune bert.onnx --dim batch=1 --dim seq=128 --budget 10m --database bert.db
        tcomp tune --resume""",
    report: "tcomp report tune.db -o report.html",
    check: "tcomp check model.onnx\ntcomp check model.onnx --json | jq .missing",
    verify: "tcomp verify model.onnx\ntcomp verify bert.onnx --dim seq=16 --full",
    explain: "tcomp explain model.onnx\ntcomp explain model.onnx --target 'cpu -mcpu=znver4'",
    doctor: "tcomp doctor\ntcomp doctor --json",
    demo: "tcomp demo\ntcomp demo --model squeezenet --threads 1",
}
_DATABASE_COMMANDS: dict[Callable[..., None], str] = {
    show: "tcomp db show tune.db\ntcomp db show tune.db --task 3f9a",
    export: "tcomp db export tune.db -o records.jsonl",
    import_: "tcomp db import tune.db records.jsonl",
    merge: "tcomp db merge tune.db other.db",
}
database = typer.Typer(no_args_is_help=True, help="Look into databases of tuning records, and move records between them.")
for group, commands in ((app, _COMMANDS), (database, _DATABASE_COMMANDS)):
    for function, examples in commands.items():
        group.command(function.__name__.rstrip("_"), epilog=_examples(examples))(guarded(function))
app.add_typer(database, name="db")
