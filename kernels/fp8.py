"""e4m3 arithmetic shared by the reference ops: exact decode, power-of-two scales, activation quantisation."""

import functools

import torch
from torch import Tensor

from headrace.kernels.formats import FP8_MAX, SCALE_FLOOR, SCALE_TILE
from headrace.kernels.launch import fp8_dtype

ACTIVATION_FLOOR = 1e-10


@functools.cache
def _decode_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes.to(torch.float32).to(device, dtype)


def decode(codes: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 e4m3 codes -> their values, fp32 or bf16 (both hold every one exactly), of the same shape. A table look-up
    is several times faster than the cast on CPUs."""
    table = _decode_table(codes.device, dtype if out is None else out.dtype)
    flat = codes.reshape(-1).int()
    if out is None:
        return table.index_select(0, flat).view(codes.shape)
    torch.index_select(table, 0, flat, out=out.view(-1))
    return out


def encode(x: Tensor) -> Tensor:
    """fp32 -> uint8 e4m3 codes, nearest even, saturating at 448."""
    return readable(x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8))


def readable(codes: Tensor) -> Tensor:
    """uint8 OCP codes as the matrix units of their device may read them: where these are fnuz, 0x80 is NaN, so the
    negative zero becomes the other one."""
    if fp8_dtype(codes.device) == torch.float8_e4m3fn:
        return codes
    return torch.where(codes == 0x80, 0, codes)


def over_fp8_max(amax: Tensor) -> Tensor:
    """amax / 448, correctly rounded everywhere: CUDA turns a division by a number into a product with its inverse."""
    return amax / amax.new_full((1,), FP8_MAX)


def power_of_two_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(max(amax, 1e-4) / 448)), exact: taken from the exponent, not from a logarithm."""
    mantissa, exponent = torch.frexp(over_fp8_max(amax.clamp_min(SCALE_FLOOR)))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def quantise_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [t, D] -> (uint8 codes [t, D], fp32 scales [t, ceil(D/128)]): amax/448 per row and 128 channels."""
    rows, width = x.shape
    tiles = -(-width // SCALE_TILE)
    if width % SCALE_TILE:
        x = torch.nn.functional.pad(x, (0, tiles * SCALE_TILE - width))
    grouped = x.reshape(rows, tiles, SCALE_TILE)
    scales = over_fp8_max(grouped.abs().amax(-1).clamp_min(ACTIVATION_FLOOR))
    codes = encode(grouped / scales.unsqueeze(-1)).view(rows, tiles * SCALE_TILE)
    return codes[:, :width].contiguous(), scales


def dequantise_activation(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantise_activation`."""
    values = decode(codes)
    width = codes.shape[1]
    if width % SCALE_TILE:
        return values * scales.repeat_interleave(SCALE_TILE, 1)[:, :width]
    return (values.view(*scales.shape, SCALE_TILE) * scales.unsqueeze(-1)).view(codes.shape)


def dequantise_weight(data: Tensor, scale: Tensor | None) -> Tensor:
    """[out, in] e4m3 with 128 x 128 block multipliers (last blocks may be partial), or a float weight -> fp32."""
    if scale is None:
        return data.to(torch.float32)
    out, inner = data.shape
    rows = scale.to(torch.float32).repeat_interleave(SCALE_TILE, 0)[:out]
    return decode(data.view(torch.uint8)) * rows.repeat_interleave(SCALE_TILE, 1)[:, :inner]
