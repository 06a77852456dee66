"""Three placements of the same layers: shares add up to the whole model exactly, and processes that split heads give
what one process gives, within the bound that the dtype of their sums sets."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.fp8 import dequantise_weight
from headrace.kvstore.pool import DevicePool
from headrace.model.base import Exchange, StepRows
from headrace.model.build import cut_out
from headrace.model.exchange import LocalExchange, SplitExchange
from headrace.model.load import load_model
from headrace.model.mtp import extend_and_draft
from headrace.model.placement import COLUMNS, ROWS, WHOLE, Placement, Share
from headrace.model.spec import ModelSpec
from headrace.model.tensors import stored_tensors
from headrace.model.testing import tiny_model, tiny_spec, write_checkpoint
from headrace.model.transformer import Transformer

LENGTH, DRAFTS = 100, 3
TOKENS = [(i * 37 + 5) % 500 for i in range(LENGTH + 1)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORLDS = (2, 3)
"""Even; uneven (1, 1 and 2 heads), with borders inside a scale block."""


def spec_of(quantised: bool) -> ModelSpec:
    """GLM's head: 192 + 256 rows of kv_b_proj, so that every other head begins inside a scale block. Shared experts of
    one block, which only one rank can have."""
    return tiny_spec(
        num_attention_heads=4, qk_nope_head_dim=192, v_head_dim=256, intermediate_size=640, quantised=quantised
    )


def model_of(quantised: bool, placement: Placement = WHOLE) -> Transformer:
    """FP8 weights with FP8 cache rows, or bf16 weights with bf16 rows."""
    row_format = "tile656" if quantised else "bf16"
    return tiny_model(spec_of(quantised), placement=placement, row_format=row_format)


def run(model: Transformer, exchange: Exchange) -> dict[str, Tensor]:
    """A prompt and a draft chain."""
    every = torch.arange(LENGTH)
    pool = DevicePool(model.spec.slab_layout(model.fmt.name), 3, "cpu")

    def rows(tokens: list[int]) -> StepRows:
        write = torch.ones_like(every, dtype=torch.bool)
        return StepRows(torch.tensor(tokens), every, torch.zeros_like(every), write, torch.arange(3)[None], every)

    hidden = model.forward(rows(TOKENS[:-1]), pool, exchange)
    drafted = extend_and_draft(model, rows(TOKENS[1:]), hidden, torch.tensor([LENGTH - 1]), DRAFTS, pool, exchange)
    return {
        "logits": model.logits(hidden), "mtp": drafted.hidden, "latent": pool.latent, "index": pool.index,
    }  # fmt: skip


def worker(rank: int, world: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for quantised in (True, False):
        model = model_of(quantised, Placement.head_split(rank, world))
        for name, dtype in DTYPES.items():
            exchange = SplitExchange(dtype=dtype)
            found[f"{quantised} {name}"] = run(model, exchange) | {"collectives": torch.tensor(exchange.collectives)}
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=WORLDS)
def split(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Tensor]]]:
    """What each rank of a head-split group found."""
    world, directory = request.param, tmp_path_factory.mktemp("split")
    command = [sys.executable, __file__]
    children = [subprocess.Popen([*command, str(rank), str(world), str(directory)]) for rank in range(world)]
    assert [child.wait(200) for child in children] == [0] * world
    return [torch.load(directory / f"{rank}.pt") for rank in range(world)]


def test_all_ranks_of_a_split_group_agree_bit_by_bit(split: list[dict[str, dict[str, Tensor]]]) -> None:
    """The sums they get are the same, so their caches and their tokens are."""
    for other in split[1:]:
        for case, wanted in split[0].items():
            for name, value in wanted.items():
                assert torch.equal(other[case][name], value), (case, name)
    # Two sums a layer: three layers, the MTP layer over the prompt, and over two of the three drafts.
    assert int(split[0]["True fp32"]["collectives"]) == 2 * (3 + 1 + 2)


BOUNDS = {
    # mean, median over rows, last MTP row. fp32 sums differ in last bits, which turn a rounding to FP8 or bf16 now and
    # then; a row whose experts or selection nearly tie is another row. bf16 sums do that everywhere, in a model of 64
    # channels more than in one of 6144.
    "True fp32": (5e-3, 1e-6, 0.05),
    "True bf16": (0.25, 0.15, 0.4),
    "False fp32": (2e-3, 5e-4, 0.01),
    "False bf16": (0.03, 0.01, 0.1),
}
"""|difference| / |whole| of a row."""


@pytest.mark.parametrize("case", BOUNDS)
def test_split_equals_whole_within_the_bound(split: list[dict[str, dict[str, Tensor]]], case: str) -> None:
    torch.set_num_threads(1)
    whole = run(model_of(case.startswith("True")), LocalExchange())
    real = whole["logits"][0].isfinite()

    def off(name: str, which: Tensor | slice) -> Tensor:
        got, wanted = split[0][case][name][:, which], whole[name][:, which]
        return (got - wanted).norm(dim=1) / wanted.norm(dim=1)

    mean, median, mtp = BOUNDS[case]
    logits = off("logits", real)
    assert logits.mean() < mean
    assert logits.median() < median
    assert off("mtp", slice(None)) < mtp


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_of_a_checkpoint_and_of_dummy_weights_make_up_the_whole(
    tmp_path: Path, quantised: bool, world: int
) -> None:
    spec = spec_of(quantised)
    write_checkpoint(spec, tmp_path, seed=3)
    whole = tiny_model(spec, seed=3)
    for source in ("safetensors", "dummy"):
        parts = [
            load_model(spec, tmp_path, source, "cpu", Placement.head_split(rank, world), "tile656", True, dummy_seed=3)
            for rank in range(world)
        ]
        for i, layer in enumerate(whole._layers):
            mine = [part._layers[i] for part in parts]
            check_attention([one.attention._w for one in mine], layer.attention._w)
            if i == 0:
                check_mlp([one.mlp._w for one in mine], layer.mlp._w)
                continue
            check_mlp([one.mlp._w.shared._w for one in mine], layer.mlp._w.shared._w)
            experts = [matrix for one in mine for matrix in one.mlp._w.experts.down]
            assert all(torch.equal(a, b) for a, b in zip(experts, layer.mlp._w.experts.down, strict=True))


def check_attention(parts: list[Any], whole: Any) -> None:
    assert torch.equal(torch.cat([p.q_b.matrix for p in parts], 1), whole.q_b.matrix)
    assert torch.equal(torch.cat([p.o.matrix for p in parts], 0), whole.o.matrix)
    for name in ("w_uk", "w_uv"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
    for p in parts:
        assert torch.equal(p.q_a.matrix, whole.q_a.matrix)
        assert (p.o.quantised, p.q_b.quantised) == (whole.o.quantised, whole.q_b.quantised)


def check_mlp(parts: list[Any], whole: Any) -> None:
    held = [part for part in parts if part is not None]
    gates, ups = zip(*[part.gate_up.matrix.chunk(2, 1) for part in held])
    assert torch.equal(torch.cat([*gates, *ups], 1), whole.gate_up.matrix)
    assert torch.equal(torch.cat([part.down.matrix for part in held]), whole.down.matrix)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 300), st.data())
def test_rows_are_cut_exactly_wherever_they_begin(parts: int, rows: int, columns: int, data: st.DataObject) -> None:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128))
    borders = sorted(data.draw(st.lists(st.integers(0, rows), min_size=parts, max_size=parts)))
    found = []
    for start, stop in zip([0, *borders], [*borders, rows]):
        found += cut_out((weight, scale), ROWS, range(start, stop), "x")
    pieces = [dequantise_weight(*pair) for pair in found]
    assert torch.equal(torch.cat(pieces), dequantise_weight(weight, scale))


def test_columns_are_cut_at_scale_blocks_or_not_at_all() -> None:
    weight, scale = torch.randn(130, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    found = [cut_out((weight, scale), COLUMNS, part, "o") for part in (range(256), range(256, 300))]
    assert torch.equal(torch.cat([dequantise_weight(*pair) for pairs in found for pair in pairs], 1),
                       dequantise_weight(weight, scale))  # fmt: skip
    for part in (range(100), range(64, 256)):
        with pytest.raises(ConfigError, match="whole blocks of 128; take fewer ranks, or bf16"):
            cut_out((weight, scale), COLUMNS, part, "o")
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.o_proj is FP8 and cannot be split"):
        tiny_model(tiny_spec(), placement=Placement.head_split(1, 2))  # 48 values a head


def test_placements_that_leave_a_rank_without_work_are_refused(tmp_path: Path) -> None:
    for placement in (Placement.expert_split(0, 9), Placement.head_split(0, 3), Placement.expert_split(2, 2)):
        with pytest.raises(ConfigError, match="to split"):
            load_model(tiny_spec(), tmp_path, "dummy", "cpu", placement, "tile656", True)


@given(st.integers(1, 400), st.integers(1, 9), st.sampled_from([1, 128]))
def test_shares_cover_everything_once(count: int, size: int, unit: int) -> None:
    shares = [Share(rank, size).of(count, unit) for rank in range(size)]
    assert [thing for share in shares for thing in share] == list(range(count))
    assert all(share.start % unit == 0 for share in shares)
    assert max(map(len, shares)) == len(shares[-1]) or unit > 1


@pytest.mark.parametrize("split_heads", [True, False])
def test_what_is_planned_is_what_is_kept(split_heads: bool) -> None:
    """Stored bytes of all ranks: split parts once, whole ones on every rank."""
    spec = spec_of(True)
    make = Placement.head_split if split_heads else Placement.expert_split
    tensors = list(stored_tensors(spec))
    ranks = [[make(rank, 4).stored(tensor, spec) for tensor in tensors] for rank in range(4)]
    for i, tensor in enumerate(tensors):
        kept = [rank[i] for rank in ranks if rank[i] is not None]
        base = tensor.name.removesuffix("_scale_inv").removesuffix(".weight")
        if tensor.expert >= 0:
            assert kept == [tensor]
        elif make(0, 4).cut(base, spec) is None:
            assert kept == [tensor] * 4
        elif not tensor.name.endswith("_scale_inv"):
            assert sum(one.nbytes for one in kept) == tensor.nbytes
    assert WHOLE.stored(tensors[0], spec) == tensors[0]


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
