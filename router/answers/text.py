"""One choice's tokens to text deltas: detokenise, cut at stop strings, keep count. The same path for stream or not."""

import dataclasses

from headrace.messages import TokenLogprob
from headrace.router.base import NewTokens
from headrace.router.tokens.detokenize import Detokenizer, StopMatcher
from headrace.router.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a client wants the text of an answer."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer; the last token is left out of the text when it is one of them."""
    min_tokens: int = 0
    """Stop strings do not count before that many tokens."""
    skip_special: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token with its logprobs, as APIs report them."""

    token: int
    logprob: TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    parts: tuple[str, ...]
    """What each of `tokens` tokens made visible (text that was held back comes with a later one); without tokens, what
    the end of the answer released."""
    ids: tuple[int, ...]
    """The tokens generated since the last delta, also those that show no text (end of sequence, stop string)."""
    logprobs: tuple[TokenInfo, ...]
    finish_reason: str | None
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class AnswerText:
    """Feed `NewTokens`, get `TextDelta`s. After a delta with a finish reason everything further is ignored: the caller
    cancels the sequence when that reason came from a stop string."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=rules.skip_special)
        self._rules = rules
        self._matcher = StopMatcher(rules.stop)
        self.tokens = 0
        self.finish_reason: str | None = None

    def feed(self, new: NewTokens) -> TextDelta:
        if self.finish_reason is not None:
            return TextDelta((), (), (), None)
        parts: list[str] = []
        infos: list[TokenInfo] = []
        before = self.tokens
        last = len(new.tokens) - 1
        for i, token in enumerate(new.tokens):
            self.tokens += 1
            if new.logprobs:
                infos.append(TokenInfo(token, new.logprobs[i]))
            ends = i == last and new.finish_reason is not None
            if ends and new.finish_reason == "stop" and token in self._rules.stop_token_ids:
                parts.append("")
                continue
            parts.append(self._visible(self._detokenizer.push(token)))
            if self._matcher.matched is not None:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and new.finish_reason is not None:
            tail = self._visible(self._detokenizer.flush())
            self.finish_reason = new.finish_reason if self._matcher.matched is None else "stop"
            tail += self._matcher.flush()
            parts[-1:] = [parts[-1] + tail] if parts else [tail]
        ids = new.tokens[: self.tokens - before]
        return TextDelta(tuple(parts), ids, tuple(infos), self.finish_reason, self._matcher.matched)

    def _visible(self, text: str) -> str:
        if self.tokens < self._rules.min_tokens:
            return text
        return self._matcher.push(text)
