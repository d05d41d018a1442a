"""`tcomp serve`: a server for compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tcomp.cli import options as opt, output
from tcomp.errors import InputError

_BATCHES, _LIMITS, _SECURITY, _OPERATION = ({"rich_help_panel": title} for title in ("Batches", "Limits", "Security", "Operation"))
_REQUEST = "The largest request."
_MODELS = "A folder of models (NAME.tcomp, NAME/VERSION/*.tcomp), or one artifact."
_TRUSTED = "Serve only artifacts signed with this Ed25519 key (see `tcomp sign`)."
_DELAY = "How long a request may wait for others to join its batch while an instance is free. Default: 0."
_PREFERRED = "Batch sizes that the model was compiled for, such as 1,8,32: larger batches are cut to these."
_DRAIN_DELAY = "After SIGTERM, accept requests for this long while reporting not ready."
_SLOW = "Log runs that take longer than this, with the time of each kernel (at most one per minute)."
_INSTANCES = "Runs of one model at the same time. Default: the number of threads, up to 8."
_TOKENS = "A file of bearer tokens, one per line. Every request must carry one of them."


def serve(
    models: Annotated[Path, opt.argument("MODELS", _MODELS)],
    *,
    host: Annotated[str, opt.option("--host", "ADDRESS", "The address to listen at.", show_default=True)] = "127.0.0.1",
    port: Annotated[int, opt.option("--port", "N", "The HTTP port; 0: any free port.", min=0, max=65535, show_default=True)] = 8000,
    grpc_port: Annotated[
        int | None, opt.option("--grpc-port", "N", "The gRPC port; 0: any free port. Default: no gRPC.", min=0, max=65535)
    ] = None,
    max_batch: Annotated[int, opt.option("--max-batch", "ROWS", "The largest batch, in rows.", min=1, show_default=True, **_BATCHES)] = 32,
    max_delay: Annotated[int, opt.option("--max-delay", "MICROSECONDS", _DELAY, min=0, **_BATCHES)] = 0,
    preferred: Annotated[str | None, opt.option("--preferred", "SIZES", _PREFERRED, **_BATCHES)] = None,
    instances: Annotated[int | None, opt.option("--instances", "N", _INSTANCES, min=1, **_BATCHES)] = None,
    threads: opt.Threads = None,
    max_queue: Annotated[
        int, opt.option("--max-queue", "N", "Requests per model that may wait; more get status 429.", min=1, show_default=True, **_LIMITS)
    ] = 256,
    timeout: Annotated[
        int | None, opt.option("--timeout", "MILLISECONDS", "The deadline of requests that have none.", min=1, **_LIMITS)
    ] = None,
    max_memory: Annotated[
        int | None, opt.option("--max-memory", "BYTES", "The most memory that one run may use for workspace and outputs.", min=0, **_LIMITS)
    ] = None,
    poll: Annotated[
        float,
        opt.option(
            "--poll", "SECONDS", "Time between two looks for changes in the folder; 0: never.", min=0, show_default=True, **_OPERATION
        ),
    ] = 1.0,
    management: Annotated[bool, opt.flag("--management", "Let clients load and unload models.", **_SECURITY)] = False,
    trusted: Annotated[Path | None, opt.option("--trusted", "PUBLIC.pem", _TRUSTED, **_SECURITY)] = None,
    tokens: Annotated[Path | None, opt.option("--tokens", "FILE", _TOKENS, **_SECURITY)] = None,
    certificate: Annotated[Path | None, opt.option("--certificate", "FILE.pem", "The TLS certificate.", **_SECURITY)] = None,
    private_key: Annotated[Path | None, opt.option("--private-key", "FILE.pem", "The private key of the certificate.", **_SECURITY)] = None,
    client_ca: Annotated[
        Path | None, opt.option("--client-ca", "FILE.pem", "Require client certificates signed by this authority.", **_SECURITY)
    ] = None,
    max_request: Annotated[int, opt.option("--max-request", "BYTES", _REQUEST, min=1, show_default=True, **_LIMITS)] = 64 << 20,
    max_pending: Annotated[
        int, opt.option("--max-pending", "BYTES", "The most bytes of all requests in progress.", min=1, show_default=True, **_LIMITS)
    ] = 1 << 30,
    max_connections: Annotated[
        int, opt.option("--max-connections", "N", "The most connections at once.", min=1, show_default=True, **_LIMITS)
    ] = 1024,
    rate: Annotated[
        float, opt.option("--rate", "N", "Requests per second that one client may send. Default: no limit.", min=0, **_LIMITS)
    ] = 0.0,
    burst: Annotated[
        int, opt.option("--burst", "N", "Requests that one client may send at once, with --rate.", min=1, show_default=True, **_LIMITS)
    ] = 10,
    drain_delay: Annotated[float, opt.option("--drain-delay", "SECONDS", _DRAIN_DELAY, min=0, show_default=True, **_OPERATION)] = 0.0,
    drain_timeout: Annotated[
        float,
        opt.option(
            "--drain-timeout", "SECONDS", "The longest wait for running requests after SIGTERM.", min=1, show_default=True, **_OPERATION
        ),
    ] = 30.0,
    slow: Annotated[float | None, opt.option("--slow", "MILLISECONDS", _SLOW, min=0, **_OPERATION)] = None,
    log_requests: Annotated[bool, opt.flag("--log-requests", "Log every request.", **_OPERATION)] = False,
    as_json: opt.Json = False,
) -> None:
    """Serve compiled models over HTTP and gRPC, by the Open Inference Protocol (KServe V2).

    Waiting requests are computed in batches. SIGTERM or Ctrl-C stops the server after all accepted requests are answered. Logs are JSON on
    stderr. /metrics has figures for Prometheus, / a status page.
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
        raise InputError("this file is not an artifact", where=str(models), hint=f"tcomp compile {models} first")
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
    """Raises InputError for what is not a list of numbers."""
    try:
        return tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"`{text}` is not a list of sizes", where="--preferred", hint="--preferred 1,8,32") from None
