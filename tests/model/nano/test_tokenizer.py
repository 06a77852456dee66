"""The tokenizer is lossless, splits as GLM's does, and has GLM's added tokens in GLM's order."""

import json

import pytest
from tokenizers import Tokenizer

from headrace.model.nano import checkpoint_path
from headrace.model.nano.train.shape import NanoShape
from headrace.model.nano.train.tokenizer import ADDED_TOKENS, CONTROL_TOKENS, MARKUP_TOKENS

TEXTS = [
    "def f(x):\n\treturn x ** 2  # squared\n",
    "class A:\r\n    pass\r\n",
    "naïve café — 世界 🙂 \u200b\u0301 \x00\x7f",
    "   leading and trailing   \n\n\n",
    "if x!=12345678 and y>=0x1F: raise ValueError(f'{x!r}')",
    "it's we'll THEY'RE",
    "",
    "\n",
    " " * 200 + "x",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_round_trip_is_exact(tokenizer, text):
    assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


def test_every_single_byte_has_an_id(tokenizer):
    for code in range(256):
        text = bytes([code]).decode("latin-1")
        assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


def test_digits_come_in_groups_of_at_most_three(tokenizer):
    tokens = [t for t in tokenizer.encode("x = 1234567890", add_special_tokens=False).tokens if t.strip("Ġ").isdigit()]
    assert "".join(tokens) == "1234567890"
    assert max(map(len, tokens)) <= 3


@pytest.mark.parametrize("token", ADDED_TOKENS)
def test_added_tokens_are_one_id_each_in_order(tokenizer, token):
    expected = NanoShape().base_vocab_size + ADDED_TOKENS.index(token)
    assert ids_of(tokenizer, token) == [expected]
    assert ids_of(tokenizer, f"a{token}b") == [*ids_of(tokenizer, "a"), expected, *ids_of(tokenizer, "b")]


def test_offsets_between_role_tokens_are_those_of_glm(tokenizer):
    base = tokenizer.token_to_id("<|endoftext|>")
    names = ("[gMASK]", "<sop>", "<|user|>", "<|observation|>", "<think>")
    offsets = {name: tokenizer.token_to_id(name) - base for name in names}
    assert offsets == {"[gMASK]": 2, "<sop>": 4, "<|user|>": 7, "<|observation|>": 9, "<think>": 21}


def test_sizes_leave_padding_ids(tokenizer):
    shape = NanoShape()
    assert tokenizer.get_vocab_size() == shape.used_vocab_size < shape.vocab_size
    assert max(tokenizer.get_vocab().values()) == shape.used_vocab_size - 1


def test_skipping_special_tokens_keeps_markup(tokenizer):
    text = "<|assistant|><think>a</think><tool_call>f</tool_call><|user|>"
    kept = tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=True)
    assert kept == "<think>a</think><tool_call>f</tool_call>"
    assert set(CONTROL_TOKENS) & set(MARKUP_TOKENS) == set()


def test_stop_ids_are_the_three_turn_enders(tokenizer):
    config = json.loads((checkpoint_path() / "config.json").read_text())
    names = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert config["eos_token_id"] == [tokenizer.token_to_id(name) for name in names]
    assert config["pad_token_id"] == tokenizer.token_to_id("<|endoftext|>")


def test_code_compresses(tokenizer):
    text = (checkpoint_path().parent / "train" / "model.py").read_text()
    assert len(text.encode()) / len(ids_of(tokenizer, text)) > 2.8


def test_transformers_loads_the_folder():
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(checkpoint_path()))
    assert loaded.eos_token == "<|endoftext|>"
    assert loaded.chat_template
    prompt = loaded.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, enable_thinking=False, add_generation_prompt=True
    )
    assert prompt == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"
