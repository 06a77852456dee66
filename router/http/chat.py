"""POST /v1/chat/completions."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError, InputError
from headrace.router.answers.arguments import ToolTypes
from headrace.router.answers.glm import THINK, CallArguments, CallStart, Content, GlmParser, Piece, Reasoning, merged
from headrace.router.answers.text import TextDelta
from headrace.router.generation import Generation
from headrace.router.http.conversation import check_tools, template_messages, template_options
from headrace.router.http.errors import openai_error
from headrace.router.http.recall import Answers, Conversation, Prompt
from headrace.router.http.schemas import ChatRequest
from headrace.router.http.service import Service
from headrace.router.http.serving import serve
from headrace.router.http.sse import DONE, event
from headrace.router.http.structure import Structure, format_text, guided_text, structure_of
from headrace.router.http.usage import chat_logprobs, openai_usage


async def create_chat_completion(service: Service, request: Request) -> Response:
    tenant, raw = await service.read(request)
    with contextlib.ExitStack() as place:
        place.enter_context(service.admitted(tenant))
        fields = service.fields(ChatRequest, raw)
        service.check_model(fields.model)
        tools, structure = _structure(fields)
        conversation, prompt = await service.recall.prompts(tenant, lambda of: _render(service, fields, tools, of))
        generation = service.generation(
            request,
            tenant=tenant,
            fields=fields,
            prompts=[prompt],
            top_logprobs=_top_logprobs(fields),
            prefix="chatcmpl",
            grammar=await service.grammar(structure.grammar(in_reasoning=prompt.text.endswith(THINK))),
        )
        shape = ChatShape(service, generation, fields, conversation, prompt)
        return await serve(service, request, generation, shape, stream=bool(fields.stream), place=place.pop_all())


def _structure(fields: ChatRequest) -> tuple[list[dict[str, Any]], Structure]:
    """Tools the model is told of, and what its answer must be like. Raises InputError for what cannot be promised."""
    tools = check_tools(fields.tools)
    text = format_text(fields.response_format, "response_format") or guided_text(fields)
    structure = structure_of(text, tools, fields.tool_choice, fields.parallel_tool_calls)
    return ([] if fields.tool_choice == "none" else tools), structure


def _top_logprobs(fields: ChatRequest) -> int:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InputError("top_logprobs needs logprobs: true", "top_logprobs")
    return (fields.top_logprobs or 0) if fields.logprobs else -1


def _render(
    service: Service, fields: ChatRequest, tools: list[dict[str, Any]], prompt_of: Callable[[str], Prompt]
) -> tuple[Conversation, Prompt]:
    """Runs in a worker thread."""
    options = template_options(fields.chat_template_kwargs, fields.reasoning_effort, fields.thinking)
    conversation = Conversation(service.model.template, template_messages(fields.messages), tools, options)
    return conversation, prompt_of(conversation.text())


class ChatChoice:
    """Parser and whole message of one choice."""

    def __init__(self, index: int, parser: GlmParser) -> None:
        self.index = index
        self.parser = parser
        self.opened = False
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.logprobs: list[dict[str, Any]] = []

    def add(self, delta: dict[str, Any]) -> None:
        """Merge a streamed delta into the message."""
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                self.message[key] = (self.message.get(key) or "") + delta[key]
        for part in delta.get("tool_calls", ()):
            calls = self.message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]

    def whole(self, logprobs: bool) -> dict[str, Any]:
        return {
            "index": self.index,
            "message": {"refusal": None, **self.message},
            "logprobs": {"content": self.logprobs, "refusal": None} if logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def delta_of(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, CallStart):
        function = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": call_id(), "type": "function", "function": function}]}
    assert isinstance(piece, CallArguments)
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChatShape:
    """Implements serving.Shape."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        fields: ChatRequest,
        conversation: Conversation,
        prompt: Prompt,
    ) -> None:
        self._tokenizer = service.model.tokenizer
        self._generation = generation
        self._logprobs = bool(fields.logprobs)
        self._ids = bool(fields.return_token_ids)
        self._usage_wanted = fields.stream_options is not None and fields.stream_options.include_usage
        self._reasoning_tokens = 0
        self._head = {
            "id": generation.spec.request_id,
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.system_fingerprint,
        }
        self._conversation, self._prompt = conversation, prompt
        types = ToolTypes(conversation.tools) if conversation.tools else None
        in_reasoning = prompt.text.endswith(THINK)
        self._choices = [
            ChatChoice(i, GlmParser(in_reasoning=in_reasoning, tools=types)) for i in range(generation.choices)
        ]
        stops = generation.spec.rules.stop_token_ids
        self._answers = Answers(service.recall, [prompt] * generation.choices, stops, self._written)

    def start(self) -> Iterable[bytes]:
        return ()

    def feed(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        choice = self._choices[index]
        pieces: list[Piece] = []
        for i, shown in enumerate(delta.parts):
            self._reasoning_tokens += choice.parser.in_reasoning and i < delta.tokens
            pieces += choice.parser.push(shown)
        if delta.finish_reason is not None:
            pieces += choice.parser.finish()
            choice.stop_reason = delta.stop
            calls = choice.parser.complete_calls
            choice.finish_reason = "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._logprobs else []
        choice.logprobs += logprobs
        deltas = [delta_of(piece) for piece in merged(pieces)]
        for part in deltas:
            choice.add(part)
        self._answers.take(index, delta)
        extra: dict[str, Any] = {"logprobs": {"content": logprobs, "refusal": None}} if logprobs else {}
        if self._ids and delta.ids:
            extra["token_ids"] = list(delta.ids)
        return self._chunks(choice, deltas, extra)

    def _chunks(self, choice: ChatChoice, deltas: list[dict[str, Any]], extra: dict[str, Any]) -> Iterable[bytes]:
        """`extra`: what goes out once per step, with its first chunk: logprobs and token ids."""
        if not choice.opened:
            choice.opened = True
            yield self._chunk(choice, {"role": "assistant", "content": ""}, {}, **self._prompt_ids())
        if extra and not deltas:
            deltas = [{}]
        for i, delta in enumerate(deltas):
            yield self._chunk(choice, delta, extra if i == 0 else {})
        if choice.finish_reason is not None:
            ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            yield self._chunk(choice, {}, ended)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._prompt.ids)} if self._ids else {}

    def _chunk(self, choice: ChatChoice, delta: dict[str, Any], extra: dict[str, Any], **whole: Any) -> bytes:
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        usage = {"usage": None} if self._usage_wanted else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [part], **usage, **whole})

    def _written(self, index: int) -> Callable[[], str]:
        message = self._choices[index].message
        return lambda: self._conversation.written(self._prompt.text, message)

    def over(self) -> None:
        self._answers.close()

    def end(self) -> Iterable[bytes]:
        if not self._usage_wanted:
            return (DONE,)
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}
        return (event(chunk), DONE)

    def _usage(self) -> dict[str, Any]:
        return openai_usage(self._generation.usage, self._reasoning_tokens)

    def failure(self, error: HeadraceError) -> Iterable[bytes]:
        return (event(openai_error(error)),)

    def body(self) -> dict[str, Any]:
        choices = [choice.whole(self._logprobs) for choice in self._choices]
        if self._ids:
            for choice, ids in zip(choices, self._answers.ids, strict=True):
                choice["token_ids"] = ids
        whole = self._prompt_ids()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage(), **whole}
