"""Compiling models that nobody trusts: in a process of its own, which is ended when it exceeds a limit.

A limit on time must hold inside LLVM and isl, which cannot be interrupted, and one on memory for whatever they allocate; no checks between
the stages of the compiler would do that, an operating system does. So this module, run as a program, is the process that compiles: it reads
the request, one JSON document, and answers with what the report says. The artifact goes into a file that it is given open. With a limit on
memory it compiles all kernels itself, so that the limit is one of all that a compilation takes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tcomp import errors
from tcomp.backends.workers import python_environment
from tcomp.errors import InputError, LimitError, TcompError
from tcomp.options import CompileOptions, Report
from tcomp.passes.quantized_weights import QuantizedWeight
from tcomp.pipeline import compile_model
from tcomp.runtime import Artifact, read_artifact

if TYPE_CHECKING:
    from tcomp.frontends.onnx.importer import Source

LEAST_MEMORY = 256 << 20  # bytes: the compiler itself takes about half of it


@dataclass(frozen=True)
class Limits:
    """What a compilation may take: `seconds` of wall time, and bytes of `memory` (the data of the process, without mapped files)."""

    seconds: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        """Raises `InputError` for limits that no compilation could keep."""
        if self.seconds is not None and not 0 < self.seconds < 1e9:
            raise InputError(f"max_seconds is {self.seconds}", hint="a positive number of seconds")
        if self.memory is not None and not LEAST_MEMORY <= self.memory < 1 << 62:
            raise InputError(f"max_memory is {self.memory} bytes", why=f"the compiler alone needs about {LEAST_MEMORY} bytes")


def compile_within(
    limits: Limits, model: Source, options: CompileOptions, database: str | os.PathLike[str] | None = None
) -> tuple[Artifact, Report]:
    """As `pipeline.compile_model`, with the records of a tuning database, in a process that keeps the limits; what is compiled for is a
    `Target`, and `options.progress` is not called. Raises `LimitError` when a limit is exceeded, else as `tcomp.compile`."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as unnamed:
        image = options.file or unnamed
        path = Path(folder, "model.onnx")
        if isinstance(model, str | os.PathLike):
            path = Path(model).absolute()
        else:
            path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        for number, value in enumerate((options.values or {}).values()):
            np.save(Path(folder, f"{number}.npy"), np.asarray(value), allow_pickle=False)
        request = {
            "model": str(path), "target": str(options.backend.target), "shapes": _listed(options.shapes), "dims": _written(options.dims),
            "threads": options.threads, "direct": options.direct, "emit": list(options.emit), "file": image.fileno(),
            "weights": options.weights, "state": options.state if isinstance(options.state, str | None) else dict(options.state),
            "values": {name: str(Path(folder, f"{n}.npy")) for n, name in enumerate(options.values or {})}, "memory": limits.memory,
            "database": None if database is None else os.path.abspath(database),
        }  # fmt: skip
        answer = _answer(request, limits, image.fileno())
        if "error" in answer:
            found = getattr(errors, str(answer.get("kind")), None)  # the process may be a hostile model's by now
            kind = found if isinstance(found, type) and issubclass(found, TcompError) else TcompError
            raise kind(**answer["error"])
        answer["report"]["quantized"] = [QuantizedWeight(**w) for w in answer["report"]["quantized"]]
        return read_artifact(image), Report(**answer["report"])


def _written(dims: Mapping[str, int | tuple[int, int] | list[int]] | None) -> dict[str, Any]:
    """Dims as JSON, in which a range is not a list of sizes."""
    return {name: {"range": list(given)} if isinstance(given, tuple) else given for name, given in (dims or {}).items()}


def _listed(named: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if named is None else {name: list(v) if isinstance(v, tuple | list) else v for name, v in named.items()}


def _answer(request: Mapping[str, Any], limits: Limits, file: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "tcomp.confined"]
    pipe = subprocess.PIPE
    session = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[file], env=python_environment(), start_new_session=True
    )
    try:
        output, said = session.communicate(json.dumps(request).encode(), limits.seconds)
    except subprocess.TimeoutExpired:
        what, hint = f"compiling takes longer than {limits.seconds:g} s", "allow more with --max-seconds, if the model can be trusted"
        raise LimitError(what, where=request["model"], hint=hint) from None
    finally:  # with the processes that it started
        if session.poll() is None:
            os.killpg(session.pid, signal.SIGKILL)
            session.communicate()
    try:
        answer: dict[str, Any] = json.loads(output)
        return answer
    except ValueError:
        if limits.memory is None:
            text = said.decode(errors="replace")[-500:]
            raise LimitError("the compiler process died", why=f"exit status {session.returncode}; {text}") from None
        _exceeded(limits.memory, f"the compiler process ended with exit status {session.returncode}")  # LLVM ends it where memory is short


def _exceeded(memory: int, why: str) -> NoReturn:
    what, hint = f"compiling takes more than {memory} bytes of memory", "allow more with --max-memory, if the model can be trusted"
    raise LimitError(what, why=why, hint=hint)


def _compiled(request: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    values = {name: np.load(path, allow_pickle=False) for name, path in request["values"].items()}
    dims = {name: tuple(size["range"]) if isinstance(size, dict) else size for name, size in request["dims"].items()}
    try:
        with os.fdopen(request["file"], "r+b", closefd=False) as file:
            given = {key: request[key] for key in ("target", "shapes", "threads", "direct", "weights", "state", "emit")}
            options = CompileOptions(**given, dims=dims, values=values, file=file)
            if request["database"] is not None:
                from tcomp.autotune.database.lookup import recorded  # half of what this module takes to load

                options = replace(options, decide=recorded(request["database"], options.backend, options.threads))
            _, report = compile_model(request["model"], options)
    except MemoryError as error:
        if memory is None:
            raise LimitError("there is not enough memory to compile the model") from error
        _exceeded(memory, "an allocation failed")
    plain = {key: getattr(report, key) for key in ("seconds", "stages", "kernels", "distinct_kernels", "tuned", "not_followed")}
    plain["quantized"] = [asdict(w) for w in report.quantized]
    return plain | {"arena": report.arena if isinstance(report.arena, int) else str(report.arena)}


def _serve() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not get between the answers
    answer: dict[str, Any]
    request = json.load(sys.stdin)
    memory = request["memory"]
    try:
        if memory is not None:
            os.environ["TCOMP_JOBS"] = "1"
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        answer = {"report": _compiled(request, memory)}
    except TcompError as error:
        answer = {"kind": type(error).__name__, "error": error.parts}
    json.dump(answer, out)
    out.flush()


if __name__ == "__main__":
    _serve()
