"""The server on a local cluster of Ray: several processes, one of which is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.servers import W

ray = pytest.importorskip("ray", reason="needs ray[serve]")
pytest.importorskip("ray.serve", reason="needs ray[serve]")

REPLICAS, REQUESTS, CLIENTS = 2, 400, 8


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment, object_store_memory=100 << 20)
    yield
    ray.serve.shutdown()
    ray.shutdown()


def test_no_request_is_lost_when_a_replica_is_killed(models: Path, cluster: None) -> None:
    from tcomp.serve import ray as tcomp_ray
    from tcomp.serve.options import ServerOptions

    ray.serve.start(proxy_location="Disabled")
    application = tcomp_ray.application(ServerOptions(models), REPLICAS, ray_actor_options={"num_cpus": 0.5})
    handle = ray.serve.run(application, name="tcomp", route_prefix="/")
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal((1 + n % 3, 8), np.float32) for n in range(REQUESTS)]

    async def main() -> tuple[list[Any], set[int]]:
        processes = set()
        while len(processes) < REPLICAS:
            processes.add(await handle.process.remote())
        waiting, outputs = list(range(REQUESTS)), [None] * REQUESTS

        async def client() -> None:
            while waiting:
                number = waiting.pop()
                if number == REQUESTS // 2:
                    os.kill(min(processes), signal.SIGKILL)
                outputs[number] = await tcomp_ray.infer(handle, "mlp", {"x": inputs[number]})

        await asyncio.gather(*[client() for _ in range(CLIENTS)])
        return outputs, processes

    outputs, processes = asyncio.run(main())
    assert len(processes) == REPLICAS and None not in outputs
    for x, output in zip(inputs, outputs, strict=True):
        np.testing.assert_allclose(output["y"], x @ W, rtol=1e-4, atol=1e-5)
