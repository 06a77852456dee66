"""The architecture against transformers' own `GlmMoeDsaForCausalLM`, on random weights.

Neutralised, on purpose and nothing else: q_a/kv_a norms use eps 1e-6 there (config's eps here); top-k tie order; cached
latents and index keys are fp32 there (bf16 rows here, so transformers' cache rounds too); expert outputs are not
rounded to bf16 there (so our combine keeps fp32). cos/sin are fp32 there too because the model runs in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels.experts.reference import ReferenceExperts
from headrace.kernels.formats import FORMATS, RowFormat
from headrace.kernels.index_keys.reference import ReferenceIndexKeys
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kvstore.pool import DevicePool
from headrace.model.exchange import LocalExchange
from headrace.model.load import load_model
from headrace.model.mono import MonoEngine
from headrace.model.spec import ModelSpec

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 40,
    "index_n_heads": 3,
    "index_head_dim": 128,
    "index_topk": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_nextn_predict_layers": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

CASES = {
    "all-full": {"indexer_types": ["full"] * 4},
    "shared": {"indexer_types": ["full", "shared", "full", "shared"]},
    "groups": {"indexer_types": ["full", "full", "shared", "shared"], "n_group": 4, "topk_group": 2},
    "dense": {"mlp_layer_types": ["dense"] * 4, "indexer_types": ["full"] * 4},
    "top-3-two-shared": {"num_experts_per_tok": 3, "n_shared_experts": 2, "norm_topk_prob": False},
    "wide-topk": {"index_topk": 64},
}


@pytest.fixture(autouse=True)
def stable_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ReferenceExperts, "combine_dtype", torch.float32)

    def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as module

    for cls in (module.GlmMoeDsaIndexer, module.GlmMoeDsaTopkRouter):
        forward = cls.forward

        def patched(self: Any, *args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "topk", topk)
                patch.setattr(torch, "topk", topk)
                return _forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", patched)


def make_reference(tmp_path: Path, changes: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.GlmMoeDsaConfig(**(BASE | changes))
    model = transformers.GlmMoeDsaForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps
    return model


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough to matter and exact in bf16."""
    state = list(model.named_parameters()) + [b for b in model.named_buffers() if "correction_bias" in b[0]]
    for name, parameter in state:
        values = torch.randn_like(parameter)
        if parameter.dim() == 1:
            values = 0.1 * values + (1 if name.endswith("norm.weight") else 0)
        elif "embed_tokens" not in name:
            values = values * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values.bfloat16())


def rounding_cache(config: Any) -> Any:
    """A cache whose rows are bf16, as ours are."""
    cache = transformers.DynamicCache(config=config)
    update, update_indexer = cache.update, cache.update_indexer

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    cache.update = lambda k, v, layer, **kwargs: update(rounded(k), rounded(v), layer, **kwargs)
    cache.update_indexer = lambda k, layer: update_indexer(rounded(k), layer)
    return cache


@pytest.fixture
def fp32_rows(monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache format that rounds nothing, so that only the order of fp32 sums is left to differ. (With bf16 rows a last
    bit of fp32 may round to the other bf16, and one such flip can swap two nearly equal index scores.)"""
    name = "fp32"
    fmt = RowFormat(name, 576 * 4, 64 * 128 * 4, fp8=False, tiled=False)
    monkeypatch.setitem(FORMATS, name, fmt)

    def bytes_of(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    def read(self: Any, plane: torch.Tensor, rows: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
        width = 576 * 4 if plane.dim() == 3 else 128 * 4
        return plane.view(-1, width).index_select(0, rows).view(torch.float32)

    def write(self: Any, plane: torch.Tensor, rows: torch.Tensor, data: torch.Tensor, fmt: RowFormat) -> None:
        plane.view(-1, 128 * 4)[rows[rows >= 0]] = data[rows >= 0]

    monkeypatch.setattr(ReferenceLatentRows, "quantise", lambda self, c, r, fmt: bytes_of(torch.cat((c, r), -1)))
    monkeypatch.setattr(ReferenceLatentRows, "gather", read)
    monkeypatch.setattr(ReferenceIndexKeys, "quantise", lambda self, k, fmt: bytes_of(k))
    monkeypatch.setattr(ReferenceIndexKeys, "gather", read)
    monkeypatch.setattr(ReferenceIndexKeys, "write", write)
    return name


def load_ours(tmp_path: Path, row_format: str) -> Any:
    spec = ModelSpec.from_dir(tmp_path)
    return load_model(spec, tmp_path, "safetensors", "cpu", 0, 1, row_format, True)


def our_hidden(model: Any, tokens: list[int], chunk: int) -> torch.Tensor:
    engine = MonoEngine(model)
    engine.pool = DevicePool(model.spec.slab_layout(model.fmt.name), -(-len(tokens) // 64) + 1, "cpu")
    parts = []
    for start in range(0, len(tokens), chunk):
        rows = engine._rows(tokens[start : start + chunk], start)
        parts.append(model.forward(rows, engine.pool, LocalExchange()))
    return torch.cat(parts)


def tokens_of(seed: int, count: int = 90) -> torch.Tensor:
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_transformers(case: str, seed: int, tmp_path: Path, fp32_rows: str) -> None:
    reference = make_reference(tmp_path, CASES[case], seed)
    tokens = tokens_of(seed)
    with torch.no_grad():
        wanted = reference(tokens).logits[0]
    model = load_ours(tmp_path, fp32_rows)
    got = model.logits(our_hidden(model, tokens[0].tolist(), 90))
    assert wanted.std() > 0.3
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_bf16_cache_rows(tmp_path: Path) -> None:
    """The real bf16 format against a transformers cache that rounds to bf16 as well: bf16 flips cost up to 2^-9 of a
    value, and a flip may swap one nearly tied selection, so one row in 90 may be off."""
    reference = make_reference(tmp_path, CASES["shared"])
    tokens = tokens_of(1)
    with torch.no_grad():
        wanted = reference(tokens, cache=rounding_cache(reference.config), use_cache=True).logits[0]
    model = load_ours(tmp_path, "bf16")
    got = model.logits(our_hidden(model, tokens[0].tolist(), 32))
    off = (got - wanted).abs().amax(1)
    assert (off > 3e-3).sum() <= 1
    assert off.median() < 5e-4
