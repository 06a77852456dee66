"""Tokens to text deltas: stop tokens, stop strings over step borders, counts and logprobs."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.messages import TokenLogprob
from headrace.model.nano import checkpoint_path
from headrace.router.answers.text import AnswerText, TextDelta, TextRules
from headrace.router.base import NewTokens
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
EOS = 3776


def run(steps: list[list[int]], rules: TextRules, finish: str | None = "length") -> list[TextDelta]:
    answer = AnswerText(TOKENIZER, rules)
    deltas = []
    for i, tokens in enumerate(steps):
        logprobs = tuple(TokenLogprob(logprob=-1.0) for _ in tokens)
        delta = answer.feed(NewTokens(tuple(tokens), logprobs, finish if i == len(steps) - 1 else None))
        deltas.append(delta)
        if delta.finish_reason is not None:
            break
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_the_stop_token_counts_but_is_not_shown() -> None:
    ids = TOKENIZER.encode("all good")
    rules = TextRules(stop_token_ids=(EOS, ids[0]), skip_special=False)
    deltas = run([ids, [EOS]], rules, finish="stop")
    assert text_of(deltas) == "all good"
    assert sum(d.tokens for d in deltas) == len(ids) + 1
    assert deltas[-1].finish_reason == "stop"
    assert sum(len(d.logprobs) for d in deltas) == len(ids) + 1


def test_a_stop_string_spans_tokens_and_steps() -> None:
    ids = TOKENIZER.encode("value = 1 END and more text")
    deltas = run([[i] for i in ids], TextRules(stop=(" END",)))
    assert text_of(deltas) == "value = 1"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop == " END"
    assert sum(d.tokens for d in deltas) < len(ids)


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = TOKENIZER.encode("a b a b a b")
    late = run([[i] for i in ids], TextRules(stop=("b",), min_tokens=len(ids) - 1))
    assert text_of(late).count("b") == 2


@given(st.lists(st.sampled_from(TOKENIZER.encode("x STOP é日 STO\nP")), max_size=30), st.lists(st.integers(1, 4)))
def test_steps_do_not_matter(ids: list[int], sizes: list[int]) -> None:
    rules = TextRules(stop=("STOP", "日"))
    steps, at = [], 0
    for size in sizes:
        steps.append(ids[at : at + size])
        at += size
    steps.append(ids[at:])
    cut, single = run(steps, rules), run([[i] for i in ids] + [[]], rules)
    assert text_of(cut) == text_of(single)
    assert sum(d.tokens for d in cut) == sum(d.tokens for d in single)
    assert cut[-1].finish_reason == single[-1].finish_reason
