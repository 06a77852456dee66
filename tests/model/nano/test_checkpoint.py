"""The shipped checkpoint is complete, consistent with its config, and in the real on-disk format."""

import json
import math
import struct

import pytest
import torch

from headrace.model.nano import checkpoint_path
from headrace.model.nano.train.export import ITEM_BYTES, read_checkpoint, stored_tensors
from headrace.model.nano.train.layout import checkpoint_layout, scale_shape
from headrace.model.nano.train.shape import NanoShape, config_json, generation_config_json

FOLDER = checkpoint_path()
LIMIT_BYTES = int(15.5 * 2**20)


def header() -> dict[str, dict]:
    """The safetensors header: name -> dtype, shape, byte range."""
    with open(FOLDER / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


def test_files_fit_the_repository():
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= LIMIT_BYTES


def test_every_tensor_is_as_the_layout_says():
    found = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header().items()}
    assert found == {spec.name: (spec.shape, spec.dtype) for spec in checkpoint_layout(NanoShape())}


def test_index_names_every_tensor_once_and_sums_the_bytes():
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    entries = header()
    assert set(index["weight_map"]) == set(entries)
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    sizes = [math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]] for entry in entries.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_config_files_state_the_shape(config):
    assert config == config_json(NanoShape())
    assert json.loads((FOLDER / "generation_config.json").read_text()) == generation_config_json(NanoShape())


def test_dimensions_in_the_config_match_the_tensors(config):
    shapes = {name: tuple(entry["shape"]) for name, entry in header().items()}
    heads, latent, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    prefix = "model.layers.0.self_attn"
    assert (latent, rope, config["index_head_dim"]) == (512, 64, 128)  # fixed by the cache row formats
    assert shapes[f"{prefix}.kv_a_proj_with_mqa.weight"] == (latent + rope, config["hidden_size"])
    assert shapes[f"{prefix}.kv_b_proj.weight"] == (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), latent)
    assert shapes[f"{prefix}.q_b_proj.weight"] == (heads * config["qk_head_dim"], config["q_lora_rank"])
    assert config["qk_head_dim"] == config["qk_nope_head_dim"] + rope
    assert shapes["lm_head.weight"] == (config["vocab_size"], config["hidden_size"])


def test_indexers_are_where_the_types_say(config):
    freq, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    layers = config["num_hidden_layers"]
    by_rule = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    assert config["indexer_types"] == by_rule
    owners = {int(name.split(".")[2]) for name in header() if ".indexer." in name}
    assert owners == {i for i in range(layers) if by_rule[i] == "full"} | {layers}
    assert {"full", "shared"} == set(by_rule)


def test_mtp_layer_is_complete_and_copies_nothing(config):
    mtp = f"model.layers.{config['num_hidden_layers']}."
    names = {name.removeprefix(mtp) for name in header() if name.startswith(mtp)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names)
    assert "eh_proj.weight_scale_inv" not in names


def test_scales_cover_partial_blocks():
    entries = header()
    weights = [name for name, entry in entries.items() if entry["dtype"] == "F8_E4M3"]
    partial = 0
    for name in weights:
        shape = tuple(entries[name]["shape"])
        assert tuple(entries[name + "_scale_inv"]["shape"]) == scale_shape(shape)
        partial += any(side % 128 for side in shape)
    assert partial > 0
    assert {name for name in entries if name.endswith("_scale_inv")} == {name + "_scale_inv" for name in weights}


def test_weights_are_finite_and_requantise_to_the_same_bytes():
    shape = NanoShape()
    weights = read_checkpoint(FOLDER)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())
    again = stored_tensors(weights, shape)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    restored = again[name].float() * again[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(restored, weights[name], rtol=0, atol=1e-6)


def test_router_biases_are_in_use():
    weights = read_checkpoint(FOLDER)
    biases = [w for name, w in weights.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 6
    assert all(float(bias.std()) > 0 for bias in biases)
