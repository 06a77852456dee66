"""From the fields of a request to the grammar of its answer: response formats, patterns, forced tool calls.

OpenAI's `response_format`, `tool_choice` and `parallel_tool_calls`; beside them the fields of other servers:
`structured_outputs` {json, regex, choice, grammar, json_object} and `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`. What cannot be promised is an InputError naming the field.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InputError
from headrace.router.answers.grammar import Calls, choice_text, grammar_of, json_text, lark_text, regex_text

GUIDED = ("json", "regex", "choice", "grammar")


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """What a request asks of its answer's form."""

    text: str = ""
    """Rule body of the content; empty: anything."""
    calls: Calls | None = None

    def grammar(self, *, in_reasoning: bool) -> str:
        return grammar_of(self.text, self.calls, in_reasoning=in_reasoning)


def format_text(response_format: Any, field: str) -> str:
    """Rule body of OpenAI's `response_format`, of `text.format` (flat), or of Anthropic's `output_config.format`."""
    if response_format is None:
        return ""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return json_text({"type": "object"})
    if kind != "json_schema":
        raise InputError(
            f"{field}.type: expected 'text', 'json_object' or 'json_schema', got {kind!r}", f"{field}.type"
        )
    holder, at = response_format, field
    if "schema" not in response_format:
        holder, at = response_format.get("json_schema"), f"{field}.json_schema"
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise InputError(f"{at}.schema: expected a JSON schema (an object)", f"{at}.schema")
    return json_text(schema)


def guided_text(fields: Any) -> str:
    """Rule body of the fields that other servers know. `fields`: schemas.CommonRequest."""
    asked = dict(fields.structured_outputs or {})
    where = dict.fromkeys(asked, "structured_outputs")
    for kind in GUIDED:
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            asked[kind], where[kind] = value, f"guided_{kind}"
    asked = {kind: value for kind, value in asked.items() if value not in (None, False)}
    if not asked:
        return ""
    if len(asked) > 1:
        raise InputError(f"structured_outputs: only one of {', '.join(sorted(asked))} can be had", "structured_outputs")
    [(kind, value)] = asked.items()
    return _guided(kind, value, where[kind])


def _guided(kind: str, value: Any, field: str) -> str:
    if kind == "json_object":
        return json_text({"type": "object"})
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{field}: not JSON: {error}", field) from error
        if not isinstance(value, dict):
            raise InputError(f"{field}: expected a JSON schema (an object)", field)
        return json_text(value)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise InputError(f"{field}: expected a list of texts", field)
        return choice_text(value)
    if kind in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            raise InputError(f"{field}: expected a text", field)
        return regex_text(value) if kind == "regex" else lark_text(value)
    raise InputError(f"structured_outputs.{kind}: expected one of json, json_object, regex, choice, grammar", field)


def structure_of(text: str, tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool | None) -> Structure:
    """`text` from the functions above; the rest as in a chat request."""
    calls = tool_calls(tools, choice, parallel)
    if text and calls is None and tools and choice != "none":
        calls = Calls(tools, False, parallel is not False)  # a form of the text must not rule the tools out
    return Structure(text, calls)


def tool_calls(tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool | None) -> Calls | None:
    """What OpenAI's `tool_choice` and `parallel_tool_calls` ask for; None: nothing. `tools` in their chat form."""
    several = parallel is not False
    if choice in (None, "auto", "none"):
        return None if several or not tools or choice == "none" else Calls(tools, False, False)
    if choice == "required":
        return Calls(tools, True, several)
    if not isinstance(choice, dict):
        raise InputError("tool_choice: expected 'auto', 'none', 'required' or an object", "tool_choice")
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice, several)
    if choice.get("type") not in ("function", "tool"):
        raise InputError("tool_choice.type: expected 'function' or 'allowed_tools'", "tool_choice.type")
    return Calls([_named(tools, choice)], True, False)


def _allowed(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any], several: bool) -> Calls:
    inner = choice.get("allowed_tools", choice)
    named = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(named, list) or inner.get("mode") not in ("auto", "required"):
        raise InputError("tool_choice.allowed_tools: expected {mode: auto or required, tools: [...]}", "tool_choice")
    return Calls([_named(tools, one) for one in named], inner["mode"] == "required", several)


def _named(tools: Sequence[Mapping[str, Any]], choice: Any) -> Mapping[str, Any]:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InputError("tool_choice: expected the name of a tool", "tool_choice")
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InputError(f"tool_choice: there is no tool {name!r}", "tool_choice")
