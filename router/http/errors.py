"""HeadraceError to HTTP: status, headers and the OpenAI-shaped body. The one place that knows these names."""

import json
import math
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import CapacityError, HeadraceError, InputError, NeverFits, PromptTooLong, UnknownModel


class BodyTooLarge(InputError):
    http_status = 413


class NotAllowed(InputError):
    http_status = 403


class NotFound(InputError):
    http_status = 404


_CODES = {
    UnknownModel: "model_not_found",
    PromptTooLong: "context_length_exceeded",
    NeverFits: "context_length_exceeded",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8 JSON; lone surrogates (from a client's own escapes) become '?', never a crash."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_code(error: HeadraceError) -> str | None:
    for cls, code in _CODES.items():
        if isinstance(error, cls):
            return code
    if isinstance(error, InputError):
        return "invalid_api_key" if error.http_status == 401 else None
    return "rate_limit_exceeded" if isinstance(error, CapacityError) else error.kind


def openai_error(error: HeadraceError) -> dict[str, Any]:
    """{"error": {...}}: the body of a failed request, and the data of a stream's error event."""
    param = error.param if isinstance(error, InputError) else None
    message = str(error) or error.kind
    return {
        "error": {
            "message": message,
            "type": error_type(error.http_status),
            "param": param,
            "code": error_code(error),
        }
    }


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: HeadraceError) -> dict[str, Any]:
    """The same in the form of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    detail = {"type": kind, "message": str(error) or error.kind}
    return {"type": "error", "error": detail, "request_id": f"req_{secrets.token_hex(12)}"}


def retry_headers(error: HeadraceError, retry_after_s: float) -> dict[str, str]:
    """Retry-After where waiting helps."""
    if isinstance(error, CapacityError) and error.retry_after_s is not None:
        retry_after_s = error.retry_after_s
    if error.http_status in (429, 503):
        return {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if error.http_status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def plain_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error that is not a HeadraceError: no such path, wrong method."""
    body = {"error": {"message": message, "type": error_type(status), "param": None, "code": None}}
    return json_response(body, status, headers)


def no_such_path(request: Request, status: int, detail: str, headers: dict[str, str] | None) -> Response:
    return plain_error(status, f"{detail}: {request.method} {request.url.path}", headers)
