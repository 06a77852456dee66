"""A row's bits depend on that row alone: not on how many rows come with it, where it lies, or other histories."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, QueryRows, RouterRule
from headrace.kernels.formats import FORMATS
from headrace.kernels.registry import KernelSet, kernel_set

ROWS = 37
FMT = FORMATS["tile656"]


def kernels() -> KernelSet:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return kernel_set(KernelContext(torch.device("cpu"), deterministic=True))


def row_ops() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ops from rows [t, 256] to rows."""
    k = kernels()
    weight, bias = torch.randn(256), torch.randn(256)
    fp8_weight = k.linear.prepare((torch.randn(384, 256).to(torch.float8_e4m3fn), torch.rand(3, 2)))
    plain = k.linear.prepare((torch.randn(1000, 256), None))
    heads = torch.randn(4, 64, 96)
    gate, gate_bias = torch.randn(16, 256) / 16, torch.randn(16) * 0.1
    rule = RouterRule(4, 1, 1, True, 2.5)
    angles = torch.randn(ROWS, 32)
    pairs = [(torch.randn(96, 256) / 16, None) for _ in range(6)]
    experts = k.experts.prepare(pairs[:3], pairs[3:], [(torch.randn(256, 96) / 10, None) for _ in range(3)])

    def moe(x: Tensor) -> Tensor:
        ids = (x[:, :2].abs() * 100).int() % 3
        return k.experts(x, None, ids, x[:, 2:4].contiguous(), experts, 0)

    return {
        "rms": lambda x: k.norm.rms(x, weight, 1e-5),
        "layer": lambda x: k.norm.layer(x, weight, bias, 1e-6),
        "fp8 linear": lambda x: k.linear(x, fp8_weight),
        "linear": lambda x: k.linear(x, plain),
        "per head": lambda x: k.linear.per_head(x.view(-1, 4, 64), heads).flatten(1),
        "router ids": lambda x: k.router(x, gate, gate_bias, rule)[0],
        "router weights": lambda x: k.router(x, gate, gate_bias, rule)[1],
        "experts": moe,
        "latent rows": lambda x: k.latent_rows.quantise(torch.cat((x, x), 1), x[:, :64].contiguous(), FMT),
        "index keys": lambda x: k.index_keys.quantise(x[:, :128].contiguous(), FMT),
        "rope": lambda x: k.rope(x.view(-1, 4, 64), angles[: x.shape[0]] * 0 + 0.3, angles[: x.shape[0]] * 0 + 0.7,
                                 interleaved=True).flatten(1),
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(row_ops()))
def test_rows_do_not_see_each_other(name: str) -> None:
    op = row_ops()[name]
    x = torch.randn(ROWS, 256)
    whole = op(x)
    for count in (1, 2, 3, 5, 8, 15, 16, 17, 33):
        assert torch.equal(op(x[:count].contiguous()), whole[:count]), f"{count} rows"
    for start in (1, 7, 16, 30):
        assert torch.equal(op(x[start:].contiguous()), whole[start:]), f"from row {start}"
    order = torch.randperm(ROWS)
    assert torch.equal(op(x[order]), whole[order])


def attention_inputs() -> tuple[KernelSet, Tensor, Tensor, Tensor]:
    """Two sequences of 1,500 and 300 rows with their planes and block tables."""
    k = kernels()
    table = torch.full((2, 24), -1)
    slots = torch.randperm(40)
    table[0, :24], table[1, :5] = slots[:24], slots[24:29]
    latent = torch.zeros(40, 64, FMT.latent_row_bytes, dtype=torch.uint8)
    index = torch.zeros(40, FMT.index_plane_bytes, dtype=torch.uint8)
    every = torch.arange(40 * 64)
    k.latent_rows.write(latent, every, k.latent_rows.quantise(torch.randn(2560, 512), torch.randn(2560, 64), FMT))
    k.index_keys.write(index, every, k.index_keys.quantise(torch.randn(2560, 128), FMT), FMT)
    return k, table, latent, index


def test_selection_and_attention_do_not_see_other_rows() -> None:
    k, table, latent, index = attention_inputs()
    count = 30
    seq = (torch.arange(count) % 3 == 1).long()
    last = torch.where(seq == 0, torch.arange(count) * 50, torch.arange(count) * 10)
    q, w = torch.randn(count, 4, 128), torch.randn(count, 4)
    absorbed = torch.randn(count, 4, 576)

    def run(part: Tensor) -> tuple[Tensor, Tensor]:
        rows = QueryRows(seq[part], last[part], table)
        selection = k.index_topk(q[part], w[part], rows, index, FMT, 32)
        return selection, k.sparse_mla(absorbed[part], latent, selection, rows, FMT, 0.06)

    selection, attended = run(torch.arange(count))
    parts = [torch.tensor([i]) for i in range(count)] + [
        torch.arange(7, 19),
        torch.randperm(count),
        seq.nonzero()[:, 0],
    ]
    for part in parts:
        got = run(part)
        assert torch.equal(got[0], selection[part])
        assert torch.equal(got[1], attended[part])


def test_a_longer_history_of_others_changes_no_score() -> None:
    """The same query row, once with a companion that reaches far beyond it."""
    k, table, _, index = attention_inputs()
    q, w = torch.randn(2, 4, 128), torch.randn(2, 4)
    alone = QueryRows(torch.tensor([0]), torch.tensor([700]), table)
    both = QueryRows(torch.tensor([0, 0]), torch.tensor([700, 1499]), table)
    one = k.index_topk(q[:1], w[:1], alone, index, FMT, 32)
    assert torch.equal(k.index_topk(q, w, both, index, FMT, 32)[:1], one)
