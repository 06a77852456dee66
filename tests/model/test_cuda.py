"""The reference kernels and the mono engine on a GPU: the same code, near the CPU's numbers, deterministic there."""

import math

import pytest
import torch

from headrace.config import load_config
from headrace.messages import SamplingParams
from headrace.model.choose import load_from_config
from headrace.model.mono import Generation, MonoEngine
from headrace.model.spec import ModelSpec

pytestmark = pytest.mark.gpu
PROMPT = [(i * 37 + 5) % 3000 for i in range(300)]  # beyond the nano model's index_topk of 256


def engine(device: str) -> MonoEngine:
    config = load_config(overrides=[f"model.device={device}", "model.deterministic=on"])
    return MonoEngine(load_from_config(config, ModelSpec.from_dir("nano")))


def generate(mono: MonoEngine, prompt: list[int], drafts: int, **params: object) -> Generation:
    sampling = SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | params))  # type: ignore[arg-type]
    return mono.generate(prompt, sampling, drafts)


def test_gpu_probabilities_are_close_to_the_cpu() -> None:
    """Sums in another order flip FP8 roundings of activations; that moves the logits of unlikely tokens by tenths."""
    found = {}
    for device in ("cpu", "cuda"):
        mono = engine(device)
        answer = generate(mono, PROMPT[:200], 0, max_tokens=1, top_logprobs=8)
        found[device] = dict(answer.logprobs[0].top)
    shared = set(found["cpu"]) & set(found["cuda"])
    assert len(shared) >= 7
    assert max(abs(math.exp(found["cpu"][t]) - math.exp(found["cuda"][t])) for t in shared) < 0.05


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 300])
def test_speculation_changes_no_token(length: int) -> None:
    mono = engine("cuda")
    plain = generate(mono, PROMPT[:length], 0)
    assert generate(mono, PROMPT[:length], 4).tokens == plain.tokens


def test_a_chunked_prompt_leaves_the_same_bytes() -> None:
    whole, chunked = engine("cuda"), engine("cuda")
    whole.prefill_chunk, chunked.prefill_chunk = 0, 64
    assert generate(whole, PROMPT, 0).tokens == generate(chunked, PROMPT, 0).tokens
    assert all(whole.slab(block) == chunked.slab(block) for block in range(5))


def test_seeded_sampling_draws_what_the_cpu_draws() -> None:
    """The noise comes from integers, so only logits that nearly tie could differ."""
    drawn = [generate(engine(d), PROMPT[:64], 0, max_tokens=1, temperature=0.8, seed=7).tokens for d in ("cpu", "cuda")]
    assert drawn[0] == drawn[1]


def test_cuda_is_what_is_tested() -> None:
    assert engine("cuda").model.device == torch.device("cuda", 0)
