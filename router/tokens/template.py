"""The checkpoint's chat template in a sandbox. Turns messages and tools into the prompt text; knows no HTTP."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import CheckpointError, InputError


class ChatTemplate:
    """Rendering is CPU work on the caller's thread; the object is thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when the folder has no template or it does not compile."""
        source = _read_source(folder)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda text: datetime.now(UTC).strftime(text)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{folder}: chat template line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, with the generation prompt. `options` are the template's own variables
        (`enable_thinking`, `clear_thinking`, `reasoning_effort`). Raises InputError when the template refuses."""
        variables = {**(options or {}), "messages": messages, "tools": list(tools) or None}
        variables["add_generation_prompt"] = True
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is the checkpoint's code: it can raise anything Python can
            raise InputError(f"the chat template refused the messages: {error}", "messages") from error


def _read_source(folder: Path) -> str:
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
        held = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: the chat template cannot be read: {error}") from error
    source = held.get("chat_template") if isinstance(held, dict) else None
    if isinstance(source, str):
        return source
    raise CheckpointError(f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
