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


class GlmParser:
    def __init__(self, *, in_reasoning: bool, tools: ToolTypes | None) -> None:
        """`tools` None: the request had none, `<tool_call>` is ordinary text."""
        self._tools = tools
        self._state = "reasoning" if in_reasoning else "start"
        self._buffer = ""
        self._space = ""
        """Whitespace of the content that goes out only if more content follows."""
        self._writer: ArgumentWriter | None = None
        self.calls = 0
        """Tool calls started so far."""
        self.complete_calls = 0

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The answer ended: what was held back, as what it would have been."""
        pieces: list[Piece] = []
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning":
            self._say(pieces, Reasoning(rest))
        elif self._state in ("start", "content"):
            self._content(pieces, rest)
        elif self._state == "name":
            # Cut off inside a name: there is no call to speak of, so the reader gets the text itself.
            self._content(pieces, CALL + rest)
        elif self._state == "value":
            self._arguments(pieces, self._open_writer().value_text(rest, complete=False))
        if not self.calls:
            self._say(pieces, Content(self._space))
        self._space = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Consume one stretch of the buffer; False when more text is needed."""
        handler = getattr(self, f"_in_{self._state}")
        done: bool = handler(pieces)
        return done

    def _in_start(self, pieces: list[Piece]) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK):
            self._buffer = stripped[len(THINK) :]
            self._state = "reasoning"
            return True
        if THINK.startswith(stripped):
            return False
        self._state = "content"
        return True

    def _in_reasoning(self, pieces: list[Piece]) -> bool:
        tag, text = self._take_until((END_THINK, CALL) if self._tools is not None else (END_THINK,))
        self._say(pieces, Reasoning(text))
        if tag == END_THINK:
            self._state = "content"
        elif tag == CALL:
            self._state = "name"
        return tag is not None

    def _in_content(self, pieces: list[Piece]) -> bool:
        if self._tools is None:
            self._say(pieces, Content(self._buffer))
            self._buffer = ""
            return False
        tag, text = self._take_until((CALL,))
        self._content(pieces, text)
        if tag is not None:
            self._state = "name"
        return tag is not None

    def _in_name(self, pieces: list[Piece]) -> bool:
        tag, name = self._find((KEY, END_CALL))
        if tag is None:
            return False
        self._writer = (self._tools or ToolTypes(())).writer(name.strip())
        self._say(pieces, CallStart(self.calls, name.strip()))
        self._space = ""
        self.calls += 1
        self._state = "key" if tag == KEY else "between"
        if tag == END_CALL:
            self._end_call(pieces)
        return True

    def _in_between(self, pieces: list[Piece]) -> bool:
        """After a value: the next key or the end of the call. Anything else there is noise of the model."""
        tag, _ = self._find((KEY, END_CALL))
        if tag == KEY:
            self._state = "key"
        elif tag == END_CALL:
            self._end_call(pieces)
        return tag is not None

    def _in_key(self, pieces: list[Piece]) -> bool:
        tag, key = self._find((END_KEY,))
        if tag is None:
            return False
        self._arguments(pieces, self._open_writer().key(key.strip()))
        self._state = "gap"
        return True

    def _in_gap(self, pieces: list[Piece]) -> bool:
        tag, _ = self._find((VALUE, END_CALL))
        if tag == VALUE:
            self._state = "value"
        elif tag == END_CALL:
            self._arguments(pieces, self._open_writer().value_text("", complete=True))
            self._end_call(pieces)
        return tag is not None

    def _in_value(self, pieces: list[Piece]) -> bool:
        writer = self._open_writer()
        tag, text = self._take_until((END_VALUE,)) if writer.streams else self._find((END_VALUE,))
        if tag is None and not writer.streams:
            return False
        self._arguments(pieces, writer.value_text(text, complete=tag is not None))
        if tag is not None:
            self._state = "between"
        return tag is not None

    def _end_call(self, pieces: list[Piece]) -> None:
        self._arguments(pieces, self._open_writer().end())
        self._writer = None
        self.complete_calls += 1
        self._state = "content"

    def _open_writer(self) -> ArgumentWriter:
        assert self._writer is not None
        return self._writer

    def _arguments(self, pieces: list[Piece], text: str) -> None:
        self._say(pieces, CallArguments(self.calls - 1, text))

    def _content(self, pieces: list[Piece], text: str) -> None:
        """Content whose trailing whitespace waits for more content (or for the end)."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        self._say(pieces, Content(body))

    @staticmethod
    def _say(pieces: list[Piece], piece: Piece) -> None:
        if isinstance(piece, CallStart) or piece.text:
            pieces.append(piece)

    def _find(self, tags: Sequence[str]) -> tuple[str | None, str]:
        """The first of `tags` in the buffer and the text before it, both consumed; (None, "") if there is none yet."""
        at, tag = self._first(tags)
        if tag is None:
            return None, ""
        text = self._buffer[:at]
        self._buffer = self._buffer[at + len(tag) :]
        return tag, text

    def _take_until(self, tags: Sequence[str]) -> tuple[str | None, str]:
        """Like `_find`, but without a tag gives all text that cannot be the beginning of one."""
        tag, text = self._find(tags)
        if tag is not None:
            return tag, text
        keep = _open_suffix(self._buffer, tags)
        text = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return None, text

    def _first(self, tags: Iterable[str]) -> tuple[int, str | None]:
        best: tuple[int, str | None] = (-1, None)
        for tag in tags:
            at = self._buffer.find(tag)
            if at >= 0 and (best[1] is None or at < best[0]):
                best = (at, tag)
        return best


def _open_suffix(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `tags`."""
    for length in range(min(max(map(len, tags)) - 1, len(text)), 0, -1):
        tail = text[len(text) - length :]
        if any(tag.startswith(tail) for tag in tags):
            return length
    return 0


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
