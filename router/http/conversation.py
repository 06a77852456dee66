"""OpenAI messages and tools to what the chat template takes. Pure; raises InputError naming the message."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where}.role: expected one of {', '.join(ROLES)}", f"{where}.role")
    calls = message.get("tool_calls")
    content = _content(where, message.get("content"), optional=role == "assistant")
    found: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role), "content": content}
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if isinstance(reasoning, str):
            found["reasoning_content"] = reasoning
        elif reasoning is not None:
            raise InputError(f"{where}.reasoning_content: expected a string", f"{where}.reasoning_content")
        if calls is not None:
            if not isinstance(calls, list):
                raise InputError(f"{where}.tool_calls: expected a list", f"{where}.tool_calls")
            found["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key]
    return found


def _content(where: str, content: Any, *, optional: bool) -> str:
    """The text of a message: a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise InputError(f"{where}.content: expected a string or a list of parts", f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in ("text", "refusal"):
            text = part.get(part["type"])
            if not isinstance(text, str):
                raise InputError(f"{where}.content[{i}].text: expected a string", f"{where}.content[{i}].text")
            texts.append(text)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InputError(f"{where}.content[{i}]: only text parts are supported, got {kind!r}", f"{where}.content")
    return "".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: expected {{function: {{name, arguments}}}}", where)
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}.function.arguments: not JSON: {error}", f"{where}.function.arguments") from error
    if not isinstance(arguments, dict):
        raise InputError(f"{where}.function.arguments: expected a JSON object", f"{where}.function.arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def check_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InputError(f"tools[{i}].function.name: expected a string", f"tools[{i}].function.name")
        if tool.get("type", "function") != "function":
            raise InputError(f"tools[{i}].type: only 'function' is supported", f"tools[{i}].type")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InputError(f"tools[{i}].function.parameters: expected an object", f"tools[{i}].function.parameters")
        found.append(dict(tool))
    return found


def template_options(
    kwargs: Mapping[str, Any] | None, reasoning_effort: str | None, thinking: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The template's variables. `reasoning_effort: none` switches thinking off, as other servers take it; so does
    `thinking: {"type": "disabled"}`, as the API of the model's maker has it."""
    options: dict[str, Any] = {}
    if thinking is not None:
        if thinking.get("type") not in ("enabled", "disabled"):
            raise InputError("thinking.type: expected 'enabled' or 'disabled'", "thinking.type")
        options["enable_thinking"] = thinking["type"] == "enabled"
        if isinstance(thinking.get("clear_thinking"), bool):
            options["clear_thinking"] = thinking["clear_thinking"]
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
        if reasoning_effort == "none":
            options["enable_thinking"] = False
    for key, value in (kwargs or {}).items():
        if key in ("messages", "tools", "add_generation_prompt"):
            raise InputError(f"chat_template_kwargs.{key} cannot be set", f"chat_template_kwargs.{key}")
        if key in ("enable_thinking", "clear_thinking") and not isinstance(value, bool):
            raise InputError(f"chat_template_kwargs.{key}: expected true or false", f"chat_template_kwargs.{key}")
        options[key] = value
    return options
