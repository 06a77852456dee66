"""Answers that must match a grammar: which tokens may come next. No torch: routers check grammars with the same code.

A grammar is a text in llguidance's Lark dialect; JSON schemas stand in it as `%json {...}`, added tokens by their own
name (`<tool_call>`). A matcher only ever takes tokens that were drawn, one after the other, so rejected drafts leave
nothing to undo; looking ahead over drafts is undone at once.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from headrace.errors import CheckpointError, EngineError, InputError

KEPT_GRAMMARS = 256
"""Compiled grammars a process keeps, least recently used ones go."""
LARGEST_GRAMMAR = 256 << 10
"""Characters of a grammar; larger ones are refused."""


class Grammars:
    """All grammars of one process over one tokenizer. Thread-safe."""

    def __init__(self, folder: Path | str, vocabulary: int, eos_ids: Sequence[int]) -> None:
        """`vocabulary`: columns of the logits. Raises CheckpointError when the folder has no usable tokenizer.json."""
        file = Path(folder) / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocabulary, eos_token=list(eos_ids))
        except Exception as error:
            raise CheckpointError(f"{file}: no grammars over this tokenizer: {error}") from error
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> "Matcher":
        """A fresh matcher. Raises InputError for a grammar that does not compile."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
        return Matcher(found.deep_copy(), self.vocabulary)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if len(grammar) > LARGEST_GRAMMAR:
            raise InputError(f"the grammar has {len(grammar)} characters, at most {LARGEST_GRAMMAR} are taken")
        made = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        if made.is_error():
            raise InputError(f"not a usable grammar: {_short(made.get_error())}")
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return made


class Matcher:
    """Where one answer stands in its grammar. Not thread-safe."""

    def __init__(self, inner: llguidance.LLMatcher, vocabulary: int) -> None:
        self._inner = inner
        self._bits = np.zeros(-(-vocabulary // 32), dtype=np.int32)
        self._vocabulary = vocabulary

    @property
    def finished(self) -> bool:
        """Nothing may follow."""
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    @property
    def accepting(self) -> bool:
        """The answer may end here."""
        return bool(self._inner.is_accepting())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [V]: tokens that may come next; end-of-sequence ids only where the answer may end. Raises EngineError
        when the grammar is too complex to go on."""
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocabulary)
        return bits.view(np.bool_)

    def advance(self, token: int) -> None:
        """Raises EngineError when the token may not come next."""
        self._inner.consume_token(token)
        self._check()

    def possible(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may come next, in this order."""
        return int(self._inner.validate_tokens(list(tokens))) if tokens else 0

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """`allowed` as it would be after `tokens`; None when they may not come or nothing may follow them."""
        taken = self._inner.try_consume_tokens(list(tokens))
        try:
            return self.allowed() if taken == len(tokens) and not self.finished else None
        finally:
            self._inner.rollback(taken)

    def _check(self) -> None:
        if self._inner.is_error():
            raise EngineError(f"the answer's grammar failed: {_short(self._inner.get_error())}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
