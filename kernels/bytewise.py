"""Reinterpreting tensors as bytes and back, also with zero rows (torch refuses to view an empty tensor whose last
stride is not 1)."""

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """[..., n] of any dtype -> uint8 [..., n * itemsize]."""
    if x.numel():
        return x.contiguous().view(torch.uint8)
    return torch.empty((*x.shape[:-1], x.shape[-1] * x.element_size()), dtype=torch.uint8, device=x.device)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `as_bytes`."""
    if x.numel():
        return x.contiguous().view(dtype)
    return torch.empty((*x.shape[:-1], x.shape[-1] // dtype.itemsize), dtype=dtype, device=x.device)
