"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError
from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import (
    THINK,
    CallArguments,
    CallStart,
    Content,
    GlmParser,
    Piece,
    Reasoning,
    merged,
)
from headrace.router.answers.text import TextDelta
from headrace.router.generation import Generation, Usage
from headrace.router.http.anthropic_input import (
    MessagesRequest,
    openai_message,
    openai_messages,
    openai_tools,
    structure,
    thinking_options,
)
from headrace.router.http.chat import call_id
from headrace.router.http.conversation import check_tools, template_messages
from headrace.router.http.errors import anthropic_error, json_response
from headrace.router.http.recall import Answers, Conversation, Prompt
from headrace.router.http.service import Service
from headrace.router.http.serving import serve
from headrace.router.http.sse import event

_UNUSED_USAGE = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
"""Fields the API promises and this service has nothing to say about: null."""
_STOPS = {"length": "max_tokens", "stop": "end_turn"}


async def create_message(service: Service, request: Request) -> Response:
    tenant, raw = await service.read(request)
    with contextlib.ExitStack() as place:
        place.enter_context(service.admitted(tenant))
        fields = service.fields(MessagesRequest, raw, anthropic=True)
        service.check_model(fields.model)
        tools = check_tools(openai_tools(fields))
        wanted = structure(fields, tools)
        tools = [] if (fields.tool_choice or {}).get("type") == "none" else tools
        conversation, prompt = await service.recall.prompts(tenant, lambda of: _render(service, fields, tools, of))
        generation = service.generation(
            request,
            tenant=tenant,
            fields=fields.common(),
            prompts=[prompt],
            top_logprobs=-1,
            prefix="msg",
            grammar=await service.grammar(wanted.grammar(in_reasoning=prompt.text.endswith(THINK))),
        )
        shape = MessageShape(service, generation, conversation, prompt)
        return await serve(service, request, generation, shape, stream=bool(fields.stream), place=place.pop_all())


async def count_tokens(service: Service, request: Request) -> Response:
    tenant, raw = await service.read(request)
    fields = service.fields(MessagesRequest, {"max_tokens": 1, **raw}, anthropic=True)
    service.check_model(fields.model)
    tools = check_tools(openai_tools(fields))
    structure(fields, tools)
    tools = [] if (fields.tool_choice or {}).get("type") == "none" else tools
    _, prompt = await service.recall.prompts(tenant, lambda of: _render(service, fields, tools, of))
    return json_response({"input_tokens": len(prompt.ids)})


def _render(
    service: Service, fields: MessagesRequest, tools: list[dict[str, Any]], prompt_of: Callable[[str], Prompt]
) -> tuple[Conversation, Prompt]:
    """Runs in a worker thread."""
    messages = template_messages(openai_messages(fields))
    conversation = Conversation(service.model.template, messages, tools, thinking_options(fields))
    return conversation, prompt_of(conversation.text())


def anthropic_usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts read, newly cached and other input apart. Every block is cached here without asking, so what was
    computed is `cache_creation` and nothing is left over."""
    return {
        "input_tokens": 0,
        "cache_creation_input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **dict.fromkeys(_UNUSED_USAGE),
    }


class MessageShape:
    """Implements serving.Shape: content blocks are opened and closed as the kind of the text changes."""

    def __init__(self, service: Service, generation: Generation, conversation: Conversation, prompt: Prompt) -> None:
        self._generation = generation
        self._model = service.model.name
        self._conversation, self._prompt = conversation, prompt
        types = ToolTypes(conversation.tools) if conversation.tools else None
        self._parser = GlmParser(in_reasoning=prompt.text.endswith(THINK), tools=types)
        self._answers = Answers(service.recall, [prompt], generation.spec.rules.stop_token_ids, self._written)
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def start(self) -> Iterable[bytes]:
        yield _frame({"type": "message_start", "message": {**self._message(), "content": [], "stop_reason": None}})

    def feed(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        pieces: list[Piece] = []
        for part in delta.parts:
            pieces += self._parser.push(part)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
            self._stop_reason = "stop_sequence" if delta.stop is not None else _STOPS[delta.finish_reason]
            self._stop_sequence = delta.stop
            if self._parser.complete_calls and self._stop_reason == "end_turn":
                self._stop_reason = "tool_use"
        frames = [frame for piece in merged(pieces) for frame in self._piece(piece)]
        self._answers.take(index, delta)
        return frames

    def _piece(self, piece: Piece) -> Iterable[bytes]:
        if isinstance(piece, CallStart):
            yield from self._block(
                {
                    "type": "tool_use",
                    "id": f"toolu_{call_id()[5:]}",
                    "name": piece.name,
                    "input": {},
                    "caller": {"type": "direct"},
                }
            )
        elif isinstance(piece, CallArguments):
            # The block's input is JSON text until `body` parses it; a stream sends it in these very pieces.
            self._blocks[-1]["json"] = self._blocks[-1].get("json", "") + piece.text
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
        elif isinstance(piece, Reasoning):
            yield from self._text("thinking", piece.text)
        elif isinstance(piece, Content):
            yield from self._text("text", piece.text)

    def _text(self, kind: str, text: str) -> Iterable[bytes]:
        if not self._open or self._blocks[-1]["type"] != kind:
            extra: dict[str, Any] = {"signature": ""} if kind == "thinking" else {"citations": None}
            yield from self._block({"type": kind, kind: "", **extra})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _block(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        yield _frame({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)})

    def _close(self) -> Iterable[bytes]:
        if self._open:
            self._open = False
            yield _frame({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _written(self, _index: int) -> Callable[[], str]:
        blocks = [_finished(block) for block in self._blocks]

        def written() -> str:
            answer = openai_message("the answer", {"role": "assistant", "content": blocks})[0]
            return self._conversation.written(self._prompt.text, answer)

        return written

    def over(self) -> None:
        self._answers.close()

    def end(self) -> Iterable[bytes]:
        yield from self._close()
        delta = {
            "container": None,
            "stop_details": None,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
        }
        usage = anthropic_usage(self._generation.usage)
        yield _frame({"type": "message_delta", "delta": delta, "usage": usage})
        yield _frame({"type": "message_stop"})

    def failure(self, error: HeadraceError) -> Iterable[bytes]:
        yield event(anthropic_error(error), "error")

    def body(self) -> dict[str, Any]:
        return self._message()

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._generation.spec.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_finished(block) for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "container": None,
            "usage": anthropic_usage(self._generation.usage),
        }


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """A block as the whole answer shows it."""
    found = dict(block)
    text = found.pop("json", None)
    if text is not None:
        try:
            found["input"] = json.loads(text)
        except ValueError:
            # Cut off inside the arguments (max_tokens): a client cannot use half of them.
            found["input"] = {}
    return found


def _frame(data: dict[str, Any]) -> bytes:
    return event(data, str(data["type"]))
