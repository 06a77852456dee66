"""A package `aiter` for machines without ROCm: functions with recorded signatures that refuse positions and unknown or
missing keywords, note every call, hold what the real ones demand, and compute by plain formulas. It stands for the
contract, not for the library: nothing here says how aiter behaves beyond what its sources state."""

import contextlib
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import aiter_library, fp8
from headrace.kernels.formats import INDEX_DIM

Calls = list[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def installed(signatures: Mapping[str, Any]) -> Iterator[Calls]:
    """Inside, `aiter` is this; gives the list of calls. `signatures`: one profile's functions of the recorded table."""
    calls: Calls = []
    names = {"aiter", *aiter_library.FUNCTIONS.values()}
    names |= {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)}
    modules = {name: types.ModuleType(name) for name in sorted(names)}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    for name, facts in signatures.items():
        setattr(modules[aiter_library.FUNCTIONS[name]], name, strict(name, facts, globals()[f"_{name}"], calls))
    modules["aiter"].QuantType = types.SimpleNamespace(per_1x128=4)  # type: ignore[attr-defined]
    modules["aiter"].ActivationType = types.SimpleNamespace(Silu=0)  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    aiter_library.function.cache_clear()
    try:
        yield calls
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
        aiter_library.function.cache_clear()


def strict(name: str, facts: Mapping[str, Any], body: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    """`body` behind the recorded signature."""

    def function(*positional: Any, **given: Any) -> Any:
        if positional:
            raise TypeError(f"{name} was called with {len(positional)} positional arguments")
        unknown, missing = set(given) - set(facts["arguments"]), set(facts["required"]) - set(given)
        if unknown or missing:
            raise TypeError(f"{name}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        calls.append((name, given))
        return body(**given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(argument, kind) for argument in facts["arguments"]]
    )
    return function


def _rmsnorm2d_fwd(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    assert input.dtype == weight.dtype == torch.bfloat16
    x = input.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()).bfloat16()


def _concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    assert (kv_cache_dtype, slot_mapping.dtype, scale.dtype) == ("fp8", torch.int64, torch.float32)
    rows = torch.cat((kv_c, k_pe), -1).float() / scale
    kv_cache.view(torch.uint8).view(-1, 576)[slot_mapping] = rows.to(kv_cache.dtype).view(torch.uint8)


def _planar(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, block = cache.shape[:2]
    plane = cache.view(torch.uint8).reshape(blocks, -1)
    keys = plane[:, : block * INDEX_DIM].view(blocks, block, INDEX_DIM)
    return keys, plane[:, block * INDEX_DIM :].view(blocks, block, 4)


def _indexer_k_quant_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, scale_fmt: str, preshuffle: bool = False
) -> None:
    assert (k.dtype, quant_block_size, scale_fmt, preshuffle) == (torch.bfloat16, 128, "ue8m0", False)
    keys, scales = _planar(kv_cache)
    block, row = slot_mapping // keys.shape[1], slot_mapping % keys.shape[1]
    scale = fp8.power_of_two_scale(k.float().abs().amax(-1, keepdim=True))
    keys[block, row] = (k.float() / scale).to(kv_cache.dtype).view(torch.uint8)
    scales[block, row] = scale.contiguous().view(torch.uint8)


def _cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor, dst_k: Tensor, dst_scale: Tensor, block_table: Tensor, cu_seq_lens: Tensor,
    preshuffle: bool = False,
) -> None:  # fmt: skip
    assert (block_table.dtype, cu_seq_lens.dtype, preshuffle) == (torch.int32, torch.int32, False)
    keys, scales = _planar(kv_cache)
    for i, (start, end) in enumerate(zip(cu_seq_lens[:-1].tolist(), cu_seq_lens[1:].tolist())):
        row = torch.arange(end - start)
        block = block_table[i, row // keys.shape[1]].long()
        dst_k.view(torch.uint8)[start:end] = keys[block, row % keys.shape[1]]
        dst_scale[start:end] = scales[block, row % keys.shape[1]]


def _scores(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    products = torch.einsum("thd,nd->thn", q.float(), keys.float()).relu()
    return (products * weights.unsqueeze(-1)).sum(1) * scales


def _fp8_mqa_logits(
    Q: Tensor, KV: Tensor, kv_scales: Tensor, weights: Tensor, cu_starts: Tensor, cu_ends: Tensor,
    clean_logits: bool = True,
) -> Tensor:  # fmt: skip
    padded = -(-KV.shape[0] // 256) * 256
    assert Q.shape[0] <= aiter_library.LOGITS_ROWS
    assert 4 * Q.shape[0] * padded < aiter_library.LOGITS_BYTES
    assert cu_starts.dtype == cu_ends.dtype == torch.int32
    out = torch.full((Q.shape[0], padded), torch.nan)
    scores = _scores(Q, KV, kv_scales, weights)
    column = torch.arange(KV.shape[0])
    hidden = (column < cu_starts[:, None]) | (column >= cu_ends[:, None])
    out[:, : KV.shape[0]] = scores.masked_fill(hidden, -torch.inf)
    return out[:, : KV.shape[0]]


def _deepgemm_fp8_paged_mqa_logits(
    q_fp8: Tensor, weights: Tensor, out_logits: Tensor, context_lens: Tensor, kv_indices: Tensor, max_model_len: int,
    kv_cache: Tensor, Preshuffle: bool = False, KVBlockSize: int = 1,
) -> None:  # fmt: skip
    assert kv_cache.shape[1:] == (KVBlockSize, 1, INDEX_DIM + 4)
    assert (out_logits.shape[1], Preshuffle) == (max_model_len, False)
    assert context_lens.dtype == kv_indices.dtype == torch.int32
    keys, scales = _planar(kv_cache.squeeze(2))
    for i, length in enumerate(context_lens.tolist()):
        row = torch.arange(length)
        block = kv_indices[i, row // KVBlockSize].long()
        key = keys[block, row % KVBlockSize].view(q_fp8.dtype)
        scale = scales[block, row % KVBlockSize].view(torch.float32).flatten()
        out_logits[i, :length] = _scores(q_fp8[i], key, scale, weights[i : i + 1])[0]


def _top_rows(logits: Tensor, starts: list[int], ends: list[int], indices: Tensor, k: int) -> None:
    for i, (start, end) in enumerate(zip(starts, ends)):
        indices[i] = -1
        if end - start <= k:
            indices[i, : max(end - start, 0)] = torch.arange(start, max(end, start))
        else:
            best = logits[i, start:end].sort(descending=True, stable=True).indices[:k]
            # Not in order of position, as releases without `stable` leave them.
            indices[i] = (best + start).int()


def _top_k_per_row_prefill(
    logits: Tensor, rowStarts: Tensor, rowEnds: Tensor, indices: Tensor, values: None, numRows: int, stride0: int,
    stride1: int, k: int = 2048, stable: bool = False,
) -> None:  # fmt: skip
    assert (numRows, stride0, stride1) == (logits.shape[0], *logits.stride())
    assert indices.shape == (numRows, k)
    _top_rows(logits, rowStarts.tolist(), rowEnds.tolist(), indices, k)


def _top_k_per_row_decode(
    logits: Tensor, next_n: int, seqLens: Tensor, indices: Tensor, numRows: int, stride0: int, stride1: int,
    k: int = 2048, stable: bool = False,
) -> None:  # fmt: skip
    assert (next_n, numRows, stride0, stride1) == (1, logits.shape[0], *logits.stride())
    _top_rows(logits, [0] * numRows, seqLens.tolist(), indices, k)


def _biased_grouped_topk(
    gating_output: Tensor, correction_bias: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_expert_group: int,
    topk_group: int, need_renorm: bool, routed_scaling_factor: float = 1.0,
) -> None:  # fmt: skip
    scores = gating_output.float().sigmoid()
    choice = (scores + correction_bias).view(scores.shape[0], num_expert_group, -1)
    if num_expert_group > 1:
        best = choice.topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
        keep = torch.zeros(choice.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        choice = choice.masked_fill(~keep.unsqueeze(-1), -torch.inf)
    ids = choice.flatten(1).topk(topk_ids.shape[1], -1).indices
    weights = scores.gather(1, ids)
    if need_renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_ids.copy_(ids.int())
    topk_weights.copy_(weights * routed_scaling_factor)


def _get_mla_metadata_info_v1(
    batch_size: int, num_head_qo: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, is_sparse: bool, **rest: Any
) -> list[tuple[Any, torch.dtype]]:
    assert num_head_qo == 16
    assert is_sparse
    i32 = torch.int32
    return [((2,), torch.uint64), (batch_size + 1, i32), ((batch_size, 8), i32), (batch_size + 1, i32),
            ((batch_size, 2), i32), (batch_size, i32)]  # fmt: skip


def _get_mla_metadata_v1(
    seqlens_qo_indptr: Tensor, seqlens_kv_indptr: Tensor, work_metadata_ptrs: Tensor, work_indptr: Tensor,
    reduce_indptr: Tensor, reduce_final_map: Tensor, reduce_partial_map: Tensor, work_info_set: Any = None,
    work_info: Any = None, **rest: Any,
) -> None:  # fmt: skip
    """Fills what it is given so that the decode call can tell whether it gets the same buffers in the same roles."""
    info = work_info_set if work_info_set is not None else work_info
    assert work_metadata_ptrs.dtype == torch.uint64
    assert (info.shape[-1], reduce_final_map.shape[-1]) == (8, 2)
    info.fill_(11)
    work_indptr.copy_(seqlens_kv_indptr)
    reduce_indptr.fill_(13)
    reduce_partial_map.fill_(17)


def _mla_decode_fwd(
    q: Tensor, kv_buffer: Tensor, o: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_lens: Tensor, max_seqlen_q: int, sm_scale: float, num_kv_splits: int, work_meta_data: Tensor,
    work_indptr: Tensor, work_info_set: Tensor, reduce_indptr: Tensor, reduce_final_map: Tensor,
    reduce_partial_map: Tensor, kv_scale: Tensor, page_size: int = 1, nhead_kv: int = 1,
) -> tuple[None, None]:  # fmt: skip
    count = q.shape[0]
    assert (q.dtype, q.shape[1:], max_seqlen_q, page_size, nhead_kv) == (torch.bfloat16, (16, 576), 1, 1, 1)
    assert num_kv_splits is not None
    assert kv_indptr.dtype == kv_indices.dtype == kv_last_page_lens.dtype == torch.int32
    assert torch.equal(qo_indptr, torch.arange(count + 1, dtype=torch.int32))
    assert bool((kv_last_page_lens == 1).all())
    assert bool((kv_indptr.diff() > 0).all()), "a sequence without a page"
    assert torch.equal(work_indptr, kv_indptr)
    assert (int(work_info_set.unique()), int(reduce_indptr.unique()), int(reduce_partial_map.unique())) == (11, 13, 17)
    rows = kv_buffer.view(-1, 576)
    for i in range(count):
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        values = rows.view(torch.uint8)[pages].view(rows.dtype).float() * kv_scale
        o[i] = (torch.softmax(q[i].float() @ values.T * sm_scale, -1) @ values[:, :512]).bfloat16()
    return None, None


def _per_group_quant_hip(
    x: Tensor, quant_dtype: torch.dtype, group_size: int = 128, transpose_scale: bool = False
) -> tuple[Tensor, Tensor]:
    grouped = x.float().view(x.shape[0], -1, group_size)
    scale = grouped.abs().amax(-1).clamp_min(1e-10) / torch.finfo(quant_dtype).max
    return (grouped / scale.unsqueeze(-1)).to(quant_dtype).view(x.shape), scale


def _gemm_a8w8_blockscale(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    assert XQ.dtype == WQ.dtype
    x = XQ.float() * x_scale.repeat_interleave(128, 1)
    return (x @ _blocks(WQ, w_scale).T).to(dtype)


def _blocks(codes: Tensor, scale: Tensor) -> Tensor:
    rows = scale.repeat_interleave(128, -2)[..., : codes.shape[-2], :]
    return codes.float() * rows.repeat_interleave(128, -1)[..., : codes.shape[-1]]


def _shuffle_weight(x: Tensor, layout: tuple[int, int] = (16, 16)) -> Tensor:
    """Marks what the real one permutes."""
    assert layout == (16, 16)
    out = x.clone()
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def _fused_moe(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weight: Tensor, topk_ids: Tensor, expert_mask: Tensor,
    activation: int, quant_type: int, w1_scale: Tensor, w2_scale: Tensor,
) -> Tensor:  # fmt: skip
    assert w1.is_shuffled  # type: ignore[attr-defined]
    assert w2.is_shuffled  # type: ignore[attr-defined]
    assert (hidden_states.dtype, topk_ids.dtype, topk_weight.dtype) == (torch.bfloat16, torch.int32, torch.float32)
    assert (activation, quant_type, expert_mask.dtype) == (0, 4, torch.int32)
    local = expert_mask.cumsum(0) - 1
    x = _requantised(hidden_states.float(), w1.dtype)
    out = torch.zeros(x.shape)
    for row in range(x.shape[0]):
        for expert, gain in zip(topk_ids[row].tolist(), topk_weight[row].tolist()):
            if expert_mask[expert]:
                e = int(local[expert])
                gate, up = (_blocks(w1[e], w1_scale[e]) @ x[row]).chunk(2)
                hidden = _requantised((F.silu(gate) * up).unsqueeze(0), w1.dtype)[0]
                out[row] += gain * (_blocks(w2[e], w2_scale[e]) @ hidden)
    return out.bfloat16()


def _requantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale = _per_group_quant_hip(x, dtype)
    return codes.float() * scale.repeat_interleave(128, 1)
