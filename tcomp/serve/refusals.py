"""What a server answers to requests that it does not fulfil."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from tcomp.errors import ArtifactError, InputError, StoppedError, TcompError


class Refusal(TcompError):
    """A request is not fulfilled. `status` is that of HTTP; `retry_after` (seconds), where trying again makes sense, says when."""

    def __init__(
        self, status: HTTPStatus, what: str, *, where: str = "", why: str = "", hint: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(what, where=where, why=why, hint=hint)
        self.status, self.retry_after = status, retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Refusal, self.status, retry_after=self.retry_after, **self.parts), ()

    @property
    def fields(self) -> dict[str, str]:
        """When to try again, as a header."""
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}

    @property
    def message(self) -> str:
        """All of it on one line, as clients get it."""
        return "; ".join(part for part in (self.what, self.where, self.why, self.hint) if part).replace("\n", " ")


def as_refusal(error: TcompError) -> Refusal:
    """The answer to a request that ended with this error."""
    if isinstance(error, Refusal):
        return error
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, StoppedError):
        status = HTTPStatus.GATEWAY_TIMEOUT
    elif isinstance(error, InputError):
        status = HTTPStatus.BAD_REQUEST
    elif isinstance(error, ArtifactError):
        status = HTTPStatus.UNPROCESSABLE_ENTITY
    return Refusal(status, error.what, where=error.where, why=error.why, hint=error.hint)


def bad_request(what: str, *, where: str = "", why: str = "", hint: str = "") -> Refusal:
    """The client has to send something else: status 400."""
    return Refusal(HTTPStatus.BAD_REQUEST, what, where=where, why=why, hint=hint)
