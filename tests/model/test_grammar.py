"""Grammars: answers match them whatever the logits and drafts are, and drafts never change an answer."""

import json

import jsonschema
import pytest
import tokenizers
import torch

from headrace.errors import EngineError, InputError
from headrace.messages import SamplingParams
from headrace.model.grammar import Grammars
from headrace.model.nano import checkpoint_path
from headrace.model.sampler import SamplerState, verify

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON = f"start: out\nout: %json {json.dumps(SCHEMA)}"
CHOICE = 'start: "red" | "green" | "blue"'
EOS = (3776, 3783, 3785)


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(library: tokenizers.Tokenizer) -> Grammars:
    return Grammars(checkpoint_path(), library.get_vocab_size() + 12, EOS)


def params(grammar: str, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "stop_token_ids": EOS, "grammar": grammar, "seed": 3} | fields)  # type: ignore[arg-type]


def row(grammars: Grammars, position: int, seed: int) -> torch.Tensor:
    """The logits at a position of the answer: noise that favours no token, alike for every draft."""
    return torch.randn(grammars.vocabulary, generator=torch.Generator().manual_seed(seed * 1000 + position)) * 3


def answer(grammars: Grammars, grammar: str, seed: int, drafts: int, **fields: object) -> tuple[list[int], str]:
    """Generate with `drafts` proposals a step; every other one is what will be drawn, the others are noise."""
    state = SamplerState(params(grammar, **fields))
    state.bind(grammars)
    out: list[int] = []
    while True:
        here = len(out)
        proposed = [(here * 7 + j * 31) % 3000 for j in range(drafts)]
        ahead = SamplerState(params(grammar, **fields), here, out)
        ahead.bind(grammars)
        for j in range(0, drafts, 2):
            proposed[j] = ahead.draw(row(grammars, here + j, seed))[0]
            if ahead.commit(proposed[j]) is not None:
                break
        proposed = proposed[: state.possible(proposed)]
        logits = torch.stack([row(grammars, here + j, seed) for j in range(len(proposed) + 1)])
        done = verify(state, logits, proposed)
        out += done.tokens
        if done.finish_reason is not None:
            return out, done.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_noise_becomes_json_of_the_schema(grammars, library, seed, temperature) -> None:
    tokens, reason = answer(grammars, JSON, seed, 0, temperature=temperature)
    assert reason == "stop"
    jsonschema.validate(json.loads(library.decode(tokens)), SCHEMA)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("grammar", [JSON, CHOICE, "start: /[a-c]{3,40}x/"])
def test_drafts_do_not_change_the_answer(grammars, grammar, seed) -> None:
    plain = answer(grammars, grammar, seed, 0)
    for drafts in (1, 4):
        assert answer(grammars, grammar, seed, drafts) == plain


def test_an_answer_ends_where_nothing_may_follow_even_without_an_end_token(grammars, library) -> None:
    tokens, reason = answer(grammars, CHOICE, 1, 2, stop_token_ids=(), min_tokens=50)
    assert (library.decode(tokens) in ("red", "green", "blue"), reason) == (True, "stop")


def test_what_was_drawn_before_counts(grammars, library) -> None:
    before = library.encode("gre").ids
    state = SamplerState(params(CHOICE), len(before), before)
    state.bind(grammars)
    while state.commit(token := state.draw(torch.randn(grammars.vocabulary))[0]) is None:
        before.append(token)
    assert library.decode([*before, token]) == "green"


def test_a_draft_is_the_best_allowed_one_and_leaves_no_trace(grammars, library) -> None:
    state = SamplerState(params(CHOICE))
    state.bind(grammars)
    logits = torch.zeros(grammars.vocabulary)
    logits[library.encode("zoo").ids[0]] = 9.0
    first = state.draft(logits, [])
    assert library.decode([first])[:1] in "rgb"
    assert state.draft(logits, [first]) == state.draft(logits, [first])
    assert state.possible([library.encode("zoo").ids[0]]) == 0
    assert state.draw(logits)[0] == state.draw(logits)[0]


def test_free_text_before_a_token_holds_neither_end_nor_calls(grammars, library) -> None:
    matcher = grammars.matcher('start: TEXT </think> out\nTEXT: /(.|\\n)*/\nout: "ok"')
    allowed = matcher.allowed()
    names = {name: library.token_to_id(name) for name in ("</think>", "<tool_call>", "<|user|>")}
    assert [bool(allowed[i]) for i in names.values()] == [True, False, False]
    assert not allowed[list(EOS)].any()


def test_what_does_not_compile_is_the_clients_mistake(grammars) -> None:
    for wrong in ('start: out\nout: %json {"type": "nothing"}', "start: /(a/", "start: missing", "x" * 300_000):
        with pytest.raises(InputError, match="grammar"):
            grammars.matcher(wrong)


def test_a_token_outside_the_grammar_is_an_error_not_a_hole(grammars, library) -> None:
    matcher = grammars.matcher(CHOICE)
    with pytest.raises(EngineError):
        matcher.advance(library.encode("zoo").ids[0])
    state = SamplerState(params(CHOICE))
    with pytest.raises(EngineError, match="before its grammar"):
        state.draw(torch.zeros(grammars.vocabulary))
    with pytest.raises(InputError, match="tokenizer"):
        state.bind(None)
