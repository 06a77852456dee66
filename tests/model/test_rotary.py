"""Rotary angles up to a million positions: the fp32 angles every framework builds, whatever was asked for before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.model.rotary import RotaryTable, inverse_frequencies
from headrace.model.spec import ModelSpec, RopeSpec

MILLION = 1 << 20
PLACES = [0, 1, 4095, 4096, 65_537, 163_839, 524_287, 999_999, MILLION - 1]
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip


def spec_of(rope: dict[str, Any]) -> RopeSpec:
    return RopeSpec(
        theta=rope["rope_theta"], yarn_factor=rope["factor"], mscale=rope["mscale"],
        mscale_all_dim=rope["mscale_all_dim"], original_max_position=rope["original_max_position_embeddings"],
    )  # fmt: skip


@pytest.mark.parametrize("case", ["glm-5.2", "deepseek-v3.2", "yarn"])
def test_angles_equal_transformers_at_a_million(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

    if case == "yarn":
        rope, raw = spec_of(YARN), YARN
    else:
        rope = ModelSpec.from_dir(case).rope
        raw = {"rope_type": "default", "rope_theta": rope.theta}
        if rope.yarn_factor > 1:
            raw = YARN | {"mscale_all_dim": rope.mscale_all_dim}
    config = transformers.DeepseekV32Config(num_hidden_layers=1, rope_parameters=raw, max_position_embeddings=MILLION)
    theirs = DeepseekV32RotaryEmbedding(config)
    positions = torch.tensor(PLACES)
    assert torch.equal(inverse_frequencies(rope, 64), theirs.inv_freq)
    cos, sin = RotaryTable(rope, 64, torch.device("cpu")).at(positions)
    wanted = theirs(torch.zeros(1), positions[None])
    for got, want in zip((cos, sin), wanted):
        # The same fp32 angle; vectorised and scalar cosines may differ in the last place.
        torch.testing.assert_close(got, want[0, :, :32], rtol=0, atol=1.8e-7)


def test_angles_are_fp32_and_not_better() -> None:
    """An fp64 angle would differ from every other engine's at long range: by hundredths at a million."""
    frequencies = inverse_frequencies(RopeSpec(theta=8e6), 64)
    cos, _ = RotaryTable(RopeSpec(theta=8e6), 64, torch.device("cpu")).at(torch.tensor([999_999]))
    angles = torch.tensor(999_999.0) * frequencies
    torch.testing.assert_close(cos[0].double(), angles.double().cos(), rtol=0, atol=1.2e-7)
    exact = (999_999 * 8e6 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)).cos()
    assert (cos[0] - exact).abs().max() > 0.005


def test_bits_do_not_depend_on_what_was_asked_before() -> None:
    def asked(*orders: list[int]) -> tuple[Tensor, Tensor]:
        table = RotaryTable(RopeSpec(theta=1e6), 64, torch.device("cpu"))
        for order in orders:
            table.at(torch.tensor(order))
        return table.at(torch.tensor(PLACES[:6]))

    once = asked()
    for orders in (([0], [5000], [4095]), ([20_000], [70_000], [163_839]), ([163_839],)):
        for got, wanted in zip(asked(*orders), once):
            assert torch.equal(got, wanted)
