"""A soak test of the server: twice the load that it can carry, models replaced all the time, clients that vanish, hang and send garbage.

    python -m tests.serve.soak --minutes 10 [--garbage 1000] [--reload 5] [--seed 0]

Both protocols take half of the load. Every answer is compared with what one of the two versions of the model gives for its input. Prints a
table, and exits with 1 if an answer was wrong, an accepted request was lost, the server died or did not end as it should, logged an error,
answered garbage with something else than a refusal, or its memory grew from the second quarter to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from tcomp.runtime import load
from tcomp.serve.grpc.messages import MESSAGES
from tests.serve.servers import artifact
from tests.serve.test_garbage import http2_garbage, http_request
from tests.serve.test_http import binary

CLIENTS = 96  # of each protocol, at most so many requests under way
INPUTS = 16  # different ones
METHOD = "/inference.GRPCInferenceService/ModelInfer"
GROWTH = 1.25  # of memory, from the second quarter to the last, is too much


class Model:
    """Two versions of a model, its inputs, and what each version makes of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.files = []
        for version in range(2):
            w = [rng.standard_normal(shape, np.float32) / 16 for shape in ((256, 2048), (2048, 256))]
            nodes = [("MatMul", ["x", "v"], "h"), ("Relu", ["h"], "r"), ("MatMul", ["r", "w"], "y")]
            self.files.append(artifact(folder / f"{version}.tcomp", nodes, {"x": ["n", 256]}, {"y": ["n", 256]}, v=w[0], w=w[1]))
        self.inputs = [rng.standard_normal((1 + n % 3, 256), np.float32) for n in range(INPUTS)]
        self.expected = [[load(file).run({"x": x})["y"] for x in self.inputs] for file in self.files]
        self.http, self.grpc = [], []
        for x in self.inputs:
            body, headers = binary(x)
            length = headers["Inference-Header-Content-Length"]
            self.http.append(
                f"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nInference-Header-Content-Length: {length}\r\n\r\n".encode()
                + body
            )
            request = MESSAGES["ModelInferRequest"](model_name="net")
            request.inputs.add(name="x", datatype="FP32", shape=x.shape)
            request.raw_input_contents.append(x.tobytes())
            self.grpc.append(request.SerializeToString())

    def right(self, number: int, content: bytes) -> bool:
        x = self.inputs[number]
        if len(content) != x.nbytes:
            return False
        y = np.frombuffer(content, np.float32).reshape(x.shape)
        return any(np.allclose(y, expected[number], rtol=1e-4, atol=1e-4) for expected in self.expected)


class Soak:
    """The load, and what became of it."""

    def __init__(self, model: Model, ports: dict[str, int], seed: int) -> None:
        self.model, self.ports, self.generator = model, ports, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.problems: list[str] = []
        self.tickets: asyncio.Semaphore | None = None  # None: closed loop
        self.going = True

    def _count(self, kind: str, problem: str = "") -> None:
        self.counts[kind] += 1
        if problem and len(self.problems) < 20:
            self.problems.append(f"{kind}: {problem}")

    async def _turn(self) -> int:
        if self.tickets is not None:
            await self.tickets.acquire()
        return self.generator.randrange(INPUTS)

    async def http_client(self) -> None:
        """One connection after the other; each is used until it fails."""
        reader = writer = None
        while self.going:
            number = await self._turn()
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["port"])
            start = time.monotonic()
            try:
                writer.write(self.model.http[number])
                status, head, body = await asyncio.wait_for(read_answer(reader), 30)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as problem:
                self._count("lost", f"HTTP {problem!r}")
                writer = None
                continue
            if status == 200:
                self.latencies.append(time.monotonic() - start)
                right = self.model.right(number, body[int(head["inference-header-content-length"]) :])
                self._count("right" if right else "wrong", "" if right else "HTTP")
            else:
                self._count("refused" if status in (429, 503) else "lost", "" if status in (429, 503) else f"HTTP {status} {body[:200]!r}")
                await asyncio.sleep(0.01)
        if writer is not None:
            writer.close()

    async def grpc_client(self, channel: grpc.aio.Channel) -> None:
        call = channel.unary_unary(METHOD)
        while self.going:
            number = await self._turn()
            start = time.monotonic()
            try:
                answer = MESSAGES["ModelInferResponse"].FromString(await call(self.model.grpc[number], timeout=30))
            except grpc.aio.AioRpcError as problem:
                refused = problem.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED,)
                self._count("refused" if refused else "lost", "" if refused else f"gRPC {problem.code()} {problem.details()}")
                await asyncio.sleep(0.01)
                continue
            self.latencies.append(time.monotonic() - start)
            right = self.model.right(number, answer.raw_output_contents[0])
            self._count("right" if right else "wrong", "" if right else "gRPC")

    async def vandals(self, garbage: int, seconds: float) -> None:
        """Garbage of each protocol, clients that vanish before or behind a whole request, and such that hang; spread over the time."""
        hanging: list[Any] = []
        tasks, begin = [], time.monotonic()
        for n in range(garbage):
            await asyncio.sleep(begin + n * seconds / garbage - time.monotonic())  # all of them, also where the machine is busy
            for port, content, what in (
                (self.ports["port"], http_request(self.generator), "HTTP"), (self.ports["grpc_port"], http2_garbage(self.generator), "HTTP/2"),
            ):  # fmt: skip
                tasks.append(asyncio.create_task(self._garbage(port, content, what)))
            request = self.model.http[n % INPUTS]
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.ports["port"])
                writer.write(request if n % 2 else request[: self.generator.randrange(1, len(request))])
                if n % 10:
                    await writer.drain()
                    writer.close()
                    self._count("vanished")
                else:
                    hanging.append(writer)
                    self._count("hung")
            for writer in hanging[:-20]:
                writer.close()
            del hanging[:-20]
        await asyncio.gather(*tasks)
        for writer in hanging:
            writer.close()

    async def _garbage(self, port: int, content: bytes, what: str) -> None:
        answer = b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(1 << 16), 1)
            writer.close()
        except (OSError, TimeoutError):
            pass
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        fine = what != "HTTP" or status < 500 or status == 503
        self._count("garbage" if fine else "garbage accepted", "" if fine else f"{what} {answer[:200]!r} to {content!r}")

    async def run(self, seconds: float) -> float:
        """All clients for a while; answers per second."""
        self.going = True
        before, start = self.counts["right"], time.monotonic()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['grpc_port']}") as channel:
            clients = [asyncio.create_task(c) for _ in range(CLIENTS) for c in (self.http_client(), self.grpc_client(channel))]
            await asyncio.sleep(seconds)
            self.going = False
            if self.tickets is not None:
                for _ in clients:
                    self.tickets.release()
            await asyncio.gather(*clients)
        return (self.counts["right"] - before) / (time.monotonic() - start)


