"""Definition of query quantisation: scale = max(amax, 1e-10) / 448 over a tensor, a row or 128 channels of a row."""

import torch
from torch import Tensor

from headrace.kernels import fp8
from headrace.kernels.base import Granularity, KernelContext


class ReferenceQuantise:
    def __call__(self, x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
        flat = x.to(torch.float32).reshape(-1, x.shape[-1])
        if granularity is Granularity.GROUP:
            codes, scales = fp8.quantise_activation(flat)
            return codes.view(torch.float8_e4m3fn).view(x.shape), scales.view(*x.shape[:-1], scales.shape[1])
        if granularity is Granularity.TOKEN:
            most = flat.abs().amax(-1)
        else:
            most = flat.abs().amax().view(1) if flat.numel() else flat.new_zeros(1)
        scales = fp8.over_fp8_max(most.clamp_min(fp8.ACTIVATION_FLOOR))
        codes = fp8.encode(flat / scales.unsqueeze(-1)).view(torch.float8_e4m3fn).view(x.shape)
        return codes, scales.view(x.shape[:-1]) if granularity is Granularity.TOKEN else scales


def create(context: KernelContext) -> ReferenceQuantise:
    return ReferenceQuantise()
