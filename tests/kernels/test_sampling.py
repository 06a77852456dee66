"""Sampling: the right distribution, keyed noise, filters, penalties and log-probabilities."""

import math

import pytest
import torch

from headrace.kernels.sampling.reference import (
    Filters,
    adjust,
    gumbel,
    log_probs,
    noise_key,
    sample,
    target_log_probs,
)
from headrace.messages import SamplingParams
from headrace.model.sampler import SamplerState, sample_rows, verify


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 9 degrees of freedom: 27.9 is the 0.1% point."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(2))
    wanted = torch.softmax(logits.double() / 0.8, -1)
    draws = 4000
    counts = torch.zeros(10, dtype=torch.float64)
    for index in range(draws):
        counts[sample(logits, Filters(0.8), noise_key(7, 0, index))] += 1
    chi = ((counts - draws * wanted).square() / (draws * wanted)).sum()
    assert chi < 27.9


def test_noise_is_uniform_and_keyed() -> None:
    noise = gumbel(noise_key(1, 0, 0), 100_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    others = [noise_key(1, 0, 1), noise_key(1, 1, 0), noise_key(2, 0, 0), noise_key(-1, 0, 0)]
    for key in others:
        other = gumbel(key, 100_000)
        assert torch.corrcoef(torch.stack((noise, other)))[0, 1].abs() < 0.02
    assert torch.equal(gumbel(noise_key(1, 0, 0), 100), noise[:100])


def test_the_noise_never_changes() -> None:
    """Fixed values: another build must draw the same tokens from the same seeds."""
    assert noise_key(42, 1, 5) == 0xF25C2918D13913A4
    torch.testing.assert_close(
        gumbel(noise_key(42, 1, 5), 3), torch.tensor(VECTOR, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


VECTOR = [0.13805329093083, 1.52380174818844, 0.15785795516346]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample(torch.tensor([1.0, 3.0, 3.0, 2.0]), Filters(0.0), 0) == 1


def test_filters() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])

    def kept(filters: Filters) -> list[int]:
        return target_log_probs(logits, filters).isfinite().nonzero().flatten().tolist()

    assert kept(Filters(1.0)) == [0, 1, 2, 3, 4]
    assert kept(Filters(1.0, top_k=2)) == [0, 1]
    assert kept(Filters(1.0, top_p=0.65)) == [0, 1]  # the token that crosses 0.65 stays
    assert kept(Filters(1.0, top_p=1e-9)) == [0]
    assert kept(Filters(1.0, min_p=0.1)) == [0, 1, 2]
    assert kept(Filters(1.0, top_k=4, top_p=0.9, min_p=0.01)) == [0, 1, 2]
    assert target_log_probs(logits, Filters(1.0, top_k=3)).exp().sum().item() == pytest.approx(1)


def test_penalties_and_bias() -> None:
    logits = torch.zeros(4)
    got = adjust(logits, {1: 1, 2: 3}, 0.5, 0.1, {3: 7.0})
    torch.testing.assert_close(got, torch.tensor([0.0, -0.6, -0.8, 7.0]))
    assert adjust(logits, {1: 1}, 0.0, 0.0, {}) is logits
    assert not logits.any()


def test_log_probs_are_the_models_own() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, -torch.inf])
    own, best = log_probs(logits, 0, 2)
    wanted = torch.log_softmax(logits.double(), -1)
    assert own == pytest.approx(wanted[0].item())
    assert [token for token, _ in best] == [1, 2]
    assert log_probs(logits, 0, 0)[1] == []


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "temperature": 0.0} | changes))  # type: ignore[arg-type]


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 8).float()


def test_verify_accepts_the_matching_prefix_and_adds_one() -> None:
    checked = verify(SamplerState(params()), one_hot(3, 4, 5, 6), [3, 4, 7])
    assert (checked.tokens, checked.accepted, checked.finish_reason) == ([3, 4, 5], 2, None)
    checked = verify(SamplerState(params()), one_hot(3, 4), [3])
    assert (checked.tokens, checked.accepted) == ([3, 4], 1)
    checked = verify(SamplerState(params()), one_hot(2), [])
    assert (checked.tokens, checked.accepted) == ([2], 0)


def test_verify_cuts_at_stop_and_length() -> None:
    stop = verify(SamplerState(params(stop_token_ids=(4,))), one_hot(3, 4, 5), [3, 4])
    assert (stop.tokens, stop.accepted, stop.finish_reason) == ([3, 4], 2, "stop")
    length = verify(SamplerState(params(max_tokens=3), output_index=1), one_hot(3, 4, 5), [3, 4])
    assert (length.tokens, length.accepted, length.finish_reason) == ([3, 4], 2, "length")


def test_verify_penalises_the_hypothesised_history() -> None:
    """Row 1 follows draft 3, so token 3 is penalised there although nothing was committed before this step."""
    logits = torch.tensor([[0, 0, 0, 1.0], [0, 0.5, 0, 1.0]])
    checked = verify(SamplerState(params(frequency_penalty=0.6)), logits, [3])
    assert checked.tokens == [3, 1]


def test_sample_rows_commits_each_row_to_its_state() -> None:
    states = [SamplerState(params(max_tokens=1)), SamplerState(params(seed=3))]
    assert sample_rows(one_hot(5, 6), states) == [(5, None, "length"), (6, None, None)]
    assert [state.output_index for state in states] == [1, 1]
