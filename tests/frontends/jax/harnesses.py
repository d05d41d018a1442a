"""JAX's own harnesses of all primitives through `tcomp.jax.jit`: `python -m tests.frontends.jax.harnesses [--only gather,sort] [--every 20]`.

Each harness of `jax._src.internal_test_util.test_harnesses` that JAX implements on the CPU is run by `jax.jit` and by tcomp, with 64-bit
types. Results within JAX's default tolerances of their element type are "equal"; those of 32 and 64 bits that are not, but which differ
by no more than rounding does in sums and series (`ROUNDING`), are "close"; others are "wrong". "unsupported" says that tcomp refuses
it, "error" anything else. Worker processes each take one harness after the other. Lines of JSON go to `--report`, and what is there
already is not done again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROUNDING = {"float32": 1e-4, "complex64": 1e-4, "float64": 1e-11, "complex128": 1e-11, "float16": 4e-3, "bfloat16": 4e-2}
"""Of the largest element, by the type of what is given or of the result: for sums of hundreds of terms, and functions whose results lose digits."""


def differences(found: Any, wanted: Any, given: str) -> tuple[str, str]:
    """(verdict, details) of one array, computed from arrays of the type `given`."""
    from jax._src.public_test_util import default_tolerance

    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return "wrong", f"{found.dtype}{list(found.shape)} against {wanted.dtype}{list(wanted.shape)}"
    tolerance = default_tolerance()[wanted.dtype]
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64 if wanted.dtype.kind not in "iub" else wanted.dtype
    a, b = found.astype(wide), wanted.astype(wide)
    if np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
        return "equal", ""
    if wanted.dtype.kind in "iub":
        return "wrong", f"{np.sum(a != b)} of {a.size} differ: {a[a != b][:3]} against {b[a != b][:3]}"
    same = (np.isnan(a) == np.isnan(b)) & (np.isinf(a) == np.isinf(b)) & (~np.isinf(a) | (a == b) | (wanted.dtype.kind == "c"))
    finite = np.isfinite(a) & np.isfinite(b)
    limit = max(ROUNDING.get(name, 0.0) for name in (wanted.dtype.name, given))
    error = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    largest = max(1.0, float(np.max(np.abs(np.where(finite, b, 0)), initial=0)))
    details = f"error {np.max(error, initial=0):.1e}, largest {largest:.1e}, {np.sum(~same)} not finite alike"
    return ("close" if same.all() and np.max(error, initial=0) <= limit * largest else "wrong"), details


def settled(harness: Any, arguments: Any, found: list[Any], wanted: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both results, in one order where JAX leaves it open: a sort that is not stable may exchange what has equal keys, and of equal elements
    any may be among the largest."""
    if harness.group_name == "sort" and not harness.params["is_stable"] and len(found) > 1:
        axis = harness.params["dimension"]

        def in_order(arrays: list[Any]) -> list[Any]:
            order = np.lexsort([np.asarray(a) for a in reversed(arrays)], axis=axis)
            return [np.take_along_axis(np.asarray(a), order, axis) for a in arrays]

        return in_order(found), in_order(wanted)
    if harness.group_name == "approx_top_k":
        (x,) = (np.asarray(a) for a in arguments)
        values, places = found
        if np.array_equal(np.take_along_axis(x, np.asarray(places), -1), np.asarray(values)):
            return [values], wanted[:1]
    return found, wanted


