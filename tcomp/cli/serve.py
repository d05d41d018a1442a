"""`tcomp serve`: a server for compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tcomp.cli import options as opt, output
from tcomp.errors import InputError

_MODELS = "A folder of models (NAME.tcomp, NAME/VERSION/*.tcomp), or one artifact."
_TRUSTED = "Serve only what the owner of this public key of Ed25519 signed (see `tcomp sign`)."
_DELAY = "How long a request may wait for others of its batch although an instance is free. Default: 0."
_PREFERRED = "Sizes to which batches are cut, where the model was compiled for certain ones: 1,8,32."
_DRAIN_DELAY = "After SIGTERM, go on accepting for so long, while not ready any more."
_SLOW = "Log runs that take longer, with the times of their kernels (one a minute)."
_INSTANCES = "Runs of a model at the same time. Default: as many as threads, up to 8."
_TOKENS = "A file of bearer tokens, a line each, one of which every request must bring."


def serve(
    models: Annotated[Path, opt.argument("MODELS", _MODELS)],
    *,
    host: Annotated[str, opt.option("--host", "ADDRESS", "Where to listen.", show_default=True)] = "127.0.0.1",
    port: Annotated[int, opt.option("--port", "N", "Of HTTP; 0: any.", min=0, max=65535, show_default=True)] = 8000,
    grpc_port: Annotated[int | None, opt.option("--grpc-port", "N", "Of gRPC; 0: any. Default: none.", min=0, max=65535)] = None,
    max_batch: Annotated[int, opt.option("--max-batch", "ROWS", "The most rows that run together.", min=1, show_default=True)] = 32,
    max_delay: Annotated[int, opt.option("--max-delay", "MICROSECONDS", _DELAY, min=0)] = 0,
    preferred: Annotated[str | None, opt.option("--preferred", "SIZES", _PREFERRED)] = None,
    instances: Annotated[int | None, opt.option("--instances", "N", _INSTANCES, min=1)] = None,
    threads: opt.Threads = None,
    max_queue: Annotated[int, opt.option("--max-queue", "N", "Requests of a model that may wait.", min=1, show_default=True)] = 256,
    timeout: Annotated[int | None, opt.option("--timeout", "MILLISECONDS", "Deadline of requests that bring none.", min=1)] = None,
    max_memory: Annotated[int | None, opt.option("--max-memory", "BYTES", "Of workspace and outputs of a run.", min=0)] = None,
    poll: Annotated[float, opt.option("--poll", "SECONDS", "Look for changes in the folder; 0: never.", min=0, show_default=True)] = 1.0,
    management: Annotated[bool, opt.flag("--management", "Clients may load and unload models.")] = False,
    trusted: Annotated[Path | None, opt.option("--trusted", "PUBLIC.pem", _TRUSTED)] = None,
    tokens: Annotated[Path | None, opt.option("--tokens", "FILE", _TOKENS)] = None,
    certificate: Annotated[Path | None, opt.option("--certificate", "FILE.pem", "For TLS.")] = None,
    private_key: Annotated[Path | None, opt.option("--private-key", "FILE.pem", "For TLS.")] = None,
    client_ca: Annotated[Path | None, opt.option("--client-ca", "FILE.pem", "Clients need a certificate of this authority.")] = None,
    max_request: Annotated[int, opt.option("--max-request", "BYTES", "Of one request.", min=1, show_default=True)] = 64 << 20,
    max_pending: Annotated[int, opt.option("--max-pending", "BYTES", "Of all requests in work.", min=1, show_default=True)] = 1 << 30,
    max_connections: Annotated[int, opt.option("--max-connections", "N", "At the same time.", min=1, show_default=True)] = 1024,
    rate: Annotated[float, opt.option("--rate", "N", "Requests per second of a client. Default: no limit.", min=0)] = 0.0,
    burst: Annotated[int, opt.option("--burst", "N", "Requests that may come at once.", min=1, show_default=True)] = 10,
    drain_delay: Annotated[float, opt.option("--drain-delay", "SECONDS", _DRAIN_DELAY, min=0, show_default=True)] = 0.0,
    drain_timeout: Annotated[
        float, opt.option("--drain-timeout", "SECONDS", "Wait for answers at the end.", min=1, show_default=True)
    ] = 30.0,
    slow: Annotated[float | None, opt.option("--slow", "MILLISECONDS", _SLOW, min=0)] = None,
    log_requests: Annotated[bool, opt.flag("--log-requests", "Log every request.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Serve compiled models over HTTP and gRPC, by the Open Inference Protocol (KServe V2).

    Requests that wait are computed in batches. SIGTERM or Ctrl-C ends the server when all accepted requests are answered. Logs are JSON, on
    stderr; figures for Prometheus are at /metrics, a page for people at /.
    """
    try:
        from tcomp.serve.logs import log_to_stderr
        from tcomp.serve.options import ModelOptions, ServerOptions
        from tcomp.serve.server import run_server
    except ImportError as problem:
        raise InputError("the server needs further packages", why=str(problem), hint="pip install 'tcomp[serve]'") from None

    if not models.exists():
        raise InputError("there are no models", where=str(models), why="there is no such file or folder")
    if models.is_file() and not opt.is_artifact(models):
        raise InputError("this file is no artifact", where=str(models), hint=f"tcomp compile {models} first")
    model = ModelOptions(max_batch, max_delay, _sizes(preferred), None, instances, threads, max_queue, timeout, max_memory)
    options = ServerOptions(
        models, host, port, grpc_port, model, trusted, poll, management, tokens, certificate, private_key, client_ca, max_request,
        max_pending, max_connections, rate, burst, drain_delay=drain_delay, drain_timeout=drain_timeout, slow_ms=slow,
        log_requests=log_requests,
    )  # fmt: skip

    def started(http: int, grpc: int | None) -> None:
        if as_json:
            print(f'{{"port": {http}, "grpc_port": {"null" if grpc is None else grpc}}}', flush=True)
        else:
            scheme = "https" if certificate is not None else "http"
            output.line(f"serving {models} at {scheme}://{host}:{http}" + (f", gRPC at port {grpc}" if grpc is not None else ""))

    log_to_stderr()
    run_server(options, started)


def _sizes(text: str | None) -> tuple[int, ...]:
    """Raises InputError for what is no list of numbers."""
    try:
        return tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"`{text}` is no list of sizes", where="--preferred", hint="--preferred 1,8,32") from None
