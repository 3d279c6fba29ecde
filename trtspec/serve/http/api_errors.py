"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and the right status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trtspec.errors import CapacityError, EngineError, RequestError, TrtSpecError, UnsupportedError
from trtspec.serve.engine.client import RefusedError
from trtspec.serve.http.outcome import current

logger = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


ONCE = {"x-should-retry": "false"}
"""Header of an answer that a retry would not change. OpenAI's clients retry 408 and >= 500 unless told not to."""


class ApiError(HTTPException):
    """An error that ends a request with an HTTP status. param: the field that is wrong. code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        return TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")

    @property
    def word(self) -> str:
        """The most specific word for the error: its code, else its type."""
        return self.code or self.kind

    @property
    def body(self) -> dict[str, Any]:
        """The error as the body of the answer."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception. An unexpected one is logged, and its message is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RefusedError, RequestError, CapacityError, UnsupportedError)):
        return ApiError(400, str(error))
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"})
    if isinstance(error, TrtSpecError):
        return ApiError(500, str(error))
    logger.error("a request failed", exc_info=error)
    return _internal()


def _internal() -> ApiError:
    """A new error for an internal fault; new each time, because raising an exception changes its state."""
    return ApiError(500, "the server failed to handle the request; its log says why", code="internal_error")


def install(app: FastAPI) -> None:
    """Make the app answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return response(error)

    @app.exception_handler(TrtSpecError)
    @app.exception_handler(RefusedError)
    async def _known(request: Request, error: Exception) -> JSONResponse:
        return response(api_error(error))

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> JSONResponse:
        return response(_internal())  # the HTTP server logs the error itself

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        words = {404: f"there is no {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
        message = words.get(error.status_code, str(error.detail))
        return response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return response(invalid(error.errors()))


def response(error: ApiError) -> JSONResponse:
    """HTTP response for an error, whose word goes into the request's record."""
    if (record := current()) is not None:
        record.error = error.word
    return JSONResponse(error.body, error.status_code, error.headers)


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Error for the problems that pydantic found: the first one in full, and the number of the others."""
    first = problems[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {param!r}; see /openapi.json for those there are"
    elif first["type"] == "json_invalid":
        param, message = None, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    else:
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ApiError(400, message + more, param=param)
