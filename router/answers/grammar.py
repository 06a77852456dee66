"""What an answer must look like, as a grammar in the form of `model/grammar.py`: JSON of a schema, a pattern, one of a
few texts, or tool calls in GLM's own form, so that the parser of every answer reads them too. Pure.

A rule `free` before it lets the reasoning run first when the prompt opened it. Free text holds no added token, so
neither the end of the answer nor a call can hide in it.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InputError
from headrace.router.answers.arguments import declared_types, resolved

SPACING = r"(\n[ ]{0,16}| )?"
"""White space between the parts of JSON: bounded, so that no model can fill its answer with it."""
FREE = "FREE: /(.|\\n)*/"


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls an answer must, or may at most, consist of."""

    tools: Sequence[Mapping[str, Any]]
    """OpenAI form; those that may be called."""
    required: bool
    """At least one, and no text; else text comes first and calls may follow."""
    several: bool


def json_text(schema: Any) -> str:
    """Rule body: one JSON value of `schema`."""
    if not isinstance(schema, dict):
        return f"%json {json.dumps(schema)}"
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': SPACING}})}"


def regex_text(pattern: str) -> str:
    """Rule body: text that matches `pattern` as a whole."""
    slashed = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return "/" + slashed.replace("\n", "\\n").replace("\r", "\\r") + "/"


def choice_text(choices: Sequence[str]) -> str:
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def lark_text(grammar: str) -> str:
    return "%lark {\n" + grammar + "\n}"


def grammar_of(text: str, calls: Calls | None, *, in_reasoning: bool) -> str:
    """The grammar of an answer, after its reasoning: `text` (a rule body of the functions above, empty: anything), or
    tool calls, or both. Empty when everything is allowed. Raises InputError for required calls without tools."""
    if calls is None and not text:
        return ""
    rules = [FREE]
    if text:
        rules.append(f"out: {text}")
    body = "out"
    if calls is not None:
        if calls.required and not calls.tools:
            raise InputError("tool_choice asks for a call, but there are no tools", "tool_choice")
        for i, tool in enumerate(calls.tools):
            function = tool["function"]
            rules += _call_rules(f"t{i}", function["name"], function.get("parameters") or {})
        body = _with_calls(" | ".join(f"t{i}" for i in range(len(calls.tools))), calls, bool(text))
    return "\n".join([f"start: FREE </think> {body}" if in_reasoning else f"start: {body}", *rules])


def _with_calls(any_call: str, calls: Calls, text: bool) -> str:
    once = f"({any_call}){'+' if calls.several else ''}"
    if calls.required:
        return once
    if text:
        return f"(out | {once})" if any_call else "out"
    return f"FREE {once}".rstrip("+") + ("*" if calls.several else "?") if any_call else "FREE"


def _call_rules(name: str, function: str, parameters: Mapping[str, Any]) -> list[str]:
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = parameters.get("required")
    required = required if isinstance(required, list) else []
    rules, parts = [], []
    for i, (key, schema) in enumerate(properties.items()):
        value = f"{name}v{i}"
        argument = f"<arg_key> {json.dumps(key, ensure_ascii=False)} </arg_key> <arg_value> {value} </arg_value>"
        parts.append(argument if key in required else f"({argument})?")
        rules.append(f"{value}: {_value(schema, parameters)}")
    if not properties and parameters.get("additionalProperties", True) is not False:
        parts.append("(<arg_key> /[^\\s<>]+/ </arg_key> <arg_value> FREE </arg_value>)*")
    head = f"{name}: <tool_call> {json.dumps(function, ensure_ascii=False)} {' '.join(parts)} </tool_call>"
    return [head, *rules]


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """Rule body of one argument: strings as they are, everything else as JSON."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return "FREE"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        texts = [v for v in values if isinstance(v, str)]
        others = [v for v in values if not isinstance(v, str)]
        return " | ".join(
            [*(json.dumps(t, ensure_ascii=False) for t in texts), *(json_text({"const": v}) for v in others)]
        )
    types = declared_types(schema, root)
    if types == {"string"}:
        return _string(schema)
    if not types or "string" in types:
        return "FREE"
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return json_text({**shared, **schema})


def _string(schema: Mapping[str, Any]) -> str:
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(pattern, str):
        head = "" if pattern.startswith("^") else "(.|\\n)*"
        tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(.|\\n)*"
        inner = pattern.removeprefix("^")
        inner = inner if tail else inner.removesuffix("$")
        return regex_text(f"{head}({inner}){tail}")
    if type(least) is int and (most is None or type(most) is int) and (least or most is not None):
        return f"/(.|\\n){{{least},{'' if most is None else most}}}/"
    return "FREE"
