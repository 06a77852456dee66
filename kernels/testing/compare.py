"""Ways to say how far two tensors are apart."""

import torch
from torch import Tensor


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2) in fp64: the published measure for products and attention. NaN never passes."""
    x, y = x.double(), y.double()
    both = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / both) if bool(both != 0) else 0.0


def poison_(x: Tensor) -> Tensor:
    """Fill with bytes 0xFF: NaN in fp32, bf16 and e4m3."""
    x.view(torch.uint8).fill_(0xFF)
    return x
