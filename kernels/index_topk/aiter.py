"""aiter's index logits and top-k. Few rows a sequence: paged logits, each query row a sequence of its own, so that any
bound is exact and the host learns nothing. Many rows: a sequence's keys gathered once, logits in bounded calls.

Every call stays under the two bounds of `aiter_library`. Selections come back sorted and complete: rows with at most k
visible keys are written here, because aiter's selection knows no first row.
"""

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels import fp8
from headrace.kernels.aiter_library import accepts, call, check_offsets, fp8_type, logits_rows, stored_gain
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, INDEX_DIM, RowFormat
from headrace.kernels.index_topk.reference import select_all
from headrace.kernels.rows import history_slots, sequence_groups

PAGED_ROWS = 8
"""Rows a sequence up to which paged logits are used: each row reads its keys anew"""
FIXED_K = 2048
"""Of releases whose top-k takes no k"""
LAST = 2**31 - 1


class AiterIndexTopk:
    def __call__(self, q: Tensor, weights: Tensor, rows: QueryRows, plane: Tensor, fmt: RowFormat, k: int) -> Tensor:
        if not q.shape[0]:
            return torch.empty((0, k), dtype=torch.int32, device=q.device)
        if k != FIXED_K and not accepts("top_k_per_row_prefill", "k"):
            raise KernelUnsupported(f"this release of aiter selects {FIXED_K} keys a row, not {k}")
        check_offsets(plane, "the plane of index keys")
        codes, gains = quantise_query(q, weights)
        paged = q.shape[0] <= PAGED_ROWS * rows.block_tables.shape[0] and accepts(
            "deepgemm_fp8_paged_mqa_logits", "KVBlockSize"
        )
        chosen = (self._paged if paged else self._gathered)(codes, gains, rows, plane, k)
        ordered = torch.where(chosen < 0, LAST, chosen).sort(-1).values
        few = (rows.last_row - rows.first_row + 1 <= k).unsqueeze(1)
        return torch.where(few, select_all(rows.last_row, rows.first_row, k), ordered)

    @staticmethod
    def _paged(codes: Tensor, gains: Tensor, rows: QueryRows, plane: Tensor, k: int) -> Tensor:
        """Each row with next_n = 1, its context ending at its own last row."""
        width = rows.block_tables.shape[1] * BLOCK_TOKENS
        cache = plane.view(-1, BLOCK_TOKENS, 1, INDEX_DIM + 4)
        tables = rows.block_tables.clamp_min(0).int()
        chosen = torch.full((codes.shape[0], k), -1, dtype=torch.int32, device=codes.device)
        step = logits_rows(width)
        for start in range(0, codes.shape[0], step):
            part = slice(start, start + step)
            lengths = (rows.last_row[part] + 1).clamp_min(0).int()
            logits = torch.full((lengths.shape[0], width), -torch.inf, device=codes.device)
            call(
                "deepgemm_fp8_paged_mqa_logits", q_fp8=codes[part].unsqueeze(1), kv_cache=cache, weights=gains[part],
                out_logits=logits, context_lens=lengths, kv_indices=tables[rows.seq[part]].contiguous(),
                max_model_len=width, KVBlockSize=BLOCK_TOKENS, optional={"Preshuffle": False},
            )  # fmt: skip
            logits[:, : rows.first_row] = -torch.inf
            call(
                "top_k_per_row_decode", logits=logits, next_n=1, seqLens=lengths, indices=chosen[part],
                numRows=logits.shape[0], stride0=logits.stride(0), stride1=logits.stride(1),
                optional={"k": k, "stable": True},
            )  # fmt: skip
        return chosen

    @staticmethod
    def _gathered(codes: Tensor, gains: Tensor, rows: QueryRows, plane: Tensor, k: int) -> Tensor:
        """Sequence by sequence, `logits_rows` query rows a call."""
        device = codes.device
        chosen = torch.full((codes.shape[0], k), -1, dtype=torch.int32, device=device)
        for seq, members, last in sequence_groups(rows):
            count = last + 1
            if count - rows.first_row <= k:
                continue
            keys, scales = gather_keys(plane, history_slots(rows, seq, count), count)
            step = logits_rows(count)
            for start in range(0, members.shape[0], step):
                part = members[start : start + step]
                ends = (rows.last_row[part] + 1).clamp_min(rows.first_row).int()
                starts = torch.full_like(ends, rows.first_row)
                logits = call(
                    "fp8_mqa_logits", Q=codes[part], KV=keys, kv_scales=scales, weights=gains[part], cu_starts=starts,
                    cu_ends=ends, optional={"clean_logits": True},
                )  # fmt: skip
                found = torch.full((part.shape[0], k), -1, dtype=torch.int32, device=device)
                call(
                    "top_k_per_row_prefill", logits=logits, rowStarts=starts, rowEnds=ends, indices=found, values=None,
                    numRows=part.shape[0], stride0=logits.stride(0), stride1=logits.stride(1),
                    optional={"k": k, "stable": True},
                )  # fmt: skip
                chosen[part] = found
        return chosen


def quantise_query(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(codes in aiter's fp8, weights with the scales of queries and what fnuz loses of both factors): the reference's
    quantisation."""
    scale = fp8.power_of_two_scale(q.abs().amax(-1))
    codes = fp8.encode(q / scale.unsqueeze(-1)).view(fp8_type(q.device))
    return codes, (weights * scale * stored_gain(q.device) ** 2).contiguous()


def gather_keys(plane: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keys of one sequence, contiguous: (codes [count, 128], fp32 scales [count])."""
    device = plane.device
    keys = torch.empty((count, INDEX_DIM), dtype=torch.uint8, device=device).view(fp8_type(device))
    scales = torch.empty((count, 1), dtype=torch.float32, device=device)
    call(
        "cp_gather_indexer_k_quant_cache", kv_cache=plane.view(-1, BLOCK_TOKENS, INDEX_DIM + 4), dst_k=keys,
        dst_scale=scales.view(torch.uint8), block_table=slots.int().unsqueeze(0),
        cu_seq_lens=torch.tensor([0, count], dtype=torch.int32, device=device), optional={"preshuffle": False},
    )  # fmt: skip
    return keys, scales.flatten()


def create(context: KernelContext) -> AiterIndexTopk:
    return AiterIndexTopk()