async def read_answer(reader: Any) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split()[1]), fields, await reader.readexactly(int(fields["content-length"]))


def memory(process: int) -> int:
    """Bytes that are its own in memory: files that are mapped do not count."""
    text = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])


async def soak(soak: Soak, folder: Path, process: int, minutes: float, garbage: int, every: float) -> list[int]:
    """The whole of it; samples of memory, a second each."""
    capacity = await soak.run(5)
    print(f"capacity: {capacity:.0f} requests per second; now {2 * capacity:.0f} for {minutes:g} minutes", flush=True)
    soak.counts.clear()
    soak.latencies.clear()
    soak.tickets = asyncio.Semaphore(0)
    samples: list[int] = []

    async def arrivals() -> None:
        start, made = time.monotonic(), 0
        while soak.going:
            await asyncio.sleep(0.005)
            due = int((time.monotonic() - start) * 2 * capacity)
            for _ in range(due - made):
                assert soak.tickets is not None
                if soak.tickets._value < 4 * CLIENTS:  # all clients wait: more tickets would be work for later
                    soak.tickets.release()
            made = due

    async def replacing() -> None:
        for n in range(1 << 30):
            await asyncio.sleep(every)
            shutil.copyfile(soak.model.files[n % 2], folder / "net/1/.new")
            os.replace(folder / "net/1/.new", folder / "net/1/net.tcomp")
            soak.counts["replaced"] += 1

    async def sampling() -> None:
        while True:
            samples.append(memory(process))
            await asyncio.sleep(1)

    others = [asyncio.create_task(work) for work in (arrivals(), replacing(), sampling(), soak.vandals(garbage, minutes * 55))]
    await soak.run(60 * minutes)
    for task in others:
        task.cancel()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--garbage", type=int, default=1000)
    parser.add_argument("--reload", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model, folder = Model(place, arguments.seed), place / "models"
        (folder / "net/1").mkdir(parents=True)
        shutil.copyfile(model.files[0], folder / "net/1/net.tcomp")
        command = [sys.executable, "-m", "tcomp", "serve", folder, "--port", "0", "--grpc-port", "0", "--json", "--max-queue", "64"]
        with open(place / "log", "w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            state = Soak(model, json.loads(process.stdout.readline()), arguments.seed)
            samples = asyncio.run(soak(state, folder, process.pid, arguments.minutes, arguments.garbage, arguments.reload))
            alive = process.poll() is None
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
        errors = [line for line in (place / "log").read_text().splitlines() if json.loads(line)["level"] in ("error", "critical")]
        quarter = len(samples) // 4
        growth = statistics.median(samples[-quarter:]) / statistics.median(samples[quarter : 2 * quarter]) if quarter else 1.0
        latencies = sorted(state.latencies)
        for kind, count in sorted(state.counts.items()):
            print(f"{kind:18} {count:9}")
        print(f"{'p50, p99':18} {latencies[len(latencies) // 2] * 1e3:.1f} ms, {latencies[len(latencies) * 99 // 100] * 1e3:.1f} ms")
        print(f"{'memory':18} {max(samples) >> 20} MiB at most, x {growth:.2f} from the second quarter to the last")
        print(f"{'status':18} {status}, {len(errors)} errors logged")
        for line in (*state.problems, *errors[:10]):
            print(line)
        bad = state.counts["wrong"] + state.counts["lost"] + state.counts["garbage accepted"]
        sys.exit(int(bool(bad or not alive or status or errors or growth > GROWTH)))


if __name__ == "__main__":
    main()
