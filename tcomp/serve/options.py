"""How a server and its models are configured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from tcomp.errors import ArtifactError, InputError
from tcomp.runtime.schema import load_json, read

CONFIGURATION = "serving.json"
_FILE_LIMIT = 1 << 20  # bytes of a configuration that are read


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How the image endpoint makes an input of a picture: its shorter side is scaled to `resize` pixels (null: of the crop's size), the
    middle is cut out, and each channel becomes (value / 255 - mean) / std. `labels` names the elements of the output, `top` of which are
    told."""

    mean: tuple[int | float, ...] = (0.485, 0.456, 0.406)  # those of ImageNet
    std: tuple[int | float, ...] = (0.229, 0.224, 0.225)
    resize: int | None = None
    size: int = 224  # pixels, where the model leaves height and width free
    labels: tuple[str, ...] = ()
    top: int = 5
    softmax: bool = False


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How one model is served: the fields of its file serving.json.

    max_batch: the most rows that are computed together; 1 batches nothing. Fewer are, where that was faster when the model was loaded. Of a
        language model, how many texts grow together, each with a cache of its own
    max_delay_us: how long (microseconds) a request may wait for others that fill its batch, although an instance is free
    preferred: sizes of batches (rows) to which a batch is cut, where more is waiting; for models compiled for certain sizes. Where they
        are given, nothing is measured
    independent_rows: whether the rows of a batch have no effect on each other; null: tried when the model is loaded
    instances: how many runs there may be at the same time, with the same weights; null: as many as threads, up to 8
    threads: of a run that is alone; those of several at the same time are shared out; null: as the artifact says
    max_queue: how many requests may wait; more are refused with status 429
    timeout_ms: the deadline (milliseconds) of requests that bring none; null: none
    max_memory: the most bytes of workspace and outputs of a run; null: no limit
    image: how the image endpoint makes inputs of pictures; null: there is none
    """

    max_batch: int = 32
    max_delay_us: int = 0
    preferred: tuple[int, ...] = ()
    independent_rows: bool | None = None
    instances: int | None = None
    threads: int | None = None
    max_queue: int = 256
    timeout_ms: int | None = None
    max_memory: int | None = None
    image: ImageOptions | None = None


_RANGES = {
    "max_batch": (1, 1 << 20), "max_delay_us": (0, 60_000_000), "instances": (1, 256), "threads": (1, 4096), "max_queue": (1, 1 << 20),
    "timeout_ms": (1, 86_400_000), "max_memory": (0, 1 << 46),
}  # fmt: skip


def check_model_options(options: ModelOptions, where: str) -> ModelOptions:
    """The options, if all are possible. Raises InputError that names the first which is not."""
    for name, (least, most) in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise InputError(f"{name} must be from {least} to {most}, not {value}", where=where)
    if any(not 1 <= size <= options.max_batch for size in options.preferred):
        raise InputError(f"preferred sizes of batches must be from 1 to max_batch, {options.max_batch}", where=where)
    if (image := options.image) is not None:
        if not 1 <= image.size <= 4096 or not 1 <= (image.resize or 1) <= 4096 or image.top < 1:
            raise InputError("image: sizes must be from 1 to 4096 pixels, and top 1 or more", where=where)
        if len(image.mean) != len(image.std) or len(image.mean) not in (1, 3) or 0 in image.std:
            raise InputError("image: mean and std must have one number, or three, for each channel, and std no 0", where=where)
    return options


def read_model_options(path: Path, defaults: ModelOptions) -> ModelOptions:
    """The options in a file serving.json; those that it does not name are the defaults. Raises InputError for a file that is wrong."""
    try:
        with open(path, "rb") as file:
            content = load_json(file.read(_FILE_LIMIT), "the configuration")
        given = _fields(ModelOptions, content, "")
        if isinstance(content.get("image"), dict):
            given["image"] = ImageOptions(**_fields(ImageOptions, content["image"], "image."))
    except FileNotFoundError:
        return defaults
    except OSError as problem:
        raise InputError("cannot read the configuration of a model", where=str(path), why=str(problem)) from None
    except ArtifactError as problem:
        why = ": ".join(filter(None, (problem.where, problem.what, problem.why)))
        raise InputError("the configuration of a model is wrong", where=str(path), why=why) from None
    return check_model_options(replace(defaults, **given), str(path))


def _fields(kind: type, content: Any, prefix: str) -> dict[str, Any]:
    """The fields of a dataclass that an object of JSON gives. Raises ArtifactError for unknown ones, and values of other types."""
    if not isinstance(content, dict):
        raise ArtifactError("it is not an object")
    hints = get_type_hints(kind)
    if unknown := [name for name in content if name not in hints]:
        raise ArtifactError(f"unknown option {prefix}{unknown[0]}", why=f"there are {', '.join(sorted(hints))}")
    return {
        name: read(dict if name == "image" else hints[name], value, f"{prefix}{name}")
        for name, value in content.items()
        if value is not None
    }


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server runs.

    models: a folder of models, or one artifact
    host, port, grpc_port: where it listens; 0 is any free port, None no gRPC
    model: options of models that have no serving.json
    trusted: the public key of Ed25519 (a file in PEM) of those whose models are served; None: all models are
    poll: seconds between looks at the folder, whose changes are then served; 0: none
    management: whether clients may load and unload models
    tokens: a file of bearer tokens, a line each; None: everybody is served. All may ask whether the server lives and is ready
    certificate, private_key: files in PEM; with them the server speaks TLS. client_ca: clients must have a certificate by this authority
    max_request: the most bytes of a request; max_pending: of all that are being received, waiting and running
    max_connections: of HTTP, and the most calls of gRPC at the same time; more are refused
    rate, burst: the most requests per second of a client (a token, or an address), and how many may come at once; 0: no limit
    receive_timeout: seconds that the body of a request may take
    drain_delay: seconds that a server that is stopped still accepts requests, though it is no more ready
    drain_timeout: seconds that it then waits for accepted requests
    slow_ms: a run that takes longer (milliseconds) is logged with the times of its kernels, one a minute; None: none is
    log_requests: whether every request is logged
    """

    models: Path
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    trusted: Path | None = None
    poll: float = 1.0
    management: bool = False
    tokens: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None
    max_request: int = 64 << 20
    max_pending: int = 1 << 30
    max_connections: int = 1024
    rate: float = 0.0
    burst: int = 10
    receive_timeout: float = 30.0
    drain_delay: float = 0.0
    drain_timeout: float = 30.0
    slow_ms: float | None = None
    log_requests: bool = False


def check_server_options(options: ServerOptions) -> ServerOptions:
    """The options, if they go together. Raises InputError."""
    if (options.certificate is None) != (options.private_key is None):
        raise InputError("a certificate and its private key belong together", hint="give both --certificate and --private-key")
    if options.client_ca is not None and options.certificate is None:
        raise InputError("certificates of clients need TLS", hint="give --certificate and --private-key, too")
    for name in ("poll", "rate", "burst", "drain_delay", "max_request", "max_pending", "max_connections"):
        if getattr(options, name) < 0:
            raise InputError(f"{name} must not be negative")
    for name in ("receive_timeout", "drain_timeout"):
        if not getattr(options, name) > 0:
            raise InputError(f"{name} must be more than 0 seconds")
    for name in ("certificate", "private_key", "client_ca", "tokens", "trusted"):
        path = getattr(options, name)
        if path is not None and not path.is_file():
            raise InputError(f"cannot read the file of {name}", where=str(path), why="there is no such file")
    check_model_options(options.model, "command line")
    return options
