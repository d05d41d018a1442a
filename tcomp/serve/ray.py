"""Many replicas of the server on a cluster of Ray Serve.

    from ray import serve
    from tcomp.serve import ray as tcomp_ray
    from tcomp.serve.options import ServerOptions

    handle = serve.run(tcomp_ray.application(ServerOptions(Path("/shared/models")), num_replicas=4))
    outputs = await tcomp_ray.infer(handle, "resnet18", {"x": x})

Each replica has the models, their queues and batches of its own; Ray's proxies speak HTTP (the whole of `tcomp.serve.http_app`) and share
requests out. The folder must be there on all machines. Ray replaces replicas that die; `infer` asks another one then, which is safe since a
run has no effects. Clients of HTTP get status 500 or a closed connection in that moment, and ask again.
"""

from __future__ import annotations

import asyncio
import os
import time
from http import HTTPStatus
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from starlette.applications import Starlette

from tcomp.serve.batching import Arrays
from tcomp.serve.http_app import make_app
from tcomp.serve.options import ServerOptions, check_server_options
from tcomp.serve.refusals import Refusal
from tcomp.serve.repository import every
from tcomp.serve.state import ServerState


class _App:
    """The ASGI application of a replica, which loads its models when the replica starts."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.state: ServerState | None = None
        self._app: Starlette | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        assert self._app is not None
        await self._app(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        self.state = ServerState(self._options)
        self._app = make_app(self.state)
        await self.state.repository.refresh()
        self.state.started = True
        async with every(self._options.poll, self.state.repository.look):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        self.state.stopping = True
        await self.state.repository.close()
        await send({"type": "lifespan.shutdown.complete"})


def application(options: ServerOptions, num_replicas: int = 1, **settings: Any) -> serve.Application:
    """What `ray.serve.run` runs: a deployment whose replicas serve a folder of models. `settings` are those of `ray.serve.deployment`, as
    `ray_actor_options={"num_cpus": 2}` or `autoscaling_config`. Ports, TLS and the end of a replica are Ray's. Raises InputError for
    options that do not go together."""
    check_server_options(options)

    def build() -> _App:  # in the replica
        return _App(options)

    @serve.deployment(name="tcomp", num_replicas=num_replicas, **settings)
    @serve.ingress(build)
    class Replica:
        async def infer(self, model: str, inputs: Arrays, version: str = "", timeout: float | None = None) -> Arrays:
            """The outputs of a model, for calls by a handle. Raises as `Batcher.infer`."""
            state = _state(self)
            with state.inference("ray", model, version) as served:
                deadline = None if timeout is None else time.monotonic() + timeout
                return await served.infer(inputs, deadline)

        async def process(self) -> int:
            """The number of the replica's process."""
            return os.getpid()

        async def check_health(self) -> None:
            """Asked by Ray, which replaces a replica that raises."""
            _state(self)

    application: serve.Application = Replica.bind()  # type: ignore[attr-defined]  # mypy does not look at what class decorators return
    return application


def _state(replica: Any) -> ServerState:
    """The models of a replica. Raises Refusal while there are none."""
    app: _App = replica.app  # Ray's property of what `ingress` makes
    if app.state is None:
        raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the replica has not started", retry_after=1.0)
    return app.state


async def infer(handle: Any, model: str, inputs: Arrays, version: str = "", attempts: int = 5) -> Arrays:
    """The outputs of a model, by whichever replica; another is asked where one dies in the meantime."""
    for attempt in range(attempts):
        try:
            outputs: Arrays = await handle.infer.remote(model, inputs, version)
        except RayActorError:
            if attempt == attempts - 1:
                raise
            await asyncio.sleep(0.1 * 2**attempt)
        else:
            return outputs
    raise AssertionError("unreachable")
