"""A soak test of the runtime: processes and threads that load, run, stop, fork and unload models at random, for as long as wanted.

    python -m tests.soak --minutes 30 [--processes 8] [--threads 4] [--seed 0]

Meanwhile the artifacts are replaced by others of the same names (by rename), and each process may have few descriptors and little memory.
Every result is compared, bit for bit, with what a fresh process computed before. Prints a table, and exits with 1 if a process died or hung,
a result was wrong, an error came that nobody provoked, or memory, descriptors or threads grew from the second quarter to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tcomp.errors import InputError, StoppedError
from tcomp.runtime import Module

BATCHES = (1, 2, 5)
DESCRIPTORS = 96  # of a process
ROOM = 3 << 30  # bytes of addresses above what a process starts with: 4 threads x 6 modules, their workspaces and stacks
HELD = 6  # modules of a thread
FORK_LIMIT = 60  # seconds that a child may take for one run
EVERY = 5  # seconds between samples


# ---------------------------------------------------------------- before


def prepare(folder: Path) -> None:
    """Two versions of some models, their inputs, and their results by number of threads and batch."""
    import tcomp
    from tests.models import nets

    rng = np.random.default_rng(0)
    for name, shape in (("mlp", (48,)), ("convolutions", (3, 12, 12)), ("softmax", (33, 7))):
        for version in range(2):
            net = nets.Net(name, seed=version)
            x = net.input("x", ("n", *shape))
            if name == "mlp":
                x = net.linear(net("Relu", net.linear(x, 48, 300)), 300, 20)
            elif name == "convolutions":
                x = net("Relu", net.conv(net("Relu", net.conv(x, 3, 16)), 16, 8))
            else:
                x = net("Add", net("Softmax", x, axis=-1), net.weight(33, 7))
            artifact = tcomp.compile(net.build(x), threads=2).artifact
            artifact.save(folder / f"{name}.{version}")
            (folder / f"{name}.{version}.name").write_text(artifact.manifest.outputs[0].name)
            for batch in BATCHES:
                given = folder / f"{name}.{batch}.npy"
                if not version:
                    np.save(given, rng.standard_normal((batch, *shape)).astype(np.float32))
                for threads in (1, 2):
                    (result,) = Module.load(artifact, threads).run({"x": np.load(given)}).values()
                    np.save(folder / f"{name}.{version}.{batch}.{threads}.npy", result)
        (folder / name).write_bytes((folder / f"{name}.0").read_bytes())
    (folder / "names").write_text("mlp convolutions softmax")


# ---------------------------------------------------------------- a process


class Loaded:
    """A module, and which version of its model it turned out to be."""

    def __init__(self, soak: Soak, name: str, threads: int, verify: bool) -> None:
        self.soak, self.name, self.threads, self.version = soak, name, threads, -1
        self.module = Module.load(soak.folder / name, threads, verify)

    def check(self, batch: int, found: np.ndarray) -> str:
        """What is wrong with a result, "" if nothing is."""
        fits = [v for v in range(2) if np.array_equal(self.soak.results[self.name, v, batch, self.threads], found)]
        if not fits or self.version not in (-1, fits[0]):
            return f"{self.name}, batch {batch}, {self.threads} threads: the result is that of version {fits}, not {self.version}"
        self.version = fits[0]
        return ""


class Soak:
    """One process: what its threads share."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.names = (folder / "names").read_text().split()
        self.inputs = {(n, b): np.load(folder / f"{n}.{b}.npy") for n in self.names for b in BATCHES}
        self.results = {
            (n, v, b, t): np.load(folder / f"{n}.{v}.{b}.{t}.npy") for n in self.names for v in range(2) for b in BATCHES for t in (1, 2)
        }
        self.done, self.wrong, self.shared = Counter[str](), list[str](), list[Loaded]()

    def work(self, number: int, end: float) -> None:
        """A thread."""
        rng, own = random.Random(f"{self.seed} {number}"), list[Loaded]()
        actions = {"run": 60, "run into given arrays": 10, "bound runs": 4, "load": 12, "unload": 11, "fork": 1, "wrong input": 3,
                   "too little memory": 1, "save": 2, "stop": 4, "cancel": 2}  # fmt: skip
        while time.monotonic() < end and len(self.wrong) < 20:
            (action,) = rng.choices([*actions], [*actions.values()])
            try:
                self.act(action, rng, own)
                self.done[action] += 1
            except StoppedError:  # another thread cancelled the runs of a module that both use
                self.done["cancelled"] += 1
            except Exception:  # noqa: BLE001  each is a finding
                self.wrong.append(f"{action}: {traceback.format_exc()[-1500:]}")

    def act(self, action: str, rng: random.Random, own: list[Loaded]) -> None:
        if action == "load" or not own:
            own.append(Loaded(self, rng.choice(self.names), rng.randint(1, 2), rng.random() < 0.3))
            self.shared[:] = [*self.shared[-3:], own[-1]]
            if len(own) > HELD:
                own.pop(0)
            return
        model = rng.choice(own + self.shared)
        batch = rng.choice(BATCHES)
        x = self.inputs[model.name, batch]
        output = model.module.outputs[0].name
        match action:
            case "run":
                self.compare(model, batch, model.module.run({"x": x})[output])
            case "run into given arrays":
                place = np.empty_like(self.results[model.name, 0, batch, 1])
                assert model.module.run({"x": x}, out={output: place})[output] is place
                self.compare(model, batch, place)
            case "bound runs":
                bound = model.module.bind({"x": x.copy()})
                for _ in range(3):
                    bound.run()
                    self.compare(model, batch, np.array(bound.outputs[output]))
            case "unload":
                own.remove(rng.choice(own))
            case "fork":
                self.fork(model, batch, x, output)
            case "wrong input":
                self.refused(lambda: model.module.run({"x": x[..., :-1]}))
            case "too little memory":
                small = Module.load(self.folder / model.name, max_memory=16)
                self.refused(lambda: small.run({"x": x}))
            case "save":
                side = self.folder / f"saved {os.getpid()} {threading.get_ident()}"
                model.module.save(side)
                Module.load(side, verify=True)
                side.unlink()
            case "stop":
                model.module.run({"x": x}, timeout=rng.choice((1e-6, 1e-5, 1e-4, 10.0)))
            case "cancel":
                model.module.cancel()

    def compare(self, model: Loaded, batch: int, found: np.ndarray) -> None:
        if problem := model.check(batch, found):
            self.wrong.append(problem)

    def refused(self, call: Any) -> None:
        try:
            call()
        except InputError:
            return
        self.wrong.append("what must be refused was run")

    def fork(self, model: Loaded, batch: int, x: np.ndarray, output: str) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            with suppress(BaseException):
                status = 2 if model.check(batch, model.module.run({"x": x})[output]) else 0
            os._exit(status)
        until = time.monotonic() + FORK_LIMIT
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                os.kill(pid, 9)
            time.sleep(0.005)
        if found[1]:
            self.wrong.append(f"a forked child ended with {os.waitstatus_to_exitcode(found[1])}")


