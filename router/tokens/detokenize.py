"""Token ids to text, one at a time, and the stop strings that cut the text. Pure, one instance per sequence."""

import codecs
from collections.abc import Sequence

from headrace.router.tokens.tokenizer import Tokenizer


class Detokenizer:
    """Incremental: what `push` and `flush` return, joined, equals `Tokenizer.decode` of all ids. Never gives half a
    character: incomplete UTF-8 is held until it is complete, wrong, or `flush`ed."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def flush(self) -> str:
        """End of the sequence: what is still held, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts a text at the first stop string, wherever the borders of its pieces are.

    Text that could still become a stop string is held back, so nothing of a stop string is ever given out. If several
    stop strings end at the same character, the one that starts first wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Give `text`, get what may go out. After a match everything is swallowed."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        cut = self._first_end(window, len(self._held))
        if cut is not None:
            start, self.matched = cut
            self._held = ""
            return window[:start]
        keep = self._longest_open_suffix(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """The text ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_end(self, window: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that is complete first, as a reader character by character would see it."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match must end in the new text, else it would have been found before.
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _longest_open_suffix(self, window: str) -> int:
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[len(window) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
