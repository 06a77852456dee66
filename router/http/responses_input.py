"""Requests of OpenAI's responses API to the form the chat template takes. Pure; raises InputError naming the item.

Nothing is stored: the whole conversation comes with each request, as coding agents send it (`store: false`).
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import InputError
from headrace.router.http.schemas import CommonRequest

WITHOUT_STORE = ("previous_response_id", "conversation", "prompt")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    ignore_eos: bool = False
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    chat_template_kwargs: dict[str, Any] | None = None

    def common(self) -> CommonRequest:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "priority")
        same = {name: getattr(self, name) for name in names}
        return CommonRequest.model_validate(same | {"max_tokens": self.max_output_tokens})

    @property
    def logprobs(self) -> int:
        """As `SamplingParams.top_logprobs`."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return -1


def refuse_unsupported(fields: ResponsesRequest) -> None:
    """Raises InputError for what needs answers to be kept, or answers later."""
    for name in WITHOUT_STORE:
        if getattr(fields, name) is not None:
            raise InputError(f"{name}: responses are not kept here; send the whole conversation as `input`", name)
    if fields.background:
        raise InputError("background: true is not supported", "background")
    if fields.truncation not in (None, "disabled", "auto"):
        raise InputError("truncation: expected 'auto' or 'disabled'", "truncation")


def chat_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Flat function tools in chat form."""
    found = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise InputError(
                f"tools[{i}].type: {tool.get('type')!r} is not supported, only 'function'", f"tools[{i}].type"
            )
        kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        found.append({"type": "function", "function": kept})
    return found


def chat_messages(fields: ResponsesRequest) -> list[dict[str, Any]]:
    """OpenAI chat messages. Reasoning, text and calls of one turn become one assistant message."""
    found: list[dict[str, Any]] = []
    if fields.instructions:
        found.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        found.append({"role": "user", "content": fields.input})
        return found
    if not fields.input:
        raise InputError("input: expected a text or a list of items", "input")
    for i, item in enumerate(fields.input):
        _add(found, f"input[{i}]", item)
    return found


def _add(found: list[dict[str, Any]], where: str, item: dict[str, Any]) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        text = _text(f"{where}.content", item.get("content"))
        if role == "assistant":
            _assistant(found)["content"] += text
        elif role in ("user", "system", "developer"):
            found.append({"role": role, "content": text})
        else:
            raise InputError(f"{where}.role: expected user, assistant, system or developer", f"{where}.role")
    elif kind == "reasoning":
        said = _text(f"{where}.content", item.get("content") or item.get("summary") or [])
        message = _assistant(found)
        message["reasoning_content"] = message.get("reasoning_content", "") + said
    elif kind == "function_call":
        call = {key: item.get(key) for key in ("name", "arguments")}
        if not all(isinstance(value, str) for value in (*call.values(), item.get("call_id"))):
            raise InputError(f"{where}: expected texts in call_id, name and arguments", where)
        _assistant(found).setdefault("tool_calls", []).append(
            {"id": item["call_id"], "type": "function", "function": call}
        )
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise InputError(f"{where}.call_id: expected a text", f"{where}.call_id")
        output = _text(f"{where}.output", item.get("output"))
        found.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    else:
        raise InputError(f"{where}.type: items of type {kind!r} are not supported", f"{where}.type")


def _assistant(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that is being put together."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where}: expected a text or a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise InputError(f"{where}[{i}]: only text is supported, got {kind!r}", where)
        texts.append(text)
    return "".join(texts)
