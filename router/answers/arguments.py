"""Tool-call arguments from GLM's key/value form to JSON text, typed by the tool's JSON schema."""

import json
from collections.abc import Iterable, Mapping
from typing import Any


class ToolTypes:
    """The declared parameter types of a request's tools."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """`tools` in OpenAI form: {"type": "function", "function": {"name", "parameters": JSON schema}}."""
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def writer(self, name: str) -> "ArgumentWriter":
        return ArgumentWriter(self._schemas.get(name, {}))


class ArgumentWriter:
    """Arguments of one call: `key`, `value_text` ..., `end` return fragments that joined are one JSON object."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """`schema`: JSON schema of the arguments as a whole."""
        self._schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._seen: set[str] = set()
        self._repeated = False
        self._open_string = False
        self._types: frozenset[str] = frozenset()

    @property
    def streams(self) -> bool:
        """Whether the current value is certainly a string, so that its pieces can go out as they come."""
        return self._types == {"string"}

    def key(self, key: str) -> str:
        self._repeated = key in self._seen
        if self._repeated:  # An object has each key once; the first value may be on its way already.
            return ""
        self._types = declared_types(self._properties.get(key), self._schema)
        self._seen.add(key)
        self._open_string = False
        return ("{" if len(self._seen) == 1 else ", ") + json.dumps(key, ensure_ascii=False) + ": "

    def value_text(self, text: str, *, complete: bool) -> str:
        """A piece of the value (all of it unless `streams`). An incomplete value that is not a string gives nothing."""
        if self._repeated:
            return ""
        if not self.streams:
            return json.dumps(_typed(text, self._types), ensure_ascii=False) if complete else ""
        opening = "" if self._open_string or not (text or complete) else '"'
        self._open_string = self._open_string or bool(opening)
        return opening + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if complete else "")

    def end(self) -> str:
        return "}" if self._seen else "{}"


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """`schema`, or what its local `$ref` points to in `root`; itself when that is nowhere."""
    for _ in range(8):
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(where, str) or not where.startswith("#/"):
            return schema
        found: Any = root
        for step in where[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            return schema
        schema = found
    return schema


def declared_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types a JSON schema allows; empty if it does not say."""
    return _types_of(schema, root, 8)


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    found: frozenset[str] = frozenset()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            parts = [_types_of(option, root, depth - 1) for option in options]
            if not all(parts):
                return frozenset()
            found = found.union(*parts)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return frozenset(("string",))
    return found


def _typed(text: str, types: frozenset[str]) -> Any:
    """The value the model wrote: JSON where it parses to an allowed type, else the text itself."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        # 1e999 is read as infinity and "\ud800" as half a character: neither can be sent as JSON in UTF-8.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str) or (types and not _allows(types, value)):
        # A quoted string is JSON only if the schema cannot mean the raw text.
        return text if "string" in types or not types else value
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _allows(types: frozenset[str], value: Any) -> bool:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    name = "null" if value is None else names[type(value)]
    return name in types or (name == "integer" and "number" in types)
