"""OpenAI's POST /v1/responses: text, reasoning, function calls, streaming events. Keeps nothing."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError
from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import THINK, CallArguments, CallStart, Content, GlmParser, Piece, Reasoning, merged
from headrace.router.answers.text import TextDelta
from headrace.router.generation import Generation, Usage
from headrace.router.http.chat import call_id
from headrace.router.http.conversation import check_tools, template_messages, template_options
from headrace.router.http.errors import error_code
from headrace.router.http.recall import Answers, Conversation, Prompt
from headrace.router.http.responses_input import ResponsesRequest, chat_messages, chat_tools, refuse_unsupported
from headrace.router.http.service import Service
from headrace.router.http.serving import serve
from headrace.router.http.sse import event
from headrace.router.http.structure import format_text, structure_of
from headrace.router.http.usage import chat_logprobs

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}
"""Fields of the request that its response repeats, and what they are when the client did not say."""


async def create_response(service: Service, request: Request) -> Response:
    tenant, raw = await service.read(request)
    with contextlib.ExitStack() as place:
        place.enter_context(service.admitted(tenant))
        fields = service.fields(ResponsesRequest, raw)
        service.check_model(fields.model)
        refuse_unsupported(fields)
        tools = check_tools(chat_tools(fields.tools))
        text = format_text((fields.text or {}).get("format"), "text.format")
        structure = structure_of(text, tools, fields.tool_choice, fields.parallel_tool_calls)
        tools = [] if fields.tool_choice == "none" else tools

        def render(prompt_of: Callable[[str], Prompt]) -> tuple[Conversation, Prompt]:
            options = template_options(fields.chat_template_kwargs, (fields.reasoning or {}).get("effort"))
            messages = template_messages(chat_messages(fields))
            conversation = Conversation(service.model.template, messages, tools, options)
            return conversation, prompt_of(conversation.text())

        conversation, prompt = await service.recall.prompts(tenant, render)
        generation = service.generation(
            request,
            tenant=tenant,
            fields=fields.common(),
            prompts=[prompt],
            top_logprobs=fields.logprobs,
            prefix="resp",
            grammar=await service.grammar(structure.grammar(in_reasoning=prompt.text.endswith(THINK))),
        )
        shape = ResponseShape(service, generation, fields, conversation, prompt)
        return await serve(service, request, generation, shape, stream=bool(fields.stream), place=place.pop_all())


def response_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_by_tier": dict(usage.cached_by_tier),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseShape:
    """Implements serving.Shape: output items are opened and closed as the kind of the answer's text changes."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        fields: ResponsesRequest,
        conversation: Conversation,
        prompt: Prompt,
    ) -> None:
        self._generation = generation
        self._tokenizer = service.model.tokenizer
        self._conversation, self._prompt = conversation, prompt
        types = ToolTypes(conversation.tools) if conversation.tools else None
        self._parser = GlmParser(in_reasoning=prompt.text.endswith(THINK), tools=types)
        self._answers = Answers(service.recall, [prompt], generation.spec.rules.stop_token_ids, self._written)
        self._wants_logprobs = fields.logprobs >= 0
        self._logprobs: list[dict[str, Any]] = []
        """Of content tokens whose text has not gone out yet."""
        self._reasoning_tokens = 0
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._number = 0
        self._status, self._reason = "in_progress", ""
        self._completed: int | None = None
        echoed = {k: v if (v := getattr(fields, k)) is not None else default for k, default in _ECHOED.items()}
        named = {
            k: v for k in ("user", "safety_identifier", "prompt_cache_key") if (v := getattr(fields, k)) is not None
        }
        sampling = generation.spec.sampling
        self._head = {
            "id": generation.spec.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model.name,
            **echoed,
            **named,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
        }

    def start(self) -> Iterable[bytes]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def feed(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        pieces: list[Piece] = []
        for i, part in enumerate(delta.parts):
            thinking = self._parser.in_reasoning
            self._reasoning_tokens += thinking and i < delta.tokens
            pieces += self._parser.push(part)
            if self._wants_logprobs and not thinking and not self._parser.calls and i < len(delta.logprobs):
                self._logprobs += chat_logprobs(self._tokenizer, delta.logprobs[i : i + 1])
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
            cut = delta.finish_reason == "length"
            self._status, self._reason = ("incomplete", "max_output_tokens") if cut else ("completed", "")
            self._completed = None if cut else int(time.time())
        frames = [frame for piece in merged(pieces) for frame in self._piece(piece)]
        self._answers.take(index, delta)
        return frames

    def _piece(self, piece: Piece) -> Iterable[bytes]:
        if isinstance(piece, Reasoning):
            yield from self._text_item("reasoning", piece.text)
        elif isinstance(piece, Content):
            yield from self._text_item("message", piece.text)
        elif isinstance(piece, CallStart):
            yield from self._close()
            call = {"type": "function_call", "id": _id("fc"), "call_id": call_id(), "name": piece.name, "arguments": ""}
            yield from self._add(call)
        elif isinstance(piece, CallArguments):
            self._items[-1]["arguments"] += piece.text
            yield self._at("response.function_call_arguments.delta", delta=piece.text)

    def _text_item(self, kind: str, text: str) -> Iterable[bytes]:
        message = kind == "message"
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close()
            own: dict[str, Any] = {"role": "assistant"} if message else {"summary": []}
            yield from self._add({"type": kind, "id": _id("msg" if message else "rs"), **own, "content": []})
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"].append(empty if message else {"type": "reasoning_text", "text": ""})
            part = dict(self._items[-1]["content"][0])
            yield self._at("response.content_part.added", content_index=0, part=part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        if message:
            logprobs, self._logprobs = self._logprobs, []
            part["logprobs"] = [*part["logprobs"], *logprobs]
            yield self._at("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        else:
            yield self._at("response.reasoning_text.delta", content_index=0, delta=text)

    def _add(self, item: dict[str, Any]) -> Iterable[bytes]:
        item["status"] = "in_progress"
        self._items.append(item)
        self._open = True
        yield self._at("response.output_item.added", named=False, item={**item, **_empty(item)})

    def _close(self) -> Iterable[bytes]:
        """End the open item."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        # An item is incomplete only if the answer was cut inside it.
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield self._at("response.function_call_arguments.done", **whole)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                yield self._at(
                    "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
                )
            else:
                yield self._at("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._at("response.content_part.done", content_index=0, part=part)
        yield self._at("response.output_item.done", named=False, item=item)

    def _at(self, kind: str, *, named: bool = True, **fields: Any) -> bytes:
        """An event of the last item."""
        if named:
            fields = {"item_id": self._items[-1]["id"], **fields}
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _written(self, _index: int) -> Callable[[], str]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self._items:
            if item["type"] == "function_call":
                function = {key: item[key] for key in ("name", "arguments")}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
                continue
            key = "content" if item["type"] == "message" else "reasoning_content"
            message[key] = message.get(key, "") + item["content"][0]["text"]
        return lambda: self._conversation.written(self._prompt.text, message)

    def over(self) -> None:
        self._answers.close()

    def end(self) -> Iterable[bytes]:
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._response())

    def failure(self, error: HeadraceError) -> Iterable[bytes]:
        self._status = "failed"
        code = "rate_limit_exceeded" if error_code(error) == "rate_limit_exceeded" else "server_error"
        failed = {**self._response(), "error": {"code": code, "message": str(error) or error.kind}}
        yield self._event("response.failed", response=failed)

    def body(self) -> dict[str, Any]:
        return self._response()

    def _response(self) -> dict[str, Any]:
        over = self._status in ("completed", "incomplete")
        return {
            **self._head,
            "status": self._status,
            "completed_at": self._completed,
            "error": None,
            "incomplete_details": {"reason": self._reason} if self._reason else None,
            "output": [_copy(item) for item in self._items],
            "usage": response_usage(self._generation.usage, self._reasoning_tokens) if over else None,
        }


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    return {"content": []} if "content" in item else {}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
