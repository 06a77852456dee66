"""Counts and logprobs in the words of the OpenAI API."""

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.messages import TokenLogprob
from headrace.router.answers.text import TokenInfo
from headrace.router.generation import Usage
from headrace.router.tokens.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""JSON has no -inf."""


def openai_usage(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_by_tier": dict(usage.cached_by_tier),
        },
    }
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def chat_logprobs(tokenizer: Tokenizer, infos: Iterable[TokenInfo]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    return [
        {
            **_entry(tokenizer, info.token, info.logprob.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in info.logprob.top],
        }
        for info in infos
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.bytes_of(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


class CompletionLogprobs:
    """`logprobs` of a completions choice; `offset` grows over the deltas of a stream."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Of an echoed prompt: the first token has none."""
        first = self._tokenizer.bytes_of(ids[0]).decode("utf-8", "replace")
        found: dict[str, list[Any]] = {
            "tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [self._offset]
        }  # fmt: skip
        self._offset += len(first)
        rest = self.take(TokenInfo(token, logprob) for token, logprob in zip(ids[1:], logprobs))
        return {key: values + rest[key] for key, values in found.items()}

    def take(self, infos: Iterable[TokenInfo]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for info in infos:
            text = self._tokenizer.bytes_of(info.token).decode("utf-8", "replace")
            found["tokens"].append(text)
            found["token_logprobs"].append(max(info.logprob.logprob, LEAST_LOGPROB))
            top = {
                self._tokenizer.bytes_of(token).decode("utf-8", "replace"): max(value, LEAST_LOGPROB)
                for token, value in info.logprob.top
            }
            found["top_logprobs"].append(top or None)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found