def judged(harness: Any) -> tuple[str, str]:
    """(verdict, details) of a harness."""
    import jax

    import tcomp.jax
    from tcomp.errors import UnsupportedError

    try:
        arguments = harness.dyn_args_maker(np.random.RandomState(zlib.adler32(harness.fullname.encode())))
        wanted = jax.tree.leaves(jax.jit(harness.dyn_fun)(*arguments))
    except Exception as error:  # noqa: BLE001  one that JAX itself refuses here
        return "skipped", f"{type(error).__name__}: {error}"[:200]
    try:
        found = jax.tree.leaves(tcomp.jax.jit(harness.dyn_fun, threads=1, strict=True)(*arguments))
    except UnsupportedError as error:
        return "unsupported", f"{error.what}: {error.why}"[:300]
    except Exception as error:  # noqa: BLE001  whatever else is a finding
        return "error", f"{type(error).__name__}: {error}"[:300]
    verdicts, (found, wanted) = [], settled(harness, arguments, found, wanted)
    for a, b in zip(found, wanted, strict=True):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        verdicts.append(differences(np.asarray(a), np.asarray(b), np.dtype(harness.dtype).name))
    order = ["equal", "close", "wrong"]
    return max(verdicts, key=lambda v: order.index(v[0]), default=("equal", ""))


def harnesses() -> dict[str, Any]:
    """Those that JAX implements on the CPU, by name."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from jax._src.internal_test_util import test_harnesses

    return {h.fullname: h for h in test_harnesses.all_harnesses if h.filter("cpu")}


def work(cpu: int) -> None:
    """A worker: a name comes in, a verdict goes out, one line each."""
    if hasattr(os, "sched_setaffinity"):
        known = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {known[cpu % len(known)]})
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    known_harnesses = harnesses()
    for line in sys.stdin:
        name = line.rstrip("\n")
        print(
            json.dumps({"name": name, "group": known_harnesses[name].group_name, "verdict": judged(known_harnesses[name])}),
            file=out,
            flush=True,
        )


class Worker:
    """A process with `work`, started anew after one that crashed or took too long."""

    def __init__(self, number: int) -> None:
        self.number, self.process, self.answers = number, self.start(number), queue.SimpleQueue[str]()
        self.listen()

    @staticmethod
    def start(number: int) -> Any:
        command = [sys.executable, "-m", "tests.frontends.jax.harnesses", "--worker", str(number)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def listen(self) -> None:
        stream, answers = self.process.stdout, self.answers

        def read() -> None:
            for line in stream:
                answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()

    def ask(self, name: str, seconds: float) -> dict[str, Any]:
        """The record of one harness."""
        try:
            print(name, file=self.process.stdin, flush=True)
            answer = self.answers.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError):
            answer = ""
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        hung = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        self.process, self.answers = self.start(self.number), queue.SimpleQueue()
        self.listen()
        return {"name": name, "group": name.split("_")[0], "verdict": ["error", "it took too long" if hung else "the process ended"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups, comma-separated")
    parser.add_argument("--every", type=int, default=1, help="take every n-th harness")
    parser.add_argument("--report", type=Path, default=Path("jax_harnesses.jsonl"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=300.0, help="of one harness, at which it counts as an error")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    names = [name for name, h in harnesses().items() if not options.only or h.group_name in options.only.split(",")][:: options.every]
    known = [json.loads(line) for line in options.report.read_text().splitlines()] if options.report.exists() else []
    records = {r["name"]: r for r in known if r["name"] in set(names)}
    waiting = queue.SimpleQueue[str]()
    for name in names:
        if name not in records:
            waiting.put(name)
    lock = threading.Lock()

    def run(number: int) -> None:
        worker = Worker(number)
        while not waiting.empty():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            record = worker.ask(name, options.seconds)
            with lock, options.report.open("a") as file:
                records[record["name"]] = record
                print(json.dumps(record), file=file)
        worker.process.kill()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = collections.Counter(r["verdict"][0] for r in records.values())
    failed = collections.Counter((r["verdict"][0], r["group"]) for r in records.values() if r["verdict"][0] not in ("equal", "skipped"))
    print(f"{sum(counts.values())} harnesses: {dict(counts)}")
    for (verdict, group), count in sorted(failed.items(), key=lambda item: -item[1]):
        print(f"{count:5} {verdict:12} {group}")
    if bad := [(name, *r["verdict"]) for name, r in records.items() if r["verdict"][0] in ("wrong", "error")]:
        raise SystemExit("\n".join(map(str, bad)))


if __name__ == "__main__":
    main()
