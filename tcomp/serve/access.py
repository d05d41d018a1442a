"""Who may ask, how often, and how much at a time: bearer tokens, rate limits, bytes that are pending."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from tcomp.errors import InputError
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ServerOptions
from tcomp.serve.refusals import Refusal

_LEAST_TOKEN = 16  # characters: shorter ones can be guessed
_CLIENTS = 1 << 14  # whose rates are known at a time; those who were here least recently are forgotten


def read_tokens(path: Path) -> frozenset[bytes]:
    """The SHA-256s of the tokens in a file, a line each. Raises InputError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError("cannot read the file of tokens", where=str(path), why=str(problem)) from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise InputError("the file of tokens has none", where=str(path))
    if any(len(token) < _LEAST_TOKEN for token in tokens):
        raise InputError(f"a token has fewer than {_LEAST_TOKEN} characters", where=str(path), hint="openssl rand -hex 32")
    return frozenset(hashlib.sha256(token.encode()).digest() for token in tokens)


class Access:
    """The checks before a request is read, and the count of what is pending."""

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        """Raises InputError if the file of tokens cannot be used."""
        self._tokens = read_tokens(options.tokens) if options.tokens is not None else None
        self._rate, self._burst = options.rate, max(1, options.burst)
        self._buckets: OrderedDict[object, tuple[float, float]] = OrderedDict()  # client -> requests that it may make, and when that was
        self._most, self._pending = options.max_pending, 0
        metrics.pending_bytes.set_function(lambda: self._pending)

    @property
    def open(self) -> bool:
        """Whether everybody may ask as often as he likes."""
        return self._tokens is None and not self._rate

    def check(self, authorization: str, peer: str) -> None:
        """`authorization` is the header of that name, or "". Raises Refusal: an unknown client, or one that asks too often."""
        client: object = peer
        if self._tokens is not None:
            scheme, _, token = authorization.partition(" ")
            client = hashlib.sha256(token.strip().encode(errors="replace")).digest()
            # Digests are compared, so that the time it takes says nothing of a token.
            if scheme.lower() != "bearer" or client not in self._tokens:
                raise Refusal(HTTPStatus.UNAUTHORIZED, "the request has no valid token", hint="send `Authorization: Bearer TOKEN`")
        if self._rate:
            self._count(client)

    def _count(self, client: object) -> None:
        """A token bucket for each client."""
        now = time.monotonic()
        left, since = self._buckets.pop(client, (float(self._burst), now))
        left = min(self._burst, left + (now - since) * self._rate)
        self._buckets[client] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        if left < 1:
            what = f"more than {self._rate:g} requests per second"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, what, hint="ask less often", retry_after=(1 - left) / self._rate)

    @contextmanager
    def pending(self, size: int) -> Iterator[None]:
        """So many bytes of a request are pending while the block runs. Raises Refusal where that is too much."""
        self.take(size)
        try:
            yield
        finally:
            self.give(size)

    def take(self, size: int) -> None:
        """So many more bytes are pending, until they are given back. Raises Refusal where that is too much."""
        if self._pending + size > self._most:
            what = f"requests of {self._pending} bytes are pending already"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, what, why=f"the limit is {self._most}", hint="try again later", retry_after=1.0)
        self._pending += size

    def give(self, size: int) -> None:
        """So many bytes are not pending any more."""
        self._pending -= size
