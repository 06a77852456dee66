"""aiter's MLA decode over selected rows: every query row is a sequence of length 1 whose pages are its selected cache
rows (page size 1).

Heads go in groups of 16, each group a sequence of its own: its bf16-query, fp8-row kernel knows 16 heads only, and
queries in fp8 would cost more accuracy than the op allows. Fewer heads are repeated up to 16.
"""

import torch
from torch import Tensor

from headrace.kernels.aiter_library import HEAD_GROUP, accepts, call, check_offsets, fp8_type, stored_gain
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import LATENT_DIM, RowFormat
from headrace.kernels.rows import cache_rows

SPLITS = 16
"""Given always: without it aiter leaves its persistent kernel at some batch sizes"""
WIDTH = 576
META = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
"""The order in which sizes of the metadata buffers come back"""


class AiterSparseMla:
    def __call__(
        self, q: Tensor, plane: Tensor, selection: Tensor, rows: QueryRows, fmt: RowFormat, scale: float
    ) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return torch.zeros((0, heads, LATENT_DIM), dtype=torch.float32, device=q.device)
        check_offsets(plane, "the plane of latent rows")
        grouped, groups = group_heads(q.to(torch.bfloat16))
        indptr, indices, empty = pages(selection, rows, groups)
        out = torch.empty((grouped.shape[0], HEAD_GROUP, LATENT_DIM), dtype=torch.bfloat16, device=q.device)
        sequences = grouped.shape[0]
        one_each = torch.arange(sequences + 1, dtype=torch.int32, device=q.device)
        last_page = torch.ones(sequences, dtype=torch.int32, device=q.device)
        meta = metadata(one_each, indptr, last_page, fp8_type(q.device))
        call(
            "mla_decode_fwd", q=grouped, kv_buffer=plane.view(fp8_type(q.device)).view(-1, 1, 1, WIDTH), o=out,
            qo_indptr=one_each, kv_indptr=indptr, kv_indices=indices, kv_last_page_lens=last_page, max_seqlen_q=1,
            sm_scale=scale, num_kv_splits=SPLITS, kv_scale=torch.full((1,), stored_gain(q.device), device=q.device),
            optional={"page_size": 1, "nhead_kv": 1}, **meta,
        )  # fmt: skip
        repeated = max(HEAD_GROUP // heads, 1)
        result = out.view(count, groups * HEAD_GROUP, LATENT_DIM)[:, ::repeated].to(torch.float32)
        return result.masked_fill_(empty.view(-1, 1, 1), 0.0)


def group_heads(q: Tensor) -> tuple[Tensor, int]:
    """[t, H, 576] -> ([t * groups, 16, 576], groups)."""
    heads, width = q.shape[1:]
    if heads < HEAD_GROUP:
        q = q.repeat_interleave(HEAD_GROUP // heads, 1)
    return q.reshape(-1, HEAD_GROUP, width), q.shape[1] // HEAD_GROUP


def pages(selection: Tensor, rows: QueryRows, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(int32 [sequences + 1] starts, int32 cache rows one sequence after the other, bool [t] rows without any).

    Nothing is read back: the list has room for all, and a row without a selection gets one page that its result does
    not use."""
    count, k = selection.shape
    where = cache_rows(rows.block_tables, rows.seq.unsqueeze(1).expand(count, k), selection.clamp_min(0).long())
    valid = (selection >= 0) & (where >= 0)
    empty = ~valid.any(1)
    where, valid = where.clamp_min(0), valid.clone()
    valid[:, 0] |= empty
    where = where.repeat_interleave(groups, 0)
    valid = valid.repeat_interleave(groups, 0)
    sizes = valid.sum(1)
    indptr = torch.zeros(sizes.shape[0] + 1, dtype=torch.int64, device=selection.device)
    indptr[1:] = sizes.cumsum(0)
    spare = where.numel()
    place = torch.where(valid, indptr[:-1, None] + valid.cumsum(1) - 1, spare)
    indices = torch.zeros(spare + 1, dtype=torch.int32, device=selection.device)
    indices.scatter_(0, place.flatten(), where.flatten().int())
    return indptr.int(), indices[:spare], empty


def metadata(qo_indptr: Tensor, kv_indptr: Tensor, last_page: Tensor, kv_dtype: torch.dtype) -> dict[str, Tensor]:
    """Work lists of the persistent kernel. Made anew for each call: lists that are kept by batch size instead of by
    every length gave wrong results elsewhere."""
    sequences = qo_indptr.shape[0] - 1
    sizes = call(
        "get_mla_metadata_info_v1", batch_size=sequences, max_seqlen_qo=1, num_head_qo=HEAD_GROUP,
        q_dtype=torch.bfloat16, kv_dtype=kv_dtype, is_sparse=True, fast_mode=True,
        optional={"num_kv_splits": SPLITS, "max_split_per_batch": SPLITS},
    )  # fmt: skip
    buffers = {
        name: torch.empty(size, dtype=dtype, device=qo_indptr.device) for name, (size, dtype) in zip(META, sizes)
    }
    renamed = "work_info_set" if accepts("get_mla_metadata_v1", "work_info_set") else "work_info"
    call(
        "get_mla_metadata_v1", seqlens_qo_indptr=qo_indptr, seqlens_kv_indptr=kv_indptr,
        num_heads_per_head_k=HEAD_GROUP, num_heads_k=1, is_causal=False, work_metadata_ptrs=buffers["work_meta_data"],
        work_indptr=buffers["work_indptr"], reduce_indptr=buffers["reduce_indptr"],
        reduce_final_map=buffers["reduce_final_map"], reduce_partial_map=buffers["reduce_partial_map"],
        kv_granularity=16, max_seqlen_qo=1, uni_seqlen_qo=1, fast_mode=True, max_split_per_batch=SPLITS,
        optional={"kv_last_page_lens": last_page, "page_size": 1, "dtype_q": torch.bfloat16, "dtype_kv": kv_dtype},
        **{renamed: buffers["work_info_set"]},
    )  # fmt: skip
    return buffers


def create(context: KernelContext) -> AiterSparseMla:
    return AiterSparseMla()
