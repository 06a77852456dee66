"""GLM's output format, incrementally: `<think>reasoning</think>content<tool_call>name<arg_key>k</arg_key>...`.

A state machine over text pieces of any size: the events of an answer, merged, do not depend on how it was cut. It knows
neither tokens nor any API. Rules:

- Output starts inside reasoning when the prompt ended with `<think>`; `<think>` as the very first content opens it.
- `<tool_call>` inside reasoning ends the reasoning. Tool calls are only recognised when the request had tools.
- Whitespace between content and a tool call, or between two calls, belongs to neither and is dropped.
- Argument values of type string go out as they come; others are turned into JSON when they are complete.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from headrace.router.answers.arguments import ArgumentWriter, ToolTypes

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the call's arguments as JSON text."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class TagBuffer:
    """Text that has arrived and is not yet interpreted."""

    def __init__(self) -> None:
        self.text = ""

    def find(self, tags: Sequence[str]) -> tuple[str | None, str]:
        """The first of `tags` in the text and what precedes it, both consumed; (None, "") if there is none yet."""
        found = [(at, tag) for tag in tags if (at := self.text.find(tag)) >= 0]
        if not found:
            return None, ""
        at, tag = min(found)
        before, self.text = self.text[:at], self.text[at + len(tag) :]
        return tag, before

    def take_until(self, tags: Sequence[str]) -> tuple[str | None, str]:
        """Like `find`, but without a tag it gives all text that cannot be the beginning of one."""
        tag, before = self.find(tags)
        if tag is not None:
            return tag, before
        keep = _open_suffix(self.text, tags)
        before = self.text[: len(self.text) - keep]
        self.text = self.text[len(self.text) - keep :]
        return None, before


def _open_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `tags`."""
    for length in range(min(max(map(len, tags)) - 1, len(text)), 0, -1):
        tail = text[len(text) - length :]
        if any(tag.startswith(tail) for tag in tags):
            return length
    return 0


class PieceList:
    """Collects pieces; trailing whitespace of the content waits until it is known whether more content follows."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._space = ""

    def say(self, piece: Piece) -> None:
        if isinstance(piece, CallStart) or piece.text:
            self._pieces.append(piece)

    def content(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        self.say(Content(body))

    def drop_space(self) -> None:
        self._space = ""

    def flush_space(self) -> None:
        space, self._space = self._space, ""
        self.say(Content(space))

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class GlmParser:
    def __init__(self, *, in_reasoning: bool, tools: ToolTypes | None) -> None:
        """`tools` None: the request had none, `<tool_call>` is ordinary text."""
        self._tools = tools
        self._state = "reasoning" if in_reasoning else "start"
        self._buffer = TagBuffer()
        self._out = PieceList()
        self._writer = ArgumentWriter({})
        self.calls = 0
        """Tool calls started so far."""
        self.complete_calls = 0

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._buffer.text += text
        while getattr(self, f"_in_{self._state}")():
            pass
        return self._out.take()

    def finish(self) -> list[Piece]:
        """The answer ended: what was held back, as what it would have been."""
        rest, self._buffer.text = self._buffer.text, ""
        if self._state == "reasoning":
            self._out.say(Reasoning(rest))
        elif self._state in ("start", "content"):
            self._out.content(rest)
        elif self._state == "name":
            # Cut off inside a name: there is no call to speak of, so the reader gets the text itself.
            self._out.content(CALL + rest)
        elif self._state == "value":
            self._arguments(self._writer.value_text(rest, complete=False))
        if self.calls:
            self._out.drop_space()
        self._out.flush_space()
        return self._out.take()

    # One method per state: consume one stretch of the buffer; False when more text is needed.

    def _in_start(self) -> bool:
        stripped = self._buffer.text.lstrip()
        if stripped.startswith(THINK):
            self._buffer.text = stripped[len(THINK) :]
            self._state = "reasoning"
            return True
        if THINK.startswith(stripped):
            return False
        self._state = "content"
        return True

    def _in_reasoning(self) -> bool:
        tag, text = self._buffer.take_until((END_THINK,) if self._tools is None else (END_THINK, CALL))
        self._out.say(Reasoning(text))
        if tag is not None:
            self._state = "content" if tag == END_THINK else "name"
        return tag is not None

    def _in_content(self) -> bool:
        if self._tools is None:
            self._out.say(Content(self._buffer.text))
            self._buffer.text = ""
            return False
        tag, text = self._buffer.take_until((CALL,))
        self._out.content(text)
        if tag is not None:
            self._state = "name"
        return tag is not None

    def _in_name(self) -> bool:
        tag, name = self._buffer.find((KEY, END_CALL))
        if tag is None:
            return False
        self._writer = (self._tools or ToolTypes(())).writer(name.strip())
        self._out.drop_space()
        self._out.say(CallStart(self.calls, name.strip()))
        self.calls += 1
        self._state = "key"
        if tag == END_CALL:
            self._end_call()
        return True

    def _in_between(self) -> bool:
        """After a value: the next key or the end of the call. Anything else there is noise of the model."""
        tag, _ = self._buffer.find((KEY, END_CALL))
        if tag == KEY:
            self._state = "key"
        elif tag == END_CALL:
            self._end_call()
        return tag is not None

    def _in_key(self) -> bool:
        tag, key = self._buffer.find((END_KEY,))
        if tag is not None:
            self._arguments(self._writer.key(key.strip()))
            self._state = "gap"
        return tag is not None

    def _in_gap(self) -> bool:
        """Between a key and its value; a call that ends here has an empty value."""
        tag, _ = self._buffer.find((VALUE, END_CALL))
        if tag == VALUE:
            self._state = "value"
        elif tag == END_CALL:
            self._arguments(self._writer.value_text("", complete=True))
            self._end_call()
        return tag is not None

    def _in_value(self) -> bool:
        ends = (END_VALUE,)
        tag, text = self._buffer.take_until(ends) if self._writer.streams else self._buffer.find(ends)
        if tag is not None or self._writer.streams:
            self._arguments(self._writer.value_text(text, complete=tag is not None))
        if tag is not None:
            self._state = "between"
        return tag is not None

    def _end_call(self) -> None:
        self._arguments(self._writer.end())
        self.complete_calls += 1
        self._state = "content"

    def _arguments(self, text: str) -> None:
        self._out.say(CallArguments(self.calls - 1, text))


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of the same kind joined: fewer, larger pieces with the same meaning."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            found[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            found.append(piece)
    return found
