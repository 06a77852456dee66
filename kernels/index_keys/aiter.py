"""aiter's quantiser of index keys: a power-of-two scale a key, which is what `tile656` planes hold."""

import torch
from torch import Tensor

from headrace.kernels.aiter_library import call, fp8_type
from headrace.kernels.base import KernelContext
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat
from headrace.kernels.index_keys.reference import KEYS_END
from headrace.kernels.index_keys.triton import TritonIndexKeys
from headrace.kernels.launch import ceil_div


class AiterIndexKeys(TritonIndexKeys):
    def quantise(self, keys: Tensor, fmt: RowFormat) -> Tensor:
        rows = keys.shape[0]
        blocks = ceil_div(rows, BLOCK_TOKENS)
        plane = torch.empty((blocks, fmt.index_plane_bytes), dtype=torch.uint8, device=keys.device)
        if rows:
            call(
                "indexer_k_quant_and_cache", k=keys.to(torch.bfloat16).contiguous(),
                kv_cache=plane.view(blocks, BLOCK_TOKENS, INDEX_DIM + 4).view(fp8_type(keys.device)),
                slot_mapping=torch.arange(rows, dtype=torch.int64, device=keys.device), quant_block_size=INDEX_DIM,
                scale_fmt="ue8m0", optional={"preshuffle": False},
            )  # fmt: skip
        codes = plane[:, :KEYS_END].reshape(-1, INDEX_DIM)
        return torch.cat((codes, plane[:, KEYS_END:].reshape(-1, 4)), -1)[:rows]


def create(context: KernelContext) -> AiterIndexKeys:
    return AiterIndexKeys()
