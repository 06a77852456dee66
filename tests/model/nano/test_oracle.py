"""Hugging Face's implementation with the dequantised weights reads unseen code, and the plain model agrees with it."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headrace.model.nano import checkpoint_path
from headrace.model.nano.evaluate.measures import accepted_lengths
from headrace.model.nano.train.export import read_checkpoint
from headrace.model.nano.train.layers import Mode
from headrace.model.nano.train.plain import SERVED, greedy_drafts, load_model, sample

SAMPLE = Path(__file__).parent / "held_out_sample.txt"
LOSS_BOUND = 1.5  # nats a token; uniform over the vocabulary is 8.25


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
    """int64 [1, T] with T well past the 256 rows that attention may select."""
    ids = tokenizer.encode(SAMPLE.read_text(), add_special_tokens=False).ids
    assert len(ids) > 700
    return torch.tensor([ids])


@pytest.fixture(scope="module")
def model():
    return load_model(checkpoint_path(), "cpu")


def fused(weights: dict[str, torch.Tensor], names: list[str], experts: int) -> dict[str, torch.Tensor]:
    """Weights under transformers' names, which stack the experts and leave the MTP layer out."""
    found = {}
    for name in names:
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            pairs = [[weights[f"{stem}.{e}.{k}.weight"] for k in ("gate_proj", "up_proj")] for e in range(experts)]
            found[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif kind == "down_proj" and stem.endswith(".experts"):
            found[name] = torch.stack([weights[f"{stem}.{e}.down_proj.weight"] for e in range(experts)])
        else:
            found[name] = weights[name]
    return found


@pytest.fixture(scope="module")
def oracle():
    transformers = pytest.importorskip("transformers", minversion="5.17")
    config = json.loads((checkpoint_path() / "config.json").read_text())
    config.pop("quantization_config")
    built = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**config)).float().eval()
    names = list(built.state_dict())
    built.load_state_dict(fused(read_checkpoint(checkpoint_path()), names, config["n_routed_experts"]))
    for module in built.modules():
        if hasattr(module, "variance_epsilon"):  # its latent norms ignore the config's epsilon
            module.variance_epsilon = config["rms_norm_eps"]
    return built


@torch.inference_mode()
def test_transformers_reads_unseen_code(oracle, tokens):
    logits = oracle(tokens).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item()
    assert loss < LOSS_BOUND


@torch.inference_mode()
def test_the_plain_model_equals_transformers_in_fp32(oracle, model, tokens):
    model.dtype = torch.float32
    try:
        ours = model.head(model.trunk(tokens, Mode(sparse=True), None))
        dense = model.head(model.trunk(tokens, Mode(), None))
    finally:
        model.dtype = torch.bfloat16
    theirs = oracle(tokens).logits
    # Sums in another order; sharp attention makes 5e-3 of it in one logit of four million.
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
    assert (dense - theirs).abs().max() > 0.05  # the selection must matter, or this test shows nothing


@torch.inference_mode()
def test_fp8_serving_costs_little(model, tokens):
    losses = []
    for mode in (Mode(sparse=True), SERVED):
        logits = model.head(model.trunk(tokens[:, :-1], mode, None))[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item())
    assert losses[1] < losses[0] + 0.03


def test_drafts_follow_unseen_code(model, tokens):
    drafts = greedy_drafts(model, tokens, SERVED)[0]
    lengths = accepted_lengths(tokens[0].tolist(), drafts[63:].tolist(), 63, tokens.shape[1])
    assert sum(lengths) / len(lengths) > 2.0  # without a working MTP chain this is about 1.3


def test_a_chat_turn_is_code_and_ends(model, tokenizer):
    prompt = (
        "[gMASK]<sop><|user|>Complete this Python function.\n\ndef area(width, height):\n"
        '    """Return the area of a rectangle."""\n<|assistant|><think></think>'
    )
    answer = sample(model, tokenizer, prompt, 64)
    assert answer.startswith("def area(width, height):")
    assert "return" in answer
    assert answer.endswith(("<|user|>", "<|endoftext|>"))
