"""The FastAPI application: paths to endpoints, and every exception to an OpenAI-shaped answer."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.errors import EngineError, HeadraceError
from headrace.router.http.admin import Admin
from headrace.router.http.chat import create_chat_completion
from headrace.router.http.completions import create_completion
from headrace.router.http.errors import (
    anthropic_error,
    json_response,
    no_such_path,
    openai_error,
    retry_headers,
)
from headrace.router.http.messages import count_tokens, create_message
from headrace.router.http.responses import create_response
from headrace.router.http.service import Service

Endpoint = Callable[[Service, Request], Awaitable[Response]]

log = logging.getLogger(__name__)


def build_app(service: Service, admin: Admin) -> FastAPI:
    app = FastAPI(title="Headrace", version=headrace.__version__, redirect_slashes=False)
    routes: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/messages", create_message),
        ("POST", "/v1/messages/count_tokens", count_tokens),
        ("POST", "/v1/completions", create_completion),
        ("POST", "/v1/chat/completions", create_chat_completion),
        ("POST", "/v1/responses", create_response),
        ("GET", "/v1/models", admin.models),
        ("GET", "/v1/models/{model:path}", admin.model),
        ("GET", "/health", admin.health),
        ("GET", "/health_generate", admin.health_generate),
        ("GET", "/metrics", admin.metrics),
        ("POST", "/flush_cache", admin.flush_cache),
        ("POST", "/tokenize", admin.tokenize),
        ("POST", "/detokenize", admin.detokenize),
        ("GET", "/get_server_info", admin.server_info),
        ("GET", "/pool", admin.pool),
        ("POST", "/drain", admin.drain),
        ("GET", "/requests", admin.requests),
        ("GET", "/requests/{request_id}", admin.explain),
    ]
    for method, path, endpoint in routes:
        render = anthropic_error if path.startswith("/v1/messages") else openai_error
        app.add_api_route(path, _bound(service, endpoint, render), methods=[method], response_model=None)
    app.add_exception_handler(HTTPException, _http_exception)
    return app


def _bound(
    service: Service, endpoint: Endpoint, render: Callable[[HeadraceError], dict[str, Any]]
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        request.state.arrived = asyncio.get_running_loop().time()
        response = await answer(request)
        response.headers.setdefault("x-request-id", f"req-{secrets.token_hex(12)}")
        return response

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(service, request)
        except HeadraceError as error:
            if error.http_status >= 500:
                log.warning("%s %s: %s: %s", request.method, request.url.path, error.kind, error)
            headers = retry_headers(error, service.retry_after_s())
            return json_response(render(error), error.http_status, headers)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.url.path)
            return json_response(render(EngineError(f"internal error: {type(error).__name__}")), 500)

    handle.__name__ = getattr(endpoint, "__name__", "handle")
    return handle


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return no_such_path(request, error.status_code, error.detail, headers)
