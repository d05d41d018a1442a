"""What all protocols of a server share."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import tcomp
from tcomp.serve.access import Access
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ServerOptions
from tcomp.serve.refusals import Refusal
from tcomp.serve.repository import Repository
from tcomp.serve.served import ServedModel

EXTENSIONS = ("binary_tensor_data", "model_repository", "statistics", "model_configuration")


class ServerState:
    """The models of a server, its figures, and whether it takes requests.

    started: all models were tried once
    stopping: it was told to stop, and is not ready any more
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

    def check_management(self) -> None:
        """Raises Refusal if clients may not load and unload models."""
        if not self.options.management:
            raise Refusal(HTTPStatus.FORBIDDEN, "clients may not load or unload models here", hint="start the server with --management")

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
