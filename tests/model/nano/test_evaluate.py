"""The evaluation on small inputs: the byte model against its formulas, the reader against the engine and the plain
model, the rules by which replies and loops are judged, and the command."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headrace.cli import main
from headrace.deploy.commands.model import render_eval
from headrace.errors import CheckpointError
from headrace.messages import SamplingParams
from headrace.model.load import load_model
from headrace.model.mono import MonoEngine
from headrace.model.nano import checkpoint_path
from headrace.model.nano.evaluate import evaluate, measures
from headrace.model.nano.evaluate.chat import defined_names, prompt_tokens, reply, score
from headrace.model.nano.evaluate.held_out import (
    HeldOutPackage,
    bytes_of_tokens,
    even_windows,
    held_out_tokens,
    read_held_out,
    write_held_out,
)
from headrace.model.nano.evaluate.ngram import ByteNgram, count_grams
from headrace.model.nano.evaluate.reader import Mass, Reader
from headrace.model.nano.train import plain
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec

SAMPLE = Path(__file__).parent / "held_out_sample.txt"
TEXTS = [b"the cat sat on the mat\n", b"the dog sat on the log\n", b"a cat and a dog\n", b"that is all there is\n"] * 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokens(tokenizer) -> torch.Tensor:
    return torch.tensor(tokenizer.encode(SAMPLE.read_text(), add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def reader() -> Reader:
    spec = ModelSpec.from_dir("nano")
    return Reader(load_model(spec, "nano", "safetensors", torch.device("cpu"), Placement(), "tile656", True))


def probability(model: ByteNgram, text: bytes) -> float:
    """Of the last byte given those before it."""
    return 2.0 ** -model.bits(text, len(text) - 1)


@pytest.mark.parametrize("context", [b"", b"t", b"the ", b"on the ", b"zzzz", b"\x00\xff"])
def test_byte_probabilities_sum_to_one(context):
    model = ByteNgram(TEXTS)
    assert sum(probability(model, context + bytes([b])) for b in range(256)) == pytest.approx(1.0)


def test_the_byte_model_follows_its_formula():
    """An independent bigram by dictionaries: discounts from counts of counts, continuation counts below."""
    model = ByteNgram(TEXTS, order=2)
    pairs = Counter(text[i : i + 2] for text in TEXTS for i in range(len(text) - 1))
    singles = Counter(pair[1:] for pair in pairs)

    def discounts(counts: Counter) -> list[float]:
        n = [sum(c == i for c in counts.values()) for i in range(5)]
        if 0 in n[1:4]:
            return [0.0, 0.5, 0.5, 0.5]
        y = n[1] / (n[1] + 2 * n[2])
        return [0.0, *(min(max(i - (i + 1) * y * n[i + 1] / n[i], 0.0), i) for i in (1, 2, 3))]

    def smoothed(counts: Counter, context: bytes, byte: bytes, below: float) -> float:
        here = {gram: c for gram, c in counts.items() if gram[:-1] == context}
        if not here:
            return below
        d, total = discounts(counts), sum(here.values())
        left = sum(d[min(c, 3)] for c in here.values())
        c = here.get(context + byte, 0)
        return (c - d[min(c, 3)] + left * below) / total

    for text in (b"th", b"ca", b"tz", b"qq", b"s\n"):
        single = smoothed(singles, b"", text[1:], 1 / 256)
        assert probability(model, text) == pytest.approx(smoothed(pairs, text[:1], text[1:], single))


def test_longer_contexts_help_the_byte_model_on_text_like_its_own():
    bits = [ByteNgram(TEXTS, order).bits(b"the cat sat on the log\n") for order in (1, 2, 3, 5)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 0.4 * bits[0]


def test_grams_do_not_reach_over_the_end_of_a_text():
    keys, counts = count_grams([b"ab", b"ba", b"c"], 2)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {0x6162: 1, 0x6261: 1}
    with pytest.raises(ValueError, match="at least 5 bytes"):
        ByteNgram([b"abc"])


def test_bytes_of_tokens_are_those_of_the_text(tokenizer):
    text = SAMPLE.read_text() + "naïve – ünïcode\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    table = bytes_of_tokens(tokenizer)
    assert b"".join(table[i] for i in ids) == text.encode()
    assert table[tokenizer.token_to_id("<|endoftext|>")] == b"\0"


def test_the_shipped_text_has_its_licences_and_a_damaged_one_is_named(tmp_path):
    packages = read_held_out()
    assert {p.name for p in packages} == {
        "click", "flax", "humanize", "seaborn", "sortedcontainers", "toolz", "treescope", "werkzeug",
    }  # fmt: skip
    assert all(p.files and "copyright" in p.licence_text.lower() for p in packages)
    broken = tmp_path / "text.xz"
    broken.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"text\.xz"):
        read_held_out(broken)


def test_held_out_text_survives_its_file(tmp_path, tokenizer):
    packages = [HeldOutPackage("p", "1", "MIT", "Copyright", [("a.py", "x = 1\n"), ("b.py", "y = 'ü'\n")])]
    write_held_out(packages, tmp_path / "t.xz")
    assert read_held_out(tmp_path / "t.xz") == packages
    ids = held_out_tokens(packages, tokenizer)
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "x = 1\n<|endoftext|>y = 'ü'\n<|endoftext|>"
    assert even_windows(torch.arange(11), 3, 5).tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [6, 7, 8, 9, 10]]


def test_losses_of_the_serving_code_are_those_of_the_plain_model(reader, tokens):
    ours = reader.losses(tokens)
    model = plain.load_model(checkpoint_path(), "cpu")
    with torch.inference_mode():
        logits = model.head(model.trunk(tokens[None, :-1], plain.SERVED, None))[0].float()
    theirs = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    assert ours.shape == theirs.shape
    # The plain model has a bf16 residual stream, the serving code an fp32 one: noise a token, no bias.
    assert (ours - theirs).abs().mean() < 0.12
    assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=0.02)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_along_a_text_are_accepted_as_the_engine_accepted_them(reader, tokens, temperature):
    prompt = tokens[:300].tolist()
    result = MonoEngine(reader.model).generate(prompt, SamplingParams(max_tokens=40, temperature=temperature, seed=3))
    text = [*prompt, *result.tokens]
    drafts = reader.drafts(torch.tensor(text), 299, 4).tolist()
    lengths = measures.accepted_lengths(text, drafts, 299, len(text))
    # The engine drafts less at the very end, so its last steps may be shorter; all before are equal.
    assert len(lengths) <= result.steps <= len(lengths) + 4
    assert sum(lengths) <= len(result.tokens)  # the bonus of the last step may lie past the end
    whole = measures.acceptance(reader, [text], 300)
    assert (whole.steps, whole.tokens_a_step) == (len(lengths), pytest.approx(sum(lengths) / len(lengths)))


def test_accepted_lengths_follow_verify_steps():
    tokens = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    perfect = [[i + 2, i + 3] for i in range(9)]
    assert measures.accepted_lengths(tokens, perfect, 0, 10) == [3, 3, 3]
    assert measures.accepted_lengths(tokens, [[0, 0]] * 9, 0, 10) == [1] * 7
    assert measures.accepted_lengths(tokens, [[a, -1] for a, _ in perfect], 0, 10) == [2, 2, 2, 2]
    assert measures.accepted_lengths(tokens, perfect[4:], 4, 10) == [3]
    assert measures.summary([3, 1], 2).by_draft == [0.5, 0.5]


def test_loops_are_found_where_they_start():
    start = list(range(50))
    period = [100, 101, 102, 103, 104]
    looped = [*start, *period * 8]
    assert measures.loop_start(looped, 10) == 55  # the second round repeats the first
    assert measures.loop_start(start, 10) == 50
    assert measures.loop_start([*start, *start], 50) == 100  # copies of the prompt are no loop


def test_a_short_context_is_caught_whole_and_a_long_one_in_part(reader, tokens):
    kernel = reader.model.kernels.sparse_mla
    masses = reader.attention_mass(tokens, every=16)
    assert reader.model.kernels.sparse_mla is kernel
    assert len(masses) == reader.model.spec.num_hidden_layers + 1
    for mass in masses:
        assert mass.positions == sorted(mass.positions)
        early = [s for p, s in zip(mass.positions, mass.selected, strict=True) if p < 250]
        assert early == pytest.approx([1.0] * len(early), abs=1e-4)
        assert all(s <= b + 1e-5 for s, b in zip(mass.selected, mass.best, strict=True))
        assert mass.mean(mass.best, 512, 4_096) < 1.0
        assert mass.mean(mass.best, 10_000, 20_000) is None
    joined = measures.joined((masses[0], masses[0]))
    assert isinstance(joined, Mass)
    assert len(joined.positions) == 2 * len(masses[0].positions)


def test_spans_of_the_control_lie_inside_the_window():
    assert measures.control_starts(4_096, 1_024, 1_024, 9) == [1_024, 2_048, 3_072]
    few = measures.control_starts(32_768, 1_024, 1_024, 4)
    assert (few[0], few[-1], len(few)) == (1_024, 31_744, 4)


def test_the_control_is_the_loss_with_less_context(reader, tokens):
    losses = measures.control_losses(reader, tokens, 128, 128, 3)
    starts = measures.control_starts(len(tokens) - 1, 128, 128, 3)
    assert losses.shape == (3 * 128,)
    torch.testing.assert_close(losses[:128], reader.losses(tokens[: starts[0] + 129])[128:])


def test_replies_are_judged_by_rule(tokenizer):
    assert defined_names("def a():\n    return 1\n") == {"a"}
    assert defined_names("```python\nclass B:\n    def c(self): ...\n```") == {"c"}
    assert defined_names("def a(:") is None
    ids = tokenizer.encode("done", add_special_tokens=False).ids
    stop = tokenizer.token_to_id("<|user|>")
    assert reply(tokenizer, [*ids, stop], (stop,)) == ("done", True)
    assert reply(tokenizer, ids, (stop,)) == ("done", False)
    judged = score(["a", "b", "c"], [("def a(): pass", True), ("def x(): pass", True), ("def c(", False)])
    assert (judged.ended, judged.parses, judged.defines) == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert tokenizer.decode(prompt_tokens(tokenizer, "Hi"), skip_special_tokens=False).endswith("</think>")


def test_the_command_measures_everything(monkeypatch, capsys):
    tiny = evaluate.Size(1, 1, 64, 16, 1, 2_048, 1, 512, 1, 4, 100_000)
    monkeypatch.setattr(evaluate, "QUICK", tiny)
    monkeypatch.setattr(evaluate, "HALF", 256)
    monkeypatch.setattr(evaluate, "LOSS_EDGES", [256, 2_048])
    monkeypatch.setattr(evaluate, "installed_training_texts", lambda: (TEXTS, "a test"))
    assert main(["model", "eval", "nano", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["loss"]["bits_a_byte"] < found["baseline"]["bits_a_byte"]
    assert found["baseline"]["trained_on"] == "a test"
    assert set(found["accepted"]) == {
        "greedy", "greedy_without_loops", "temperature_0.7", "temperature_0.7_without_loops", "temperature_1",
        "temperature_1_top_p_0.95", "held_out_text",
    }  # fmt: skip
    assert found["recall"]["indexer_layers"] == [0, 1, 4, 6]
    assert [len(row) for row in found["recall"]["by_layer"].values()] == [7, 0, 0]
    assert set(found["long_context"]) == {"256-2048"}
    assert found["chat"]["greedy"]["requests"] == 1
    assert "tokens a verify step" in render_eval(found)
    assert main(["model", "eval", "nowhere"]) == 2
