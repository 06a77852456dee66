"""Draws of many rows against the reference's, one at a time: the same token from the same key."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext
from headrace.kernels.sampling.reference import Filters, ReferenceSampling, gumbel, noise_key, sample, sample_rows
from headrace.kernels.sampling.triton import TritonSampling

PLAIN = ReferenceSampling(KernelContext(torch.device("cpu"), True))
FILTERS = (
    Filters(1.0),
    Filters(0.0),
    Filters(0.7, top_k=5),
    Filters(1.0, top_k=1),
    Filters(1.0, top_p=0.95),
    Filters(1.5, top_p=0.3),
    Filters(1.0, top_p=1e-9),
    Filters(0.9, min_p=0.05),
    Filters(1.2, top_k=40, top_p=0.9, min_p=0.01),
    Filters(1.0, top_k=100_000_000),
)


def agree(device: torch.device, logits: torch.Tensor, filters: list[Filters], keys: list[int]) -> None:
    got = TritonSampling(KernelContext(device, True)).sample(logits.to(device), sample_rows(filters, keys, device))
    wanted = [sample(row, f, key) for row, f, key in zip(logits, filters, keys)]
    assert got.tolist() == wanted


@pytest.mark.parametrize("vocabulary", [7, 100, 5000])
def test_the_reference_s_tokens(device: torch.device, vocabulary: int) -> None:
    rows = [(f, seed) for f, seed in itertools.product(FILTERS, range(3))]
    logits = torch.randn(len(rows), vocabulary) * 3
    agree(device, logits, [f for f, _ in rows], [noise_key(seed, 1, i) for i, (_, seed) in enumerate(rows)])


def test_equal_values(device: torch.device) -> None:
    """Few distinct values, so bounds fall between equals: top-k keeps all equals of the k-th, top-p the lowest ids."""
    logits = torch.randint(0, 3, (20, 300)).float()
    filters = [FILTERS[i % len(FILTERS)] for i in range(20)]
    agree(device, logits, filters, [noise_key(5, 0, i) for i in range(20)])


def test_minus_infinity_is_never_drawn(device: torch.device) -> None:
    logits = torch.randn(20, 200)
    logits[:, ::2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 77] = -1e30
    filters = [FILTERS[i % len(FILTERS)] for i in range(20)]
    agree(device, logits, filters, [noise_key(6, 0, i) for i in range(20)])


def test_top_p_keeps_the_token_that_crosses_and_no_other(device: torch.device) -> None:
    """Masses 0.449, 0.165 three times, 0.06: the bound falls before, between and after equals."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]).expand(8, 5).contiguous()
    op = TritonSampling(KernelContext(device, True))
    keys = [noise_key(7, 0, i) for i in range(8)]
    for top_p, most in ((0.4, 0), (0.46, 1), (0.7, 2), (0.9, 3), (0.96, 4)):
        filters = [Filters(1.0, top_p=top_p)] * 8
        got = op.sample(logits.to(device), sample_rows(filters, keys, device))
        assert int(got.max()) <= most
        assert got.tolist() == [sample(row, f, key) for row, f, key in zip(logits, filters, keys)]


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    logits, op = torch.randn(12, 4500), TritonSampling(KernelContext(device, True))
    filters, keys = [FILTERS[i % len(FILTERS)] for i in range(12)], [noise_key(9, 0, i) for i in range(12)]
    whole = op.sample(logits.to(device), sample_rows(filters, keys, device))
    for i in (0, 4, 8, 11):
        one = op.sample(logits[i : i + 1].to(device), sample_rows(filters[i : i + 1], keys[i : i + 1], device))
        assert one.tolist() == whole[i : i + 1].tolist()
    assert op.sample(logits[:0].to(device), sample_rows([], [], device)).shape == (0,)


def test_edits(device: torch.device) -> None:
    logits = torch.randn(5, 300)
    rows, ids, amounts = (
        torch.tensor([0, 4, 4, 2]),
        torch.tensor([3, 3, 299, 0]),
        torch.tensor([1.0, -2, 5, -torch.inf]),
    )
    got, wanted = logits.to(device, copy=True), logits.clone()
    TritonSampling(KernelContext(device, True)).edit(got, rows.to(device), ids.to(device), amounts.to(device))
    PLAIN.edit(wanted, rows, ids, amounts)
    assert torch.equal(got.cpu(), wanted)
    wanted_by_hand = logits.clone()
    for row, token, amount in zip(rows, ids, amounts):
        wanted_by_hand[row, token] += amount
    assert torch.equal(wanted, wanted_by_hand)


def test_log_probs_and_acceptance(device: torch.device) -> None:
    op = TritonSampling(KernelContext(device, True))
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf], [0.0, 0.0, 5.0, 1.0]], device=device)
    own, ids, values = op.log_probs(logits, torch.tensor([0, 2], device=device), 3)
    wanted = torch.log_softmax(logits.cpu().double(), -1)
    torch.testing.assert_close(own.cpu(), wanted[[0, 1], [0, 2]])
    assert ids.tolist() == [[1, 2, 0], [2, 3, 0]]
    torch.testing.assert_close(values.cpu(), wanted.gather(1, ids.cpu()))
    tokens = torch.tensor([3, 4, 5, 8, 6, 9, 1, 2, 3], device=device)
    drafts = torch.tensor([3, 4, -1, -1, 6, -1, 7, 2, -1], device=device)
    first = torch.tensor([0, 3, 4, 6, 9], device=device)
    assert op.accepted(tokens, drafts, first).tolist() == [2, 0, 1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_published_size() -> None:
    """154,880 tokens, peaked and flat rows; the draws of a GPU are the CPU reference's."""
    torch.manual_seed(3)
    logits = torch.randn(24, 154_880) * torch.logspace(-1, 1, 24).unsqueeze(1)
    filters = [FILTERS[i % len(FILTERS)] for i in range(24)]
    agree(torch.device("cuda"), logits, filters, [noise_key(11, 0, i) for i in range(24)])


def test_the_noise_is_the_reference_s(device: torch.device) -> None:
    """Flat logits: the draw is the largest noise, over keys with high bits set too."""
    keys = [noise_key(seed, 2, 3) for seed in range(30)]
    assert any(key >> 63 for key in keys)
    got = TritonSampling(KernelContext(device, True)).sample(
        torch.zeros(30, 9000, device=device), sample_rows([Filters(1.0)] * 30, keys, device)
    )
    assert got.tolist() == [int(gumbel(key, 9000).argmax()) for key in keys]
