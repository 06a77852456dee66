"""The architecture against transformers' own `GlmMoeDsaForCausalLM`, on random weights (what is neutralised, and only
that, is in model/oracle.py)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from headrace.model import oracle
from headrace.model.exchange import LocalExchange
from headrace.model.transformer import Transformer

CASES: dict[str, dict[str, Any]] = {
    "all-full": {"indexer_types": ["full"] * 4},
    "shared": {"indexer_types": ["full", "shared", "full", "shared"]},
    "groups": {"indexer_types": ["full", "full", "shared", "shared"], "n_group": 4, "topk_group": 2},
    "dense": {"mlp_layer_types": ["dense"] * 4, "indexer_types": ["full"] * 4},
    "top-3-two-shared": {"num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": False},
    "wide-topk": {"index_topk": 64},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
}


@pytest.fixture(autouse=True)
def _neutral() -> Iterator[None]:
    torch.set_num_threads(1)
    with oracle.neutral():
        yield


def tokens_of(seed: int, count: int = 90) -> torch.Tensor:
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def our_hidden(model: Transformer, tokens: list[int], chunk: int) -> torch.Tensor:
    pool = oracle.pool_for(model, len(tokens))
    starts = range(0, len(tokens), chunk)
    rows = [oracle.rows_of(tokens[start : start + chunk], start, pool) for start in starts]
    return torch.cat([model.forward(part, pool, LocalExchange()) for part in rows])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_transformers(case: str, seed: int, tmp_path: Path) -> None:
    reference = oracle.make_reference(tmp_path, CASES[case], seed)
    tokens = tokens_of(seed)
    with torch.no_grad():
        wanted = reference(tokens).logits[0]
    model = oracle.load_ours(tmp_path)
    got = model.logits(our_hidden(model, tokens[0].tolist(), 90))
    assert wanted.std() > 0.3
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def rounding_cache(config: Any) -> Any:
    """A transformers cache whose rows are bf16, as ours are in the format bf16."""
    import transformers

    cache = transformers.DynamicCache(config=config)
    update, update_indexer = cache.update, cache.update_indexer

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    cache.update = lambda k, v, layer, **kwargs: update(rounded(k), rounded(v), layer, **kwargs)
    cache.update_indexer = lambda k, layer: update_indexer(rounded(k), layer)
    return cache


def test_bf16_cache_rows(tmp_path: Path) -> None:
    """A last bit of fp32 may round to the other bf16: such flips cost up to 2^-9 of a value, and one may swap a nearly
    tied selection, so one row in 90 may be off."""
    reference = oracle.make_reference(tmp_path, CASES["shared"])
    tokens = tokens_of(1)
    with torch.no_grad():
        wanted = reference(tokens, cache=rounding_cache(reference.config), use_cache=True).logits[0]
    model = oracle.load_ours(tmp_path, "bf16")
    got = model.logits(our_hidden(model, tokens[0].tolist(), 32))
    off = (got - wanted).abs().amax(1)
    assert (off > 3e-3).sum() <= 1
    assert off.median() < 5e-4
