"""Checkpoints: shards, FP8 by presence of scales, expert shares, and one error for everything that is wrong."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, KernelUnsupported
from headrace.model.exchange import LocalExchange
from headrace.model.load import load_model
from headrace.model.mono import MonoEngine
from headrace.model.placement import WHOLE, Placement, Share
from headrace.model.progress import LoadBar, LoadLog, load_progress
from headrace.model.spec import ModelSpec, parse_config
from headrace.model.testing import config_json, tiny_model, tiny_spec, write_checkpoint
from headrace.model.transformer import Transformer
from headrace.model.weights_version import weights_version


def hidden_of(model: Transformer) -> torch.Tensor:
    from headrace.kvstore.pool import DevicePool

    engine = MonoEngine(model)
    engine.pool = DevicePool(model.spec.slab_layout(model.fmt.name), 2, "cpu")
    return model.forward(engine._rows(list(range(70)), 0), engine.pool, LocalExchange())


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_loads_as_the_dummy_it_was_written_from(tmp_path: Path, quantised: bool, shards: int) -> None:
    spec = tiny_spec(used_vocab_size=512, quantised=quantised)
    write_checkpoint(spec, tmp_path, seed=4, shards=shards)
    parsed = ModelSpec.from_dir(tmp_path)
    assert parsed == spec
    loaded = load_model(parsed, tmp_path, "safetensors", "cpu", WHOLE, "tile656", True)
    assert torch.equal(hidden_of(loaded), hidden_of(tiny_model(spec, seed=4)))


def test_every_wrong_tensor_is_in_one_error(tmp_path: Path) -> None:
    spec = tiny_spec()
    write_checkpoint(spec, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mystery.weight"] = torch.zeros(3)
    tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(3)  # a copy some checkpoints carry: fine
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(8, 63)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load_model(spec, tmp_path, "safetensors", "cpu", WHOLE, "tile656", True)
    text = str(caught.value)
    assert text.startswith("4 tensors or files are wrong")
    for part in (
        "missing: model.norm.weight [64]",
        "extra: model.layers.0.mystery.weight",
        "model.layers.1.mlp.gate.weight is [8, 63], want [8, 64]",
        "model.layers.0.mlp.up_proj.weight is F32 but has",
    ):
        assert part in text


def test_expert_shares_cover_all_experts_once() -> None:
    for size in (1, 2, 3, 8):
        shares = [Share(rank, size).of(8) for rank in range(size)]
        assert [e for share in shares for e in share] == list(range(8))


def test_a_load_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = tiny_spec()
    write_checkpoint(spec, tmp_path)
    with caplog.at_level("INFO"):
        load_model(
            spec,
            tmp_path,
            "safetensors",
            "cpu",
            Placement.expert_split(0, 2),
            "tile656",
            True,
            progress=LoadLog(quiet_s=0.0),
        )
    assert [record.message[:12] for record in caplog.records[:2]] == ["loading: 10%", "loading: 20%"]
    last = caplog.records[-1].message
    assert last.startswith("loaded ")
    assert "other ranks' experts, 0 are copies" in last


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_load_draws_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    spec, screen = tiny_spec(), Terminal()
    write_checkpoint(spec, tmp_path)
    load_model(spec, tmp_path, "safetensors", "cpu", WHOLE, "tile656", True, progress=LoadBar(screen, interval_s=0.0))
    *drawn, last, rest = screen.getvalue().replace("\n", "\r\x1b[K").split("\r\x1b[K")[1:]
    shares = [int(line.split("%")[0].removeprefix("loading")) for line in drawn]
    assert shares == sorted(shares)
    assert (shares[0] < 10, shares[-1] >= 90, rest) == (True, True, "")
    assert all(len(line) < 70 and "[" in line and " s left" in line for line in drawn)
    assert last.startswith("loaded ")
    assert isinstance(load_progress(screen), LoadBar)
    assert isinstance(load_progress(io.StringIO()), LoadLog)


def test_forcing_an_absent_backend_names_what_exists(tmp_path: Path) -> None:
    with pytest.raises(KernelUnsupported, match=r"no op has a backend 'cutlass'; there are: .*reference"):
        load_model(tiny_spec(), tmp_path, "dummy", "cpu", WHOLE, "tile656", True, kernels="cutlass")


def test_config_precedence_and_problems() -> None:
    raw = config_json(tiny_spec())
    del raw["indexer_types"]
    assert parse_config(raw | {"index_topk_pattern": "FSS"}, {}, None, "x").full_layers == (0,)
    rule = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3, "mlp_layer_types": None}
    full = parse_config(raw | rule, {}, None, "x").full_layers
    assert full == (0, 1, 2, *range(6, 75, 4))
    assert parse_config(raw, {}, None, "x").full_layers == (0, 1, 2)
    with pytest.raises(CheckpointError) as caught:
        parse_config(raw | {"kv_lora_rank": 256, "hidden_act": "gelu", "hidden_size": "x"}, {}, None, "here")
    assert all(word in str(caught.value) for word in ("kv_lora_rank: 256", "gelu", "hidden_size: expected"))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "truncate": False, "attention_factor": 1.5}
    with pytest.raises(CheckpointError, match=r"(?s)attention_factor: 1\.5 .*truncate: False"):
        parse_config(raw | {"rope_parameters": yarn}, {}, None, "here")
    assert not parse_config(raw | {"rope_interleave": False}, {}, None, "here").rope_interleaved


def test_deepseek_v32_config() -> None:
    raw = config_json(tiny_spec()) | {"model_type": "deepseek_v32", "first_k_dense_replace": 1}
    for key in ("indexer_types", "mlp_layer_types", "indexer_rope_interleave", "rope_parameters"):
        del raw[key]
    raw |= {
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0},
    }
    spec = parse_config(raw, {"eos_token_id": 1}, 500, "x")
    assert not spec.indexer_interleaved
    assert (spec.dense_layers, spec.full_layers, spec.eos_token_ids) == ((0,), (0, 1, 2), (1,))
    assert spec.rope.yarn_factor == 40
    assert spec.attention_scale == pytest.approx(96**-0.5 * (0.1 * torch.log(torch.tensor(40.0)).item() + 1) ** 2)


def test_weights_version_sees_every_byte(tmp_path: Path) -> None:
    write_checkpoint(tiny_spec(), tmp_path)
    first = weights_version(tmp_path)
    assert len(first) == 32
    assert weights_version(tmp_path) == first
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_version(tmp_path) != first
    assert weights_version(tmp_path, "dummy", 0) != weights_version(tmp_path, "dummy", 1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    assert weights_version(tmp_path, "dummy", 0) != weights_version(tmp_path / ".", "dummy", 1)
