"""Anthropic requests to the form the chat template takes. `cache_control` is accepted: every block is cached anyway."""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.errors import InputError
from headrace.router.http.schemas import MAX_STOPS, CommonRequest
from headrace.router.http.structure import Structure, format_text, structure_of


class MessagesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_STOPS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def common(self) -> CommonRequest:
        """The sampling fields in OpenAI's names."""
        names = {"stop": self.stop_sequences}
        same = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        return CommonRequest.model_validate(same | names)


def thinking_options(fields: MessagesRequest) -> dict[str, Any]:
    """Thinking is off unless the request enables it, as clients of this API expect."""
    kind = (fields.thinking or {}).get("type", "disabled")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InputError("thinking.type: expected 'enabled', 'adaptive' or 'disabled'", "thinking.type")
    return {"enable_thinking": kind != "disabled"}


def openai_tools(fields: MessagesRequest) -> list[dict[str, Any]]:
    """Raises InputError for tools that run on a server of the API's maker."""
    found = []
    for i, tool in enumerate(fields.tools or ()):
        if tool.get("type") not in (None, "custom"):
            raise InputError(f"tools[{i}].type: {tool['type']!r} is not supported, only 'custom'", f"tools[{i}].type")
        function = {"name": tool.get("name"), "description": tool.get("description", "")}
        found.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema", {})}})
    return found


def structure(fields: MessagesRequest, tools: list[dict[str, Any]]) -> Structure:
    """What `tool_choice` and `output_config.format` ask of the answer. Raises InputError."""
    choice = fields.tool_choice or {"type": "auto"}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": choice}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError("tool_choice.type: expected 'auto', 'any', 'tool' or 'none'", "tool_choice.type")
    parallel = choice.get("disable_parallel_tool_use") is not True
    text = format_text((fields.output_config or {}).get("format"), "output_config.format")
    return structure_of(text, tools, kinds[kind], parallel)


def openai_messages(fields: MessagesRequest) -> list[dict[str, Any]]:
    """Raises InputError naming the message."""
    found: list[dict[str, Any]] = []
    if fields.system:
        found.append({"role": "system", "content": _text("system", fields.system)})
    for i, message in enumerate(fields.messages):
        found += openai_message(f"messages[{i}]", message)
    return found


def openai_message(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InputError(f"{where}.role: expected 'user' or 'assistant'", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InputError(f"{where}.content: expected a string or a list of blocks", f"{where}.content")
    return _assistant(where, content) if role == "assistant" else _user(where, role, content)


def _assistant(where: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            message["content"] += _string(f"{where}.content[{i}].text", block.get("text"))
        elif kind == "thinking":
            said = _string(f"{where}.content[{i}].thinking", block.get("thinking"))
            message["reasoning_content"] = message.get("reasoning_content", "") + said
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise InputError(f"{where}.content[{i}]: {kind!r} blocks are not supported", f"{where}.content")
    if calls:
        message["tool_calls"] = calls
    return [message]


def _user(where: str, role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results become messages of their own, in order; neighbouring text stays one message."""
    found: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            text = _text(f"{at}.content", block.get("content", ""))
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif block.get("type") == "text":
            text = _string(f"{at}.text", block.get("text"))
            if found and found[-1]["role"] == role:
                found[-1]["content"] += text
            else:
                found.append({"role": role, "content": text})
        else:
            raise InputError(f"{at}: {block.get('type')!r} blocks are not supported", f"{where}.content")
    if not found:
        raise InputError(f"{where}.content: is empty", f"{where}.content")
    return found


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(b, dict) and b.get("type") == "text" for b in content):
        return "".join(_string(f"{where}.text", block.get("text")) for block in content)
    raise InputError(f"{where}: only text is supported", where)


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: expected a string", where)
    return value
