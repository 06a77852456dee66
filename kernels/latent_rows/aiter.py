"""aiter's writer of latent rows: one per-tensor scale, which is our `plain576`. `tile656` it does not know."""

import torch
from torch import Tensor

from headrace.kernels.aiter_library import call, fp8_type, stored_gain
from headrace.kernels.base import KernelContext
from headrace.kernels.formats import FP8_MAX, RowFormat
from headrace.kernels.latent_rows.triton import TritonLatentRows


class AiterLatentRows(TritonLatentRows):
    def quantise(self, latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
        rows = latent.shape[0]
        out = torch.empty((rows, fmt.latent_row_bytes), dtype=torch.uint8, device=latent.device)
        if rows:
            # Its conversion is not promised to saturate. A scale of 2 writes fnuz codes of half the value: OCP bytes.
            parts = (part.clamp(-FP8_MAX, FP8_MAX).to(torch.bfloat16).contiguous() for part in (latent, rope))
            kv_c, k_pe = parts
            call(
                "concat_and_cache_mla", kv_c=kv_c, k_pe=k_pe,
                kv_cache=out.view(1, rows, fmt.latent_row_bytes).view(fp8_type(out.device)),
                slot_mapping=torch.arange(rows, dtype=torch.int64, device=out.device), kv_cache_dtype="fp8",
                scale=torch.full((1,), stored_gain(out.device), device=out.device),
            )  # fmt: skip
        return out


def create(context: KernelContext) -> AiterLatentRows:
    return AiterLatentRows()
