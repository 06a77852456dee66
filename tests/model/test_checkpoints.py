"""What a checkpoint's numbers become: scale blocks wherever heads and borders lie, dtypes by what the index holds,
every tensor read once and only by the rank that needs it, and how much memory the host needs for it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from plain_model import Plain, dequantised
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kvstore.pool import DevicePool
from headrace.model.base import StepRows
from headrace.model.exchange import LocalExchange
from headrace.model.load import load_model
from headrace.model.miniature import write_miniature
from headrace.model.placement import WHOLE, Placement
from headrace.model.shards import ShardFile
from headrace.model.spec import ModelSpec
from headrace.model.testing import tiny_spec, write_checkpoint
from headrace.model.transformer import Transformer


def load(spec: ModelSpec, directory: Path, placement: Placement = WHOLE) -> Transformer:
    return load_model(spec, directory, "safetensors", "cpu", placement, "tile656", True)


def hidden_of(model: Transformer) -> Tensor:
    every = torch.arange(70)
    write = torch.ones_like(every, dtype=torch.bool)
    rows = StepRows(every, every, torch.zeros_like(every), write, torch.arange(2)[None], every)
    pool = DevicePool(model.spec.slab_layout(model.fmt.name), 2, "cpu")
    return model.forward(rows, pool, LocalExchange())


@pytest.mark.parametrize("family", ["glm-5.2-fp8", "deepseek-v3.2"])
def test_every_matrix_is_dequantised_by_its_own_blocks(family: str, tmp_path: Path) -> None:
    """kv_b_proj's heads (56 or 48 rows) begin inside blocks, 160 and 96 columns end in partial ones, and so do rows."""
    spec = write_miniature(family, tmp_path, experts=8)
    model, plain = load(spec, tmp_path), Plain(tmp_path)
    nope, v_dim = spec.qk_nope_head_dim, spec.v_head_dim
    for i in (0, 3, spec.num_hidden_layers - 1):
        layer, prefix = model._layers[i], f"model.layers.{i}."
        attention = layer.attention._w
        kv_b = plain.get(f"{prefix}self_attn.kv_b_proj.weight").view(spec.num_attention_heads, nope + v_dim, 512)
        assert torch.equal(attention.w_uk, kv_b[:, :nope].float())
        assert torch.equal(attention.w_uv, kv_b[:, nope:].transpose(1, 2).float())
        pairs = [
            (attention.q_a, "self_attn.q_a_proj"), (attention.q_b, "self_attn.q_b_proj"),
            (attention.kv_a, "self_attn.kv_a_proj_with_mqa"), (attention.o, "self_attn.o_proj"),
        ]  # fmt: skip
        for weight, name in pairs:
            assert weight.quantised
            assert torch.equal(weight.matrix.T, plain.get(f"{prefix}{name}.weight").float()), name
        mlp = layer.mlp._w
        if i:
            down = plain.get(f"{prefix}mlp.experts.5.down_proj.weight").float()
            assert torch.equal(mlp.experts.down[5].T, down)
            mlp, prefix = mlp.shared._w, f"{prefix}mlp.shared_experts."
        else:
            prefix = f"{prefix}mlp."
        both = [plain.get(f"{prefix}{part}_proj.weight").float() for part in ("gate", "up")]
        assert torch.equal(mlp.gate_up.matrix.T, torch.cat(both))


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Block by block."""
    out, inner = weight.shape
    codes = torch.empty(out, inner, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-out // 128), -(-inner // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            where = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[where].float()
            scale[i, j] = block.abs().max() / 448
            codes[where] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


FLOATS = ("model.layers.1.self_attn.q_a_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.5.down_proj")
EIGHTS = (
    "model.layers.1.self_attn.indexer.weights_proj", "model.layers.2.self_attn.indexer.weights_proj",
    "model.layers.2.mlp.gate", "model.embed_tokens", "lm_head", "model.layers.3.eh_proj",
)  # fmt: skip


def test_the_index_decides_what_is_fp8_whatever_the_config_says(tmp_path: Path) -> None:
    """Some matrices the other way round than published: bf16 or fp32 where FP8 is usual, and FP8 where it is not. The
    list of exceptions in config.json says neither."""
    spec = tiny_spec(full_layers=(0, 1, 2))
    write_checkpoint(spec, tmp_path, seed=2)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.self_attn.q_b_proj", "indexers_proj"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for i, name in enumerate(FLOATS):
        value = dequantised(tensors[f"{name}.weight"], tensors.pop(f"{name}.weight_scale_inv"))
        tensors[f"{name}.weight"] = value.to(torch.bfloat16 if i else torch.float32)
    for name in EIGHTS:
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = quantised(tensors[f"{name}.weight"])
    save_file(tensors, file)
    model, plain = load(ModelSpec.from_dir(tmp_path), tmp_path), Plain(tmp_path)

    def stored(name: str) -> Tensor:
        return plain.get(f"{name}.weight").float()

    attention = model._layers[1].attention._w
    assert not attention.q_a.quantised
    assert torch.equal(attention.q_a.matrix.T, stored(FLOATS[0]))
    assert attention.indexer.weights_proj.quantised
    assert torch.equal(attention.indexer.weights_proj.matrix.T, stored(EIGHTS[0]))
    dense = model._layers[0].mlp._w
    assert not dense.gate_up.quantised, "stacked with a bf16 matrix"
    gate_up = torch.cat((stored("model.layers.0.mlp.gate_proj"), stored(FLOATS[1])))
    assert torch.equal(dense.gate_up.matrix.T, gate_up)
    assert dense.down.quantised
    assert [layer.mlp._w.experts.quantised for layer in model._layers[1:]] == [False, True]
    assert torch.equal(model._layers[1].mlp._w.experts.down[5].T, stored(FLOATS[2]))
    assert torch.equal(model._layers[2].mlp._w.gate, stored("model.layers.2.mlp.gate"))
    assert torch.equal(model._embedding, stored("model.embed_tokens"))
    assert hidden_of(model).isfinite().all()
    for rank in (0, 1):
        share = load(spec, tmp_path, Placement.expert_split(rank, 2))
        flags = [layer.mlp._w.experts.quantised for layer in share._layers[1:]]
        assert flags == [False, True], "ranks exchange rows in one encoding, whoever has the odd expert"


def test_a_vector_with_a_scale_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tiny_spec(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    tensors["model.norm.weight_scale_inv"] = torch.ones(1, 1)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(8, dtype=torch.int64)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        load(tiny_spec(), tmp_path)
    assert "only matrices have scales, model.norm.weight is [64]" in str(caught.value)
    assert "e_score_correction_bias is I64 without" in str(caught.value)


@pytest.mark.parametrize("family", ["glm-5.2-fp8", "deepseek-v3.2"])
def test_reads_are_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads what it keeps once, and nothing else: no expert of others, no copy under the MTP layer."""
    spec = write_miniature(family, tmp_path, experts=8)
    reads: list[str] = []
    read = ShardFile.read

    def counted(self: ShardFile, name: str) -> Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(ShardFile, "read", counted)
    stored = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    copies = [name for name in stored if f"layers.{spec.mtp_layer}.embed" in name or "shared_head.head" in name]
    assert len(copies) == (2 if family == "deepseek-v3.2" else 0)
    for rank, mine in ((0, set(range(4))), (1, set(range(4, 8)))):
        reads.clear()
        load(spec, tmp_path, Placement.expert_split(rank, 2))
        assert set(Counter(reads).values()) == {1}
        theirs = [n for n in stored if ".mlp.experts." in n and int(n.split(".experts.")[1].split(".")[0]) not in mine]
        assert set(reads) == set(stored) - set(theirs) - set(copies)


