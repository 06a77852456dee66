"""Random weights: the same on every device, machine and day, of the right spread, made where they are used."""

import hashlib

import pytest
import torch
from torch import Tensor

from headrace.kernels.fp8 import dequantise_weight
from headrace.model.dummy import DummySource
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_SUFFIX, model_tensors
from headrace.model.testing import tiny_spec
from headrace.model.weights_version import DUMMY_VERSION

ODD = tiny_spec(hidden_size=300, intermediate_size=210, moe_intermediate_size=33)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def everything(source: DummySource, spec: ModelSpec) -> dict[str, Tensor]:
    names = [name for tensor in model_tensors(spec) for name in (tensor.name, tensor.name + SCALE_SUFFIX)]
    return {name: source.get(name) for name in names if source.has(name)}


def test_values_are_fixed_for_ever() -> None:
    """If one changes, DUMMY_VERSION must too: cached blocks of the old weights are under the old version's name."""
    source = DummySource(ODD, 7)
    found = {
        name: digest(source.get(f"model.layers.1.{name}"))
        for name in (
            "self_attn.kv_b_proj.weight",
            "self_attn.kv_b_proj.weight_scale_inv",
            "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias",
            "input_layernorm.weight",
        )
    }
    assert (DUMMY_VERSION, found) == (
        2,
        {
            "self_attn.kv_b_proj.weight": "29848a909c4585e1",
            "self_attn.kv_b_proj.weight_scale_inv": "113d72fc6a0ca349",
            "mlp.gate.weight": "87fdcd965518aee5",
            "mlp.gate.e_score_correction_bias": "aebf4c06fb26654c",
            "input_layernorm.weight": "6d7ee70827a98cef",
        },
    )


def test_seed_name_and_nothing_else_decide() -> None:
    one, other = (everything(DummySource(ODD, seed), ODD) for seed in (1, 2))
    again = DummySource(ODD, 1)
    for name in reversed(list(one)):  # in another order
        assert torch.equal(again.get(name).view(torch.uint8), one[name].view(torch.uint8))
    same = [n for n in one if one[n].numel() > 1 and torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8))]
    assert same == []
    assert len({digest(tensor) for tensor in one.values()}) == len(one)


def test_chunks_of_the_work_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = everything(DummySource(ODD, 3), ODD)
    monkeypatch.setattr("headrace.model.dummy._WORDS", {"cpu": 999, "cuda": 1})
    for name, tensor in everything(DummySource(ODD, 3), ODD).items():
        assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name


def test_spread_is_that_of_a_trained_model() -> None:
    spec = tiny_spec(hidden_size=512, num_attention_heads=4)
    source = DummySource(spec, 5)
    name = "model.layers.0.mlp.down_proj.weight"
    weight = dequantise_weight(source.get(name), source.get(name + SCALE_SUFFIX))
    assert weight.std().item() == pytest.approx(128**-0.5, rel=0.15)
    assert abs(weight.mean().item()) < 0.002
    scale = source.get("model.layers.0.mlp.gate_proj.weight" + SCALE_SUFFIX)
    assert (scale.max() / scale.min()).item() > 1.05
    codes = source.get(name).float()
    assert codes.abs().max() == 448
    assert codes.isfinite().all()
    embedding = source.get("model.embed_tokens.weight").float()
    assert embedding.std().item() == pytest.approx(1, rel=0.02)
    assert source.get("model.norm.weight").float().mean().item() == pytest.approx(1, abs=0.05)


def test_all_work_is_done_on_the_device() -> None:
    """The meta device has no memory: whatever were made elsewhere would fail to come here, and no byte does."""
    source = DummySource(ModelSpec.from_dir("GLM-5.2-FP8"), 0, device="meta")
    for name in ("model.layers.3.mlp.experts.7.gate_proj.weight", "lm_head.weight", "model.layers.3.mlp.gate.weight"):
        tensor = source.get(name)
        assert tensor.device.type == "meta"
        assert tensor.shape in ((2048, 6144), (154_880, 6144), (256, 6144))


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits() -> None:
    theirs = everything(DummySource(ODD, 9, device="cuda"), ODD)
    for name, tensor in everything(DummySource(ODD, 9), ODD).items():
        assert theirs[name].is_cuda
        assert torch.equal(theirs[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
