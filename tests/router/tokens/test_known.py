"""Known texts: exact without generated ids, generated ids come back, bounded, tenants apart, cheap."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.ids import Namespace
from headrace.kvstore.names import NameChain, namespace, token_bytes
from headrace.model.nano import checkpoint_path
from headrace.router.tokens.known import ENTRY_BYTES, KnownTexts, spelled
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(checkpoint_path())
TEMPLATE = ChatTemplate(checkpoint_path())
MIB = 1 << 20
PIECES = st.sampled_from(
    ["<|user|>", "<|assistant|>", "<think>", "</think>", "<|observation|>", "hello", " world", "\n\n", " ", "日本", "é",
     "<|", "|>", "<thi", "nk>", "[gMASK]", "12345", "don't", "  x", "👩‍👧", "a", "b", "/nothink"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def letters(text: str) -> list[int]:
    """Ids that spell `text` byte by byte: never how the tokenizer would write a word."""
    return [TOKENIZER.encode(char)[0] for char in text]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 50), TEXTS), min_size=1, max_size=12))
def test_without_answers_the_ids_are_those_of_the_whole_text(steps: list[tuple[int, str]]) -> None:
    known, told = KnownTexts(TOKENIZER, MIB), [""]
    for number, more in steps:
        text = told[number % len(told)] + more
        told.append(text)
        assert list(known.encode(b"t", text)[0]) == TOKENIZER.encode(text)


@settings(max_examples=200)
@given(st.text(max_size=60), st.text(max_size=60))
def test_a_border_is_a_place_where_tokenising_apart_is_exact(left: str, right: str) -> None:
    for middle in ("<|user|>", "</think>", "<think>"):
        whole = left + middle + right
        for at in (len(left), len(left) + len(middle)):
            assert TOKENIZER.is_border(whole, at)
            assert TOKENIZER.encode(whole[:at]) + TOKENIZER.encode(whole[at:]) == TOKENIZER.encode(whole)


@settings(max_examples=150)
@given(st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 3775), max_size=80)), min_size=1, max_size=5))
def test_generated_ids_come_back_turn_after_turn(turns: list[tuple[str, list[int]]]) -> None:
    known, text = KnownTexts(TOKENIZER, MIB), "[gMASK]<sop>"
    root = namespace(b"f" * 32, b"t")
    before: list[bytes] = []
    for question, answer in turns:
        text += f"<|user|>{question}<|assistant|><think></think>"
        ids, entry = known.encode(b"t", text)
        assert TOKENIZER.decode(ids, skip_special=False) == text
        chain = NameChain(root)
        chain.extend(token_bytes(ids))
        assert list(chain.names)[: len(before)] == before
        said = TOKENIZER.decode(answer, skip_special=False)
        assert entry is not None
        shown, own = spelled(TOKENIZER, answer, said + "<|user|>")
        if "\ufffd" not in said:
            assert (shown, own) == (said, answer)
        known.extend(entry, text + shown, own)
        if shown == said:
            chain.extend(token_bytes(answer))
            before = list(chain.names)
        text += said


def test_an_answer_that_is_cut_otherwise_is_spliced_in() -> None:
    known = KnownTexts(TOKENIZER, MIB)
    prompt = "<|user|>hi<|assistant|><think></think>"
    ids, entry = known.encode(b"t", prompt)
    ids = list(ids)
    own = letters("hello world, hello again")
    assert own != TOKENIZER.encode("hello world, hello again")
    assert entry is not None
    known.extend(entry, prompt + "hello world, hello again", own)
    follow = prompt + "hello world, hello again<|user|>and?"
    assert list(known.encode(b"t", follow)[0]) == ids + own + TOKENIZER.encode("<|user|>and?")
    glued = prompt + "hello world, hello against"
    assert list(known.encode(b"t", glued)[0]) == TOKENIZER.encode(glued)
    assert list(known.encode(b"other", follow)[0]) == TOKENIZER.encode(follow)


@pytest.mark.parametrize(
    ("tokens", "text", "shown", "own"),
    [
        (["he", "llo"], "hello", "hello", ["he", "llo"]),
        (["he", "llo", " ", "\n"], "hello<|user|>", "hello", ["he", "llo"]),
        (["he", "ll", "o "], "hello<|user|>", "hello", ["he", "ll", "o"]),
        (["he", "ll", "o ST"], "hello ", "hello ", ["he", "ll", "o", " "]),
        (["he", "llo"], "help", "", []),
        (["a", "</think>", "he", "llo"], "a</think>help", "a</think>", ["a", "</think>"]),
        (["he", "llo"], "", "", []),
        (["he", "llo", "<|user|>"], "hello", "hello", ["he", "llo"]),
    ],
)
def test_only_what_is_shown_is_taken(tokens: list[str], text: str, shown: str, own: list[str]) -> None:
    ids = [token for piece in tokens for token in TOKENIZER.encode(piece)]
    expected = [token for piece in own for token in TOKENIZER.encode(piece)]
    assert spelled(TOKENIZER, ids, text) == (shown, expected)


def test_half_a_character_is_never_taken() -> None:
    byte = next(i for i in range(TOKENIZER.size) if TOKENIZER.bytes_of(i) == "日".encode()[:1])
    assert spelled(TOKENIZER, [byte], "日<|user|>") == ("", [])
    assert spelled(TOKENIZER, [*letters("</think>a"), 3798, byte], "</think>a</think>日") == (
        "</think>a</think>",
        [*letters("</think>a"), 3798],
    )


def test_ids_that_spell_something_else_are_not_kept() -> None:
    known = KnownTexts(TOKENIZER, MIB)
    _, entry = known.encode(b"t", "<|user|>")
    assert entry is not None
    assert known.extend(entry, "<|user|>hello", TOKENIZER.encode("help")) is None
    with pytest.raises(InputError):
        known.encode(b"t", "<|user|>x\ud800")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_bound_holds_and_the_oldest_go_first(seed: int) -> None:
    rng, limit = random.Random(seed), 24 * ENTRY_BYTES
    known = KnownTexts(TOKENIZER, limit)
    texts = ["<sop>"]
    for _ in range(120):
        text = rng.choice(texts[-8:]) + f"<|user|>{rng.randrange(1000)} " * rng.randrange(1, 20)
        ids, entry = known.encode(rng.choice([b"a", b"b"]), text)
        assert list(ids) == TOKENIZER.encode(text)
        assert known.held_bytes <= limit
        held = known._entries
        assert known.held_bytes == sum(e.size for e in held.values())
        assert all(e.parent is None or held.get(e.parent.key) is e.parent for e in held.values())
        assert sum(sum(c.values()) for c in known._lengths.values()) == len(held)
        if entry is not None:
            texts.append(text[:600])
    assert len(known._entries) > 5


def test_nothing_is_kept_when_it_is_off() -> None:
    known = KnownTexts(TOKENIZER, 0)
    ids, entry = known.encode(b"t", "<|user|>hi")
    assert (list(ids), entry) == (TOKENIZER.encode("<|user|>hi"), None)
    assert known.held_bytes == 0


def test_a_long_conversation_costs_little() -> None:
    known, rng = KnownTexts(TOKENIZER, 64 * MIB), random.Random(1)
    for number in range(2000):
        known.encode(b"t", f"<|user|>{'other ' * (number % 500)}{number}<|assistant|>")
    text = "[gMASK]<sop>"
    while len(text) < 500_000:
        text += "<|user|>" + " ".join(rng.choice(["alpha", "beta", "return x", "日本"]) for _ in range(400))
    started = time.perf_counter()
    known.encode(b"t", text)
    whole = time.perf_counter() - started
    best = 1.0
    for number in range(5):
        started = time.perf_counter()
        ids, _ = known.encode(b"t", f"{text}<|assistant|><think></think>{number}<|user|>go on")
        best = min(best, time.perf_counter() - started)
    print(f"500 KB: {whole * 1e3:.1f} ms tokenised whole, {best * 1e3:.2f} ms known, {len(ids)} tokens")
    assert best < 0.05, "the measured figure is in router/README.md; this bound only catches a lost shortcut"
    assert best < whole / 4


def test_names_of_an_entry_are_those_of_its_tokens_and_are_hashed_once() -> None:
    known = KnownTexts(TOKENIZER, 1 << 24)
    rng, text = random.Random(4), "<sop>"
    for turn in range(12):
        text += f"<|user|>{' word' * rng.randrange(1, 300)} {turn}"
        ids, entry = known.encode(b"t", text)
        for root in (Namespace(b"r" * 32), Namespace(b"s" * 32), Namespace(b"s" * 32)):
            plain = NameChain(root)
            plain.extend(ids)
            chain = entry.name_chain(root)
            assert (chain.names, chain.rest) == (plain.names, plain.rest)
        assert entry.root == Namespace(b"s" * 32)
