"""Greedy output is the same token for token whatever the path: one process or many, cold or from any tier, any number
of prefill and decode ranks, with and without speculation. Real processes, gRPC and shared memory, the nano model."""

from collections.abc import Iterator
from typing import Any

import pytest

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 600)
"""Around the borders of blocks, and beyond the nano model's index_topk of 256."""

VARIANTS = {
    "cp2-dp2-spec4": (),
    "cp1-dp1-spec0": ("prefill.cp=1", "decode.dp=1", "decode.draft_tokens=0"),
    "cp1-dp2-spec2-chunk64": ("prefill.cp=1", "decode.draft_tokens=2", "prefill.chunk_tokens=64"),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def variant(request: pytest.FixtureRequest, serve: Any) -> Iterator[Any]:
    with serve("deploy.launcher=process", *VARIANTS[request.param]) as service:
        yield service


def cut(tokens: list[int], length: int) -> list[int]:
    """A prompt of its own for each length: no two share a block."""
    return tokens[length : 2 * length]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_path_gives_the_reference_tokens(variant, reference, code_tokens, complete, length) -> None:
    prompt = cut(code_tokens, length)
    wanted = reference.greedy(prompt, 24)
    cold, cold_usage = complete(variant.url, prompt)
    warm, warm_usage = complete(variant.url, prompt)
    assert cold == wanted
    assert warm == wanted
    assert cold_usage["prompt_tokens_details"]["cached_tokens"] == 0
    hit = min(64 * (length // 64), length - 1)
    assert warm_usage["prompt_tokens_details"]["cached_tokens"] == hit


def test_decode_ranks_compute_no_prompt_position(variant, boxes) -> None:
    ranks = {name: values for name, values in boxes(variant.url).items() if name.startswith("decode")}
    assert ranks
    assert all(values["prompt_rows_computed_total"] == 0 for values in ranks.values())


def test_the_next_turn_hits_prompt_and_answer(variant, reference, code_tokens, complete) -> None:
    """Hits cover 64 * floor((L + A - 1) / 64): the last sampled token has no KV yet."""
    prompt = code_tokens[1500:1600]
    answer, _ = complete(variant.url, prompt, 61)
    assert answer == reference.greedy(prompt, 61)
    longer = [*prompt, *answer, *code_tokens[1700:1790]]
    again, usage = complete(variant.url, longer)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64 * ((100 + 61 - 1) // 64)
    assert again == reference.greedy(longer, 24)


def test_host_hits_equal_cold_runs(serve, reference, code_tokens, complete) -> None:
    """12 device blocks cannot keep five prompts of 5 blocks each: the second pass comes from the host tier."""
    prompts = [code_tokens[start : start + 330] for start in range(0, 5 * 330, 330)]
    small = ("deploy.launcher=process", "prefill.device_blocks=12", "decode.device_blocks=12", "decode.dp=1")
    with serve(*small) as service:
        for prompt in prompts:
            assert complete(service.url, prompt)[0] == reference.greedy(prompt, 24)
        for prompt in prompts:
            answer, usage = complete(service.url, prompt)
            assert answer == reference.greedy(prompt, 24)
            tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
            assert sum(tiers.values()) == 320
            assert tiers.get("host", 0) > 0


def test_a_flush_forgets_and_changes_no_token(variant, reference, code_tokens, complete, flush) -> None:
    prompt = code_tokens[2000:2200]
    complete(variant.url, prompt)
    flush(variant.url)
    answer, usage = complete(variant.url, prompt)
    assert answer == reference.greedy(prompt, 24)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
