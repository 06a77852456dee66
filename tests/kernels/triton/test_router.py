"""Choice of experts against the reference: the same experts wherever scores are apart, the same weights."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.kernels.base import KernelContext, RouterRule
from headrace.kernels.router.reference import ReferenceRouter
from headrace.kernels.router.triton import TritonRouter

PLAIN = ReferenceRouter(KernelContext(torch.device("cpu"), deterministic=False))
FREE = RouterRule(4, 1, 1, True, 2.5)


def problem(rows: int, width: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores far enough apart that rounding changes no choice: checked, not assumed."""
    x = torch.randn(rows, width)
    gate = torch.randn(experts, width) / width**0.5
    return x, gate, torch.randn(experts) * 0.1 + 5


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "experts", "rule"),
    [
        (0, 64, 16, FREE),
        (1, 64, 16, FREE),
        (37, 200, 24, FREE),
        (70, 96, 8, RouterRule(2, 1, 1, False, 1.0)),
        (19, 128, 32, RouterRule(4, 8, 4, True, 2.5)),
        (5, 64, 24, RouterRule(3, 4, 2, True, 1.5)),
        (5, 64, 16, RouterRule(3, 16, 5, True, 1.5)),
    ],
)
def test_router(
    device: torch.device, rows: int, width: int, experts: int, rule: RouterRule, deterministic: bool
) -> None:
    x, gate, bias = problem(rows, width, experts)
    op = TritonRouter(KernelContext(device, deterministic))
    for _ in range(2):  # the second call finds the counters as the first left them
        ids, weights = op(x.to(device), gate.to(device), bias.to(device), rule)
        wanted_ids, wanted = PLAIN(x, gate, bias, rule)
        assert torch.equal(ids.cpu(), wanted_ids)
        torch.testing.assert_close(weights.cpu(), wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [RouterRule(4, 1, 1, True, 2.5), RouterRule(4, 4, 2, True, 2.5)])
def test_equal_scores_go_to_the_lower_expert(device: torch.device, rule: RouterRule) -> None:
    op = TritonRouter(KernelContext(device, True))
    x, gate, bias = torch.ones(3, 64), torch.zeros(16, 64), torch.zeros(16)
    bias[5] = 1
    got = op(x.to(device), gate.to(device), bias.to(device), rule)[0].cpu()
    assert torch.equal(got, PLAIN(x, gate, bias, rule)[0])


def test_the_bias_only_chooses(device: torch.device) -> None:
    """A published bias has a large common offset: its size must not reach the weights."""
    op = TritonRouter(KernelContext(device, True))
    x, gate, bias = (v.to(device) for v in problem(9, 64, 16))
    one = op(x, gate, bias, FREE)
    two = op(x, gate, bias + 64, FREE)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    """On sums that are exact, because a CPU's matrix library orders a row's sum by where the row lies."""
    op = TritonRouter(KernelContext(device, True))
    x, gate, bias = (v.to(device) for v in problem(70, 192, 16))
    if device.type == "cpu":
        x, gate = (x * 8).round(), (gate * 64).round() / 64
    whole = op(x, gate, bias, FREE)
    for part in (slice(0, 1), slice(3, 8), slice(17, 70)):
        for got, wanted in zip(op(x[part], gate, bias, FREE), whole):
            assert torch.equal(got, wanted[part])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 128, 640, 4099])
@pytest.mark.parametrize("deterministic", [True, False])
def test_published_size(rows: int, deterministic: bool) -> None:
    """256 experts of 6,144 channels. Where fp32 sums of another order could swap two experts, the swapped ones must be
    that close in fp64."""
    cuda = torch.device("cuda")
    x, gate, bias = problem(rows, 6144, 256)
    ids, weights = TritonRouter(KernelContext(cuda, deterministic))(
        x.to(cuda), gate.to(cuda), bias.to(cuda), RouterRule(8, 1, 1, True, 2.5)
    )
    scores = torch.sigmoid(x.double() @ gate.double().T)
    choice = scores + bias
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids.cpu().long(), True)
    assert bool((chosen.sum(1) == 8).all())
    worst, best_left = torch.where(chosen, choice, torch.inf).amin(1), torch.where(chosen, -torch.inf, choice).amax(1)
    assert bool((worst > best_left - 1e-6).all())
    own = scores.gather(1, ids.cpu().long())
    torch.testing.assert_close(weights.cpu().double(), own / own.sum(1, keepdim=True) * 2.5, rtol=2e-5, atol=1e-7)
