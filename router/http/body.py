"""Request bodies: read with a limit, parse, check field by field. What is wrong becomes an InputError with a field."""

import asyncio
import dataclasses
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from headrace.errors import Cancelled, CapacityError, InputError
from headrace.router.http.errors import BodyTooLarge

Model = TypeVar("Model", bound=BaseModel)
LARGE_BODY_BYTES = 256 << 10
"""Bodies from this size on are parsed in a worker thread, so that other requests' tokens keep flowing."""
READ_TIMEOUT_S = 60.0
"""A body must arrive within this time: a client that trickles bytes holds no place for longer."""


@dataclasses.dataclass(slots=True)
class BodyBudget:
    """Bodies that are being read, together: however many clients send at once, they hold no more than this."""

    limit_bytes: int
    held_bytes: int = 0


async def read_body(request: Request, limit_bytes: int, budget: BodyBudget) -> bytes:
    """Raises BodyTooLarge, CapacityError (too many at once), InputError (too slow) or Cancelled (the client left)."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes, at most {limit_bytes} are taken")
    data = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                data += chunk
                budget.held_bytes += len(chunk)
                if budget.held_bytes > budget.limit_bytes:
                    raise CapacityError(f"the bodies that are being read have more than {budget.limit_bytes} bytes")
                if len(data) > limit_bytes:
                    raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
    except TimeoutError as error:
        raise InputError(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client left") from error
    finally:
        budget.held_bytes -= len(data)
    return bytes(data)


async def read_json(request: Request, limit_bytes: int, budget: BodyBudget, *, empty: bool = False) -> dict[str, Any]:
    """`empty`: no body at all stands for {}."""
    data = await read_body(request, limit_bytes, budget)
    if empty and not data.strip():
        return {}
    if len(data) < LARGE_BODY_BYTES:
        return parse_json(data)
    return await asyncio.get_running_loop().run_in_executor(None, parse_json, data)


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises InputError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def check(model: type[Model], raw: dict[str, Any]) -> Model:
    """Raises InputError naming the first field that is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained")))
        raise InputError(f"{field or 'body'}: {first['msg']}", field or None) from error
    except RecursionError as error:
        raise InputError("the body is nested too deeply") from error
