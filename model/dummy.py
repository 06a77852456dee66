"""Random weights of any model, made where they are used: on a GPU nothing passes through the host.

Every value is a hash of (seed, tensor name, place in the tensor), in integers, mapped through a table of quantiles of
the normal distribution. So neither the device nor the split over ranks changes a bit, and each rank of any placement
holds shards of the same model. FP8 codes come straight from the hash: nothing is quantised. A block's scale is the
usual one for its spread, times something between 0.75 and 1.25, so that neighbours differ. Whoever changes a value
changes `DUMMY_VERSION` in `weights_version.py`.
"""

import functools
import hashlib
import math
import statistics

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.formats import FP8_MAX
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_SUFFIX, model_tensors, scale_shape

_WORDS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Hashed at a time: 8 bytes each, a few buffers. The values do not depend on it."""
_MASK = 0xFFFFFFFF


class DummySource:
    """A TensorSource on `device`. `quantised` False: bf16, as the BF16 repositories; None: as the config announces."""

    def __init__(
        self, spec: ModelSpec, seed: int, quantised: bool | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._seed, self._device = seed, torch.device(device)
        self._shapes = {tensor.name: tensor for tensor in model_tensors(spec)}
        fp8_matrices = spec.quantised if quantised is None else quantised
        self._scaled = {name for name, tensor in self._shapes.items() if fp8_matrices and tensor.quantisable}

    def has(self, name: str) -> bool:
        if name.endswith(SCALE_SUFFIX):
            return name.removesuffix(SCALE_SUFFIX) in self._scaled
        return name in self._shapes

    def get(self, name: str) -> Tensor:
        """In the stored dtype: e4m3, bf16, or fp32 for scales and router biases."""
        base = name.removesuffix(SCALE_SUFFIX)
        shape = self._shapes[base].shape
        if name != base:
            spread = shape[1] ** -0.5 * _largest(256) / FP8_MAX
            return self._uniform(name, scale_shape(shape)).div_(2).add_(0.75).mul_(spread)
        if name in self._scaled:
            codes = self._looked_up(name, math.prod(shape), 1, _code_table(self._device))
            return codes.view(torch.float8_e4m3fn).view(shape)
        values = self._looked_up(name, math.prod(shape), 2, _normal_table(self._device)).view(shape)
        if len(shape) == 2:
            values.mul_(1.0 if name.endswith("embed_tokens.weight") else shape[1] ** -0.5)
        elif name.endswith("norm.weight"):
            values.mul_(0.1).add_(1.0)
        else:
            values.mul_(0.05)
        return values if name.endswith("e_score_correction_bias") else values.to(torch.bfloat16)

    def _uniform(self, name: str, shape: tuple[int, int]) -> Tensor:
        """fp32 in [0, 1), steps of 2^-8: exact."""
        steps = torch.arange(256, dtype=torch.float32, device=self._device) / 256
        return self._looked_up(name, math.prod(shape), 1, steps).view(shape)

    def _looked_up(self, name: str, count: int, width: int, table: Tensor) -> Tensor:
        """`count` values of a table that has an entry for every number of `width` bytes."""
        out = torch.empty(count, dtype=table.dtype, device=self._device)
        key = hashlib.sha256(f"{self._seed}|{name}".encode()).digest()
        keys = [int.from_bytes(key[at : at + 4], "little") for at in (0, 4)]
        step = _WORDS.get(self._device.type, _WORDS["cuda"])
        per_word = 4 // width
        for start in range(0, -(-count // per_word), step):
            first, last = start * per_word, min((start + step) * per_word, count)
            words = torch.arange(start, start - (first - last) // per_word, device=self._device)
            for one in keys:
                words.bitwise_xor_(one)
                _mix(words)
            numbers = _split(words, width)[: last - first]
            torch.index_select(table, 0, numbers, out=out[first:last])
        return out


def _mix(words: Tensor) -> None:
    """A bijection of 32-bit numbers held in int64, in place; its factors are below 2^31, so no product overflows."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words.bitwise_xor_(words >> shift)
        words.mul_(factor).bitwise_and_(_MASK)
    words.bitwise_xor_(words >> 15)


def _split(words: Tensor, width: int) -> Tensor:
    """int64 [n] holding 32 bits each -> int32 [n * 4 / width], lowest part first."""
    parts = [(words >> (8 * width * i)).bitwise_and_((1 << 8 * width) - 1) for i in range(4 // width)]
    return torch.stack([part.to(torch.int32) for part in parts], 1).flatten()


@functools.cache
def _quantiles(count: int) -> tuple[float, ...]:
    normal = statistics.NormalDist()
    half = [normal.inv_cdf((i + 0.5) / count) for i in range(count // 2)]
    return (*half, *(-value for value in reversed(half)))


def _largest(count: int) -> float:
    return _quantiles(count)[-1]


@functools.cache
def _normal_table(device: torch.device) -> Tensor:
    return torch.tensor(_quantiles(1 << 16), dtype=torch.float32).to(device)


@functools.cache
def _code_table(device: torch.device) -> Tensor:
    values = torch.tensor(_quantiles(256), dtype=torch.float64) * (FP8_MAX / _largest(256))
    return fp8.encode(values.to(torch.float32)).to(device)
