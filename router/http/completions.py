"""POST /v1/completions."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError, InputError
from headrace.router.answers.grammar import grammar_of
from headrace.router.answers.text import TextDelta
from headrace.router.generation import Generation
from headrace.router.http.errors import openai_error
from headrace.router.http.recall import Answers, Prompt
from headrace.router.http.schemas import MAX_CHOICES, CompletionRequest
from headrace.router.http.service import Service
from headrace.router.http.serving import serve
from headrace.router.http.sse import DONE, event
from headrace.router.http.structure import format_text, guided_text
from headrace.router.http.usage import CompletionLogprobs, openai_usage

MAX_SCORED_TOKENS = 8192
"""Longest prompt whose own tokens are scored: each takes a row of logits."""


async def create_completion(service: Service, request: Request) -> Response:
    tenant, raw = await service.read(request)
    with contextlib.ExitStack() as place:
        place.enter_context(service.admitted(tenant))
        fields = service.fields(CompletionRequest, raw)
        service.check_model(fields.model)
        _refuse_unsupported(fields)
        text = format_text(fields.response_format, "response_format") or guided_text(fields)
        prompts = await service.recall.prompts(tenant, lambda prompt: _prompts(service, fields, prompt))
        if len(prompts) * (fields.n or 1) > MAX_CHOICES:
            raise InputError(f"{len(prompts)} prompts with n {fields.n} are more than {MAX_CHOICES} choices", "n")
        top = -1 if fields.logprobs is None else fields.logprobs
        if fields.echo and top >= 0:
            _check_scored(prompts)
        generation = service.generation(
            request,
            tenant=tenant,
            fields=fields,
            prompts=prompts,
            top_logprobs=top,
            prefix="cmpl",
            grammar=await service.grammar(grammar_of(text, None, in_reasoning=False)),
            prompt_logprobs=top if fields.echo else -1,
        )
        shape = CompletionShape(service, generation, fields, prompts)
        return await serve(service, request, generation, shape, stream=bool(fields.stream), place=place.pop_all())


def _refuse_unsupported(fields: CompletionRequest) -> None:
    if fields.suffix:
        raise InputError("suffix is not supported", "suffix")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InputError("best_of is only supported equal to n", "best_of")
    if fields.max_tokens == 0 and not fields.echo:
        raise InputError("max_tokens: 0 is only for an echo", "max_tokens")


def _check_scored(prompts: Sequence[Prompt]) -> None:
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest > MAX_SCORED_TOKENS:
        raise InputError(f"echo with logprobs: {longest} prompt tokens, at most {MAX_SCORED_TOKENS} are scored", "echo")


def _prompts(service: Service, fields: CompletionRequest, prompt_of: Callable[[str], Prompt]) -> list[Prompt]:
    """Each prompt. Runs in a worker thread. Raises InputError."""
    prompt = fields.prompt
    if isinstance(prompt, str):
        return [prompt_of(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InputError(
            "prompt: expected a string, a list of strings, a list of token ids or a list of such lists", "prompt"
        )
    if all(type(item) is int for item in prompt):
        service.check_ids(prompt, "prompt")
        return [Prompt(prompt)]
    if len(prompt) > MAX_CHOICES:
        raise InputError(f"prompt: {len(prompt)} prompts, at most {MAX_CHOICES} are taken", "prompt")
    found = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            found.append(prompt_of(item))
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            service.check_ids(item, f"prompt[{i}]")
            found.append(Prompt(item))
        else:
            raise InputError(f"prompt[{i}]: expected a string or a list of token ids", f"prompt[{i}]")
    return found


class CompletionShape:
    """Implements serving.Shape."""

    def __init__(
        self, service: Service, generation: Generation, fields: CompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        tokenizer = service.model.tokenizer
        self._generation = generation
        self._usage_wanted = fields.stream_options is not None and fields.stream_options.include_usage
        self._head = {
            "id": generation.spec.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.system_fingerprint,
        }
        n = generation.spec.n
        self._answers = Answers(
            service.recall,
            [prompts[i // n] for i in range(generation.choices)],
            generation.spec.rules.stop_token_ids,
            self._written,
        )
        self._texts = [""] * generation.choices
        """As in the choices, without the echo."""
        self._echoes = [
            tokenizer.decode(generation.spec.prompts[i // n], skip_special=False) if fields.echo else ""
            for i in range(generation.choices)
        ]
        self._logprobs = (
            None if fields.logprobs is None else [CompletionLogprobs(tokenizer, 0) for _ in range(generation.choices)]
        )
        self._ids = bool(fields.return_token_ids)
        self._unscored = set(range(generation.choices)) if fields.echo and self._logprobs is not None else set()
        self._echo_only = fields.max_tokens == 0
        self._choices: list[dict[str, Any]] = [
            {"index": i, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
            for i in range(generation.choices)
        ]

    def start(self) -> Iterable[bytes]:
        return ()

    def _scores(self, index: int, delta: TextDelta) -> dict[str, list[Any]] | None:
        """Logprobs of a delta; before the first one those of the echoed prompt."""
        if self._logprobs is None:
            return None
        logprobs, own = self._logprobs[index], () if self._echo_only else delta.logprobs
        if index not in self._unscored:
            return logprobs.take(own)
        self._unscored.discard(index)
        number = index // self._generation.spec.n
        found = logprobs.prompt(self._generation.spec.prompts[number], self._generation.prompt_logprobs[number])
        return {key: values + more for (key, values), more in zip(found.items(), logprobs.take(own).values())}

    def feed(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        if self._echo_only:
            delta = dataclasses.replace(delta, parts=(), ids=())
            self._generation.usage.completion_tokens = 0
        part = {
            "index": index,
            "text": self._echoes[index] + delta.text,
            "logprobs": self._scores(index, delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop,
        }
        self._echoes[index] = ""
        self._texts[index] += delta.text
        self._answers.take(index, delta)
        if self._ids:
            part["token_ids"] = list(delta.ids)
            if "token_ids" not in self._choices[index]:
                part["prompt_token_ids"] = list(self._generation.spec.prompts[index // self._generation.spec.n])
        _merge(self._choices[index], part)
        if not (part["text"] or delta.finish_reason or delta.logprobs or part.get("token_ids")):
            return ()
        usage = {"usage": None} if self._usage_wanted else {}
        return (event({**self._head, "choices": [part], **usage}),)

    def _written(self, index: int) -> Callable[[], str]:
        text = self._texts[index]
        return lambda: text

    def over(self) -> None:
        self._answers.close()

    def end(self) -> Iterable[bytes]:
        if not self._usage_wanted:
            return (DONE,)
        return (event({**self._head, "choices": [], "usage": openai_usage(self._generation.usage)}), DONE)

    def failure(self, error: HeadraceError) -> Iterable[bytes]:
        return (event(openai_error(error)),)

    def body(self) -> dict[str, Any]:
        return {**self._head, "choices": self._choices, "usage": openai_usage(self._generation.usage)}


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a streamed part to the whole choice: the two forms cannot disagree, since one is made of the other."""
    whole["text"] += part["text"]
    whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
    if "token_ids" in part:
        whole["token_ids"] = whole.get("token_ids", []) + part["token_ids"]
        whole.setdefault("prompt_token_ids", part.get("prompt_token_ids"))
    if part["logprobs"] is not None:
        if whole["logprobs"] is None:
            whole["logprobs"] = {key: [] for key in part["logprobs"]}
        for key, values in part["logprobs"].items():
            whole["logprobs"][key].extend(values)
