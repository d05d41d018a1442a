"""A server: the HTTP and gRPC sides on one event loop, from start to the last answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tcomp.errors import InputError
from tcomp.serve.grpc.server import GrpcServer
from tcomp.serve.grpc.service import make_methods
from tcomp.serve.http_app import make_app
from tcomp.serve.options import ServerOptions, check_server_options
from tcomp.serve.repository import every
from tcomp.serve.state import ServerState

_log = logging.getLogger("tcomp.serve")
_KEEP_ALIVE = 75  # seconds that an idle connection stays: longer than most clients and proxies keep theirs


class _Gathering:
    """A transport that sends what is written in one turn of the event loop at once: uvicorn writes the headers of an answer apart from its
    body, which would be a call of the system, a packet and a wake of the client for each."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._parts = transport, loop, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes, soon."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            self._transport.writelines(parts)


class _HttpProtocol(HttpToolsProtocol):
    """A connection of HTTP that ends where the headers of a request do not come in time; uvicorn would wait for ever."""

    patience = 30.0  # seconds
    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come, and is to say something."""
        super().connection_made(cast(asyncio.Transport, _Gathering(cast(asyncio.Transport, transport), self.loop)))
        self._wait()

    def data_received(self, data: bytes) -> None:
        """A part of a request, or all of it."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        if self._alarm is not None:
            self._alarm.cancel()

    def _wait(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a request has begun; its body has a time of its own
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
        elif self._alarm is None:
            self._alarm = self.loop.call_later(self.patience, self.transport.close)


class _Http(uvicorn.Server):
    """Signals are answered by `serve`, for both protocols."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are."""
        yield


def run_server(options: ServerOptions, started: Callable[[int, int | None], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then answer all requests that were accepted. `started` is called with the ports of HTTP and gRPC.

    Raises InputError for options that cannot be used, ports that are taken, or a folder that cannot be read.
    """
    try:
        import uvloop
    except ImportError:
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options, started))


async def serve(
    options: ServerOptions, started: Callable[[int, int | None], None] | None = None, stop: asyncio.Event | None = None
) -> None:
    """As `run_server`, in a running event loop, until `stop` is set or a signal comes."""
    state = ServerState(check_server_options(options))
    stop = asyncio.Event() if stop is None else stop
    with ExitStack() as stack:
        listener = stack.enter_context(_listening(options.host, options.port))
        grpc_listener = stack.enter_context(_listening(options.host, options.grpc_port)) if options.grpc_port is not None else None
        stack.enter_context(_set_by_signals(stop))
        http, grpc = _Http(_http_config(options, state)), GrpcServer(make_methods(state), options, state.access)
        if grpc_listener is not None:
            await grpc.start(grpc_listener, _grpc_context(options))
        serving = asyncio.create_task(http.serve(sockets=[listener]))  # at once: whoever asks learns that models are being loaded
        try:
            await state.repository.refresh()
            if not state.repository.index():
                hint = "a model is a file NAME.tcomp, or NAME/VERSION/FILE.tcomp: tcomp compile model.onnx -o NAME.tcomp"
                _log.warning("there are no models yet", extra={"folder": str(options.models), "hint": hint})
            state.started = True
            ports = listener.getsockname()[1], grpc_listener.getsockname()[1] if grpc_listener is not None else None
            _log.info("serving", extra={"host": options.host, "port": ports[0], "grpc_port": ports[1]})
            if started is not None:
                started(*ports)
            async with every(options.poll, state.repository.look), every(1.0, state.sample):
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                state.stopping = True
                _log.info("stopping", extra={"drain_delay": options.drain_delay})
                await asyncio.sleep(options.drain_delay)
        finally:
            http.should_exit = True
            await asyncio.gather(serving, grpc.stop(options.drain_timeout))
            await state.repository.close()
    _log.info("stopped")


def _http_config(options: ServerOptions, state: ServerState) -> uvicorn.Config:
    class Protocol(_HttpProtocol):
        patience = options.receive_timeout

    config = uvicorn.Config(
        make_app(state), http=Protocol, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none",
        limit_concurrency=options.max_connections, timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(options.drain_timeout)), ssl_certfile=options.certificate, ssl_keyfile=options.private_key,
        ssl_ca_certs=str(options.client_ca) if options.client_ca is not None else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.client_ca is not None else ssl.CERT_NONE,
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ssl.SSLError) as problem:
        raise InputError("the certificate cannot be used", where=str(options.certificate), why=str(problem)) from None
    return config


def _grpc_context(options: ServerOptions) -> ssl.SSLContext | None:
    """TLS for gRPC, where there is a certificate, which `_http_config` has found to be one."""
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.certificate, options.private_key)
    context.set_alpn_protocols(["h2"])
    if options.client_ca is not None:
        context.load_verify_locations(options.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _listening(host: str, port: int) -> socket.socket:
    """Raises InputError if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except (OSError, OverflowError) as problem:
        listener.close()
        raise InputError(f"cannot listen on {host}:{port}", why=str(problem), hint="another port: --port, --grpc-port") from None
    return listener


@contextmanager
def _set_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM or SIGINT set the event while the block runs; the second of them ends the process as it would without this."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def remove() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def told() -> None:
        stop.set()
        remove()

    with suppress(ValueError, RuntimeError):  # not the main thread
        for number in signals:
            loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        with suppress(ValueError, RuntimeError):
            remove()
