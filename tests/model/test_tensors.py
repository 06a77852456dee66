"""The shape table against what is published of the real repositories: tensor counts, fp32 values and total bytes."""

from collections import Counter

import pytest

from headrace.errors import CheckpointError
from headrace.model.spec import ModelSpec, preset_names, resolve_path
from headrace.model.tensors import stored_tensors


def test_glm_52_fp8_has_the_published_tensors() -> None:
    """118,629 keys in the index, 45,872,560 values in fp32 (45,853,104 scales and 19,456 router biases)."""
    stored = list(stored_tensors(ModelSpec.from_dir("GLM-5.2-FP8")))
    assert len(stored) == 118_629
    assert len({tensor.name for tensor in stored}) == 118_629
    values: Counter[str] = Counter()
    for tensor in stored:
        values[tensor.dtype] += tensor.values
    assert values["F32"] == 45_872_560
    assert sum(t.values for t in stored if t.name.endswith("e_score_correction_bias")) == 19_456
    assert sum(t.nbytes for t in stored) == pytest.approx(755.63e9, rel=1e-4)


def test_glm_52_bf16_has_the_published_bytes() -> None:
    stored = list(stored_tensors(ModelSpec.from_dir("GLM-5.2")))
    assert sum(tensor.nbytes for tensor in stored) == 1_506_659_919_872
    assert not any(tensor.name.endswith("_scale_inv") for tensor in stored)


@pytest.mark.parametrize(("name", "billions"), [("GLM-5.2", 753.33), ("GLM-5.1", 753.86), ("GLM-5", 753.86)])
def test_parameters(name: str, billions: float) -> None:
    values = sum(tensor.values for tensor in stored_tensors(ModelSpec.from_dir(name)))
    assert values == pytest.approx(billions * 1e9, abs=5e6)


def test_tensors_of_one_name_pattern_agree_with_the_reference_table() -> None:
    stored = {tensor.name: tensor for tensor in stored_tensors(ModelSpec.from_dir("glm-5.2-fp8"))}
    attention = "model.layers.78.self_attn."
    for name, shape, dtype in (
        ("model.layers.0.mlp.down_proj.weight_scale_inv", (48, 96), "F32"),
        ("model.layers.3.mlp.experts.255.up_proj.weight", (2048, 6144), "F8_E4M3"),
        (f"{attention}kv_a_proj_with_mqa.weight_scale_inv", (5, 48), "F32"),
        (f"{attention}kv_b_proj.weight", (28672, 512), "F8_E4M3"),
        (f"{attention}indexer.weights_proj.weight", (32, 6144), "BF16"),
        ("model.layers.78.eh_proj.weight", (6144, 12288), "BF16"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (256,), "F32"),
    ):
        assert (stored[name].shape, stored[name].dtype) == (shape, dtype), name
    owners = {int(name.split(".")[2]) for name in stored if ".indexer." in name}
    assert owners == {0, 1, 2, *range(6, 75, 4), 78}


def test_presets() -> None:
    assert preset_names() == [
        "deepseek-v3.2", "glm-5", "glm-5-fp8", "glm-5.1", "glm-5.1-fp8", "glm-5.2", "glm-5.2-fp8",
    ]  # fmt: skip
    specs = {name: ModelSpec.from_dir(name) for name in preset_names()}
    assert specs["glm-5.1"] == specs["glm-5"]
    assert [name for name, spec in specs.items() if not spec.quantised] == ["glm-5", "glm-5.1", "glm-5.2"]
    new, old, deepseek = (specs[name] for name in ("glm-5.2-fp8", "glm-5.1-fp8", "deepseek-v3.2"))
    assert (new.rope.theta, old.rope.theta) == (8e6, 1e6)
    assert (new.shares_draft_index, old.shares_draft_index) == (True, False)
    assert (new.attention_scale, old.full_layers) == (1 / 16, tuple(range(78)))
    assert (deepseek.rope.yarn_factor, deepseek.indexer_interleaved, deepseek.n_group) == (40, False, 8)
    assert deepseek.dense_layers == new.dense_layers == (0, 1, 2)
    with pytest.raises(CheckpointError, match=r"not one of nano, deepseek-v3\.2"):
        resolve_path("glm-6")