HOST = """
import gc, json, sys
import torch
from headrace.model.load import load_model
from headrace.model.placement import WHOLE, Placement
from headrace.model.spec import ModelSpec

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

torch.set_num_threads(1)
small, large = sys.argv[1:]
load_model(ModelSpec.from_dir(small), small, "safetensors", "cpu", WHOLE, "tile656", True)  # libraries, thread stacks
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark begins again
before = status("VmRSS")
part = Placement.expert_split(1, 4)
model = load_model(ModelSpec.from_dir(large), large, "safetensors", "cpu", part, "tile656", True)
peak = status("VmHWM")
gc.collect()
kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if torch.is_tensor(t)}
print(json.dumps({"peak": peak - before, "kept": sum(kept.values())}))
"""


def test_the_host_holds_what_the_rank_keeps_and_at_most_one_shard(tmp_path: Path) -> None:
    """Measured in a process of its own, at the operating system, for one of four ranks: as in the real files, its
    experts of a layer are less than a shard. Freed memory goes back at once (malloc's thresholds), so that the mark
    counts what is held."""
    write_checkpoint(tiny_spec(), tmp_path / "small")
    spec = tiny_spec(
        hidden_size=1024, intermediate_size=4096, moe_intermediate_size=512, n_routed_experts=16, quantised=False,
        num_attention_heads=4, qk_nope_head_dim=192, v_head_dim=256, q_lora_rank=512,
    )  # fmt: skip
    write_checkpoint(spec, tmp_path / "large", shards=6)
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors")]
    command = [sys.executable, "-P", "-c", HOST, str(tmp_path / "small"), str(tmp_path / "large")]
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert found["kept"] > 3 * max(sizes)
    assert found["peak"] < found["kept"] + max(sizes), max(sizes)
