"""Models as C programs: `python -m benchmarks.c_packages [--only 'resnet50,lstm']`.

Each model is packaged for C (`tcomp package --format c`), its example is built by `cc -std=c99 -Wall -Wextra -Werror -pedantic`, once with
AddressSanitizer and UBSan, once plain with the model linked in; its outputs must be the bits that Python computes. The same by libtcomp, from
the artifact. Times are of whole processes, from their start to their end, with inputs read from files and outputs written: the least of many,
in turns with an empty program, whose time is taken off. "One run" is one of many, in a process that goes on. Free sizes: PP-OCR's networks take any image, YOLO finds any number of boxes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

import tcomp
from benchmarks import models
from benchmarks.timing import least_by_clocks
from tcomp.runtime import LoadedModel
from tcomp.shipping.c_interface import CInterface
from tcomp.shipping.c_package import write_c_package

ROOT = Path(__file__).parents[1]
INCLUDE, RUNNER = ROOT / "tcomp/runtime/include", ROOT / "tests/shipping/libtcomp_runner.c"
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FREE = {"ppocr_det", "ppocr_rec"}  # compiled for any size
NAMES = ("resnet50", "ppocr_det", "ppocr_rec", "yolov8n", "lstm")


def with_suppression(path: Path) -> onnx.ModelProto:
    """YOLOv8 with non-maximum suppression of its boxes behind it: how many are left depends on the image."""
    model = onnx.load(path)
    graph, found = model.graph, model.graph.output[0].name
    constants = {"begin": [4], "middle": [4], "zero": [0], "end": [1 << 30], "axis": [1], "most": [100]}
    graph.initializer.extend(numpy_helper.from_array(np.array(v, np.int64), n) for n, v in constants.items())
    limits = {"overlap": [0.45], "least": [0.01]}
    graph.initializer.extend(numpy_helper.from_array(np.array(v, np.float32), n) for n, v in limits.items())
    graph.node.extend([
        helper.make_node("Slice", [found, "zero", "middle", "axis"], ["places"]), helper.make_node("Slice", [found, "begin", "end", "axis"], ["sure"]),
        helper.make_node("Transpose", ["places"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "sure", "most", "overlap", "least"], ["kept"], center_point_box=1),
    ])  # fmt: skip
    graph.output.append(helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3]))
    return model


def compiled(name: str) -> tuple[LoadedModel, dict[str, np.ndarray[Any, Any]]]:
    """A model of the table, for one thread, and inputs."""
    model = next(m for m in models.MODELS if m.name == name)
    path = models.obtain(model)
    feeds = models.load_arrays(path, "inputs")
    source: Any = with_suppression(path) if name == "yolov8n" else path
    if name in FREE:
        return tcomp.compile(source, threads=1), feeds
    return tcomp.compile(source, threads=1, **models.compile_arguments(model, feeds)), feeds


def call(*command: object, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode or done.stderr:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(found: Sequence[Path], wanted: Sequence[np.ndarray[Any, Any]], what: str) -> None:
    """Refuse other bits."""
    for path, array in zip(found, wanted, strict=True):
        if path.read_bytes() != array.tobytes():
            raise SystemExit(f"{what}: {path.name} has other bits than Python")
        path.unlink()


def programs(name: str, module: LoadedModel, feeds: dict[str, np.ndarray[Any, Any]], folder: Path) -> dict[str, list[str]]:
    """Commands that run the model once, by kind; those with sanitizers were run, and all have the bits of Python."""
    package, (wanted, inputs) = folder / name, (list(module.run(feeds).values()), [feeds[spec.name] for spec in module.inputs])
    write_c_package(module.artifact, package, name)
    module.save(folder / f"{name}.tcomp")
    files = []
    for n, array in enumerate(inputs):
        files.append(folder / f"{name}{n}.bin")
        array.tofile(files[-1])
    c = CInterface(name, module.manifest, module.artifact.weights.nbytes, False, True)
    sizes: dict[str, int] = {}
    for spec in module.inputs:
        sizes |= {d: feeds[spec.name].shape[axis] for axis, d in enumerate(spec.shape) if isinstance(d, str)}
    given = [str(sizes[dim.name]) for _, _, dim in c.sizes]
    built = {}
    for kind, flags in (("sanitized", SANITIZERS), ("package", ["-O2"])):
        library = [f"-I{package}/include", package / "example/main.c", package / f"lib/lib{name}.a", "-lpthread"]
        call("cc", *STRICT, *flags, *library, "-o", folder / f"{name}-{kind}", folder=folder)
        built[kind] = [str(folder / f"{name}-{kind}"), *given, *map(str, files)]
        call(*built[kind], folder=folder)
        check([folder / f"{t.name}.bin" for t in c.outputs], wanted, f"{name}, {kind}")
    shaped = [text for file, array in zip(files, inputs, strict=True) for text in (f"={file}", *map(str, array.shape))]
    for kind, flags in (("libtcomp sanitized", SANITIZERS), ("libtcomp", ["-O2"])):
        program = folder / kind.replace(" ", "-")
        if not program.exists():
            call("cc", *STRICT, *flags, f"-I{INCLUDE}", RUNNER, INCLUDE / "libtcomp.c", "-ldl", "-lpthread", "-o", program, folder=folder)
        built[kind] = [str(program), str(folder / f"{name}.tcomp"), "1", "1", "0", *shaped]
        call(*built[kind], folder=folder)
        check([folder / f"out{n}.bin" for n in range(len(wanted))], wanted, f"{name}, {kind}")
    return {kind: built[kind] for kind in ("package", "libtcomp")}


def _used() -> float:
    """Seconds of processors that child processes took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print a table; exit with a message where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="comma-separated patterns of names")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    table = Table("model", "one run", "of it CPU", "C package", "of it CPU", "libtcomp", "of it CPU", box=box.SIMPLE)
    for name in (n for n in NAMES if any(fnmatch(n, p) for p in given.only.split(","))):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            module, feeds = compiled(name)
            commands = programs(name, module, feeds, folder)
            (folder / "empty.c").write_text("int main(void) { return 0; }\n")
            call("cc", "empty.c", "-o", "empty", folder=folder)
            bound = module.bind(feeds)
            run, work = least_by_clocks({"run": bound.run}, [time.perf_counter, time.process_time], given.rounds)["run"]
            calls = {
                kind: partial(subprocess.run, command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
                for kind, command in {**commands, "empty": [str(folder / "empty")]}.items()
            }
            took = least_by_clocks(calls, [time.perf_counter, _used], given.rounds)
            own = [f"{1e3 * (took[kind][n] - took['empty'][n]):.1f} ms" for kind in ("package", "libtcomp") for n in (0, 1)]
            table.add_row(name, f"{1e3 * run:.1f} ms", f"{1e3 * work:.1f} ms", *own)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