def process(folder: Path, seed: int, threads: int, seconds: float) -> None:
    """What one process does; it prints what came of it as JSON."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soak, end = Soak(folder, seed), time.monotonic() + seconds
    work = [threading.Thread(target=soak.work, args=(n, end)) for n in range(threads)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    print(json.dumps({"done": soak.done, "wrong": soak.wrong}))


# ---------------------------------------------------------------- all processes


def measured(pid: int) -> tuple[int, int, int]:
    """(KiB of memory, descriptors, threads) of a process."""
    root = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir(root / "fd")), int(status["Threads"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seconds = args.minutes * 60
    if args.child:
        process(Path(args.child[0]), int(args.child[1]), args.threads, seconds)
        return 0
    with tempfile.TemporaryDirectory(prefix="tcomp-soak-") as place:
        folder = Path(place)
        prepare(folder)
        return watch(folder, args, seconds)


def watch(folder: Path, args: argparse.Namespace, seconds: float) -> int:
    """Starts the processes, replaces artifacts and takes samples until all have ended; prints the table."""
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(args.minutes), "--threads", str(args.threads)]
    running = [
        subprocess.Popen([*command, "--child", str(folder), str(args.seed * 1000 + n)], stdout=subprocess.PIPE, text=True)
        for n in range(args.processes)
    ]
    rng, start, replaced = random.Random(args.seed), time.monotonic(), 0
    names, samples, due = (folder / "names").read_text().split(), list[tuple[float, list[tuple[int, int, int]]]](), EVERY
    while any(p.poll() is None for p in running) and time.monotonic() < start + seconds + 120:
        name = rng.choice(names)
        (folder / "next").write_bytes((folder / f"{name}.{rng.randrange(2)}").read_bytes())
        os.replace(folder / "next", folder / name)
        replaced += 1
        if time.monotonic() - start > due and time.monotonic() - start < seconds:
            with suppress(OSError, KeyError):
                samples.append((time.monotonic() - start, [measured(p.pid) for p in running]))
            due += EVERY
        time.sleep(0.05)
    done, wrong, crashes = Counter[str](), list[str](), list[str]()
    for p in running:
        if p.poll() is None:
            p.kill()
            crashes.append("hung")
        elif p.returncode:
            crashes.append(f"ended with {p.returncode}")
        text = p.communicate()[0]
        if p.returncode == 0:
            found = json.loads(text)
            done.update(found["done"])
            wrong += found["wrong"]
    minutes = (time.monotonic() - start) / 60
    print(
        f"{minutes:.1f} minutes, {args.processes} processes x {args.threads} threads, seed {args.seed}, {replaced} replacements of artifacts"
    )
    for action, count in sorted(done.items()):
        print(f"  {action:24s} {count:10,d}")
    flat = True
    print(f"  {'per process, medians':24s} {'start':>10s} {'quarter 2':>10s} {'quarter 4':>10s} {'most':>10s}")
    quarter = max(1, len(samples) // 4)
    for n, (what, slack) in enumerate((("memory, MiB", 8 << 10), ("descriptors", 8), ("threads", 2))):
        rows = [[process[n] for process in sample] for _, sample in samples] or [[0]]
        unit = 1024 if n == 0 else 1
        first, second, last = (
            statistics.median([x for row in part for x in row]) for part in (rows[:1], rows[quarter : 2 * quarter] or rows, rows[-quarter:])
        )
        flat &= last <= second + slack
        print(f"  {what:24s} {first / unit:10.1f} {second / unit:10.1f} {last / unit:10.1f} {max(map(max, rows)) / unit:10.1f}")
    print(f"  crashes {len(crashes)} {crashes or ''}, wrong or unexpected {len(wrong)}, {'flat' if flat else 'NOT FLAT'}")
    for text, times in Counter(wrong).most_common(5):
        print(f"{times} x {text}")
    return 0 if not crashes and not wrong and flat else 1


if __name__ == "__main__":
    sys.exit(main())
