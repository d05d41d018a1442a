"""What all protocols of a server share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect

import tcomp
from tcomp.errors import TcompError
from tcomp.serve.access import Access
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ServerOptions
from tcomp.serve.refusals import Refusal, as_refusal
from tcomp.serve.repository import Repository
from tcomp.serve.served import ServedModel

_log = logging.getLogger("tcomp.serve")
CLIENT_GONE = 499  # as nginx has it: the client did not wait for the answer
EXTENSIONS = ("binary_tensor_data", "model_repository", "statistics", "model_configuration")


class ServerState:
    """The models of a server, its figures, and whether it takes requests.

    started: all models were tried once
    stopping: it is being stopped, and is not ready any more
    """

    def __init__(self, options: ServerOptions) -> None:
        """In the event loop that serves. Raises InputError for options that cannot be used."""
        self.options, self.metrics = options, Metrics()
        self.access = Access(options, self.metrics)
        self.repository = Repository(options, self.metrics)
        self.started = self.stopping = False

    @property
    def ready(self) -> bool:
        """Whether requests for all models can be answered."""
        return self.started and not self.stopping and self.repository.ready

    @contextmanager
    def inference(self, protocol: str, name: str, version: str) -> Iterator[ServedModel]:
        """The model for a request, which is not closed while the block runs; the request is counted, and logged if the options say so, when
        that ends. Raises Refusal as `Repository.find`."""
        start, model, status = time.monotonic(), self.repository.find(name, version), 500
        model.users += 1
        try:
            yield model
            status = 200
        except TcompError as error:
            status = as_refusal(error).status
            raise
        except (asyncio.CancelledError, ClientDisconnect):
            status = CLIENT_GONE
            raise
        finally:
            model.users -= 1
            seconds = time.monotonic() - start
            model.metrics.answered(protocol, status, seconds)
            if self.options.log_requests:
                fields = {"model": model.name, "version": model.version, "status": int(status), "protocol": protocol}
                _log.info("request", extra=fields | {"us": round(seconds * 1e6)})

    def check_management(self) -> None:
        """Raises Refusal if clients may not load and unload models."""
        if not self.options.management:
            raise Refusal(HTTPStatus.FORBIDDEN, "clients may not load or unload models here", hint="start the server with --management")

    async def sample(self) -> None:
        """Enter this second in the history of the status page."""
        for model in self.repository.models:
            model.metrics.sample(model.waiting)

    def metadata(self) -> dict[str, Any]:
        """What the server says of itself."""
        return {"name": "tcomp", "version": tcomp.__version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, model: ServedModel) -> dict[str, Any]:
        """What clients have to know of a model."""
        ends = {
            kind: [{"name": wire.name, "datatype": wire.datatype, "shape": wire.shape} for wire in wires.values()]
            for kind, wires in (("inputs", model.inputs), ("outputs", model.outputs))
        }
        versions = [m.version for m in self.repository.models if m.name == model.name]
        return {"name": model.name, "versions": versions, "platform": "tcomp", **ends}

    def model_config(self, model: ServedModel) -> dict[str, Any]:
        """How a model is served, by the names of Triton's model configuration. A model that is not batched has max_batch_size 0; of one
        that is, dims are the extents behind the rows."""
        loaded, rows = model.loaded, int(model.loaded.batched)
        ends = {
            kind: [{"name": wire.name, "data_type": wire.triton_type, "dims": wire.shape[rows:]} for wire in wires.values()]
            for kind, wires in (("input", model.inputs), ("output", model.outputs))
        }
        config = {"name": model.name, "platform": "tcomp", "max_batch_size": rows * model.options.max_batch, **ends}
        config["instance_group"] = [{"name": model.name, "kind": "KIND_CPU", "count": loaded.instances}]
        if loaded.batched:
            delay = model.options.max_delay_us
            config["dynamic_batching"] = {"preferred_batch_size": [*model.options.preferred], "max_queue_delay_microseconds": delay}
        return config

    def statistics(self, models: Iterable[ServedModel]) -> dict[str, Any]:
        """Counts and times of models: see `ModelMetrics.statistics`."""
        return {"model_stats": [{"name": m.name, "version": m.version, **m.metrics.statistics()} for m in models]}
