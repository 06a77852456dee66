"""Draws for many rows at once: what the filters leave is found by search, noise decides, nobody sorts.

Roofline of R rows of V logits: 4 R V bytes once for a draw; a filter reads a row 20 to 40 times, from the L2 cache.

A row's kept tokens are those above a bound: a value, and among equals of it the lowest ids. The bound is searched for
in the order of fp32 bit patterns, three trial values a pass. Noise is the reference's, 52 hashed bits an id; fp32 says
which few ids can win, and only for those is the fp64 formula worked out, so draws are the reference's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.base import KernelContext, SampleRows
from headrace.kernels.launch import ceil_div, next_power_of_two
from headrace.kernels.numeric import sortable
from headrace.kernels.sampling.reference import ReferenceSampling

CHUNK = 4096
"""Ids of one program of a draw; of one pass's step of a search"""
EDIT_BLOCK = 128


@triton.jit
def hash32(ids, first, second):
    """The reference's finaliser, in uint32."""
    mixed = ids.to(tl.uint32)
    mixed = mixed ^ first
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    mixed = mixed ^ second
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return mixed ^ (mixed >> 16)


@triton.jit
def uniform_bits(ids, key):
    """52 hashed bits of (key, id), as int64."""
    low_key = (key & 0xFFFFFFFF).to(tl.uint32)
    high_key = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    high = hash32(ids, low_key, high_key).to(tl.int64)
    low = hash32(ids, high_key ^ 0x6A09E667, low_key ^ 0xBB67AE85).to(tl.int64)
    return (high << 20) | (low >> 12)


@triton.jit
def rough_gumbel(bits):
    """-log(-log u) in fp32, within 1e-4: near 1, where -log u cancels, from 1 - u."""
    u = bits.to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    rest = (4503599627370496 - bits).to(tl.float32) * 2.220446049250313e-16
    near = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -tl.log(tl.where(rest < 0.01, tl.maximum(near, 1e-17), -tl.log(u)))


@triton.jit
def exact_gumbel(bits):
    """As the reference has it, in fp64."""
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, key_ptr, bound_ptr, last_equal_ptr, best_ptr, id_ptr, V, row_stride, C: tl.constexpr
):
    """Best perturbed score (fp64) of a chunk of a row's ids, and its id; V where the filters left none."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * C + tl.arange(0, C)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < V, other=-float("inf"))
    code = sortable(x).to(tl.int64)
    bound, last_equal = tl.load(bound_ptr + row), tl.load(last_equal_ptr + row)
    kept = (ids < V) & ((code > bound) | ((code == bound) & (ids <= last_equal)))
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    scale = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    bits = uniform_bits(ids, tl.load(key_ptr + row))
    noise = tl.where(greedy, 0.0, rough_gumbel(bits))
    top = tl.max(tl.where(kept, x, -float("inf")), 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    rough = tl.where(kept, (x - top) * scale.to(tl.float32) + noise, -float("inf"))
    highest = tl.max(rough, 0)
    near = rough >= highest - tl.where(greedy, 0.0, 1e-3)
    near = near & kept & (highest > -float("inf"))
    best = tl.full((), -float("inf"), tl.float64)
    best_id = tl.full((), 0, tl.int32) + V
    left = tl.sum(near.to(tl.int32), 0)
    while left > 0:
        at = tl.min(tl.where(near, ids, V), 0)
        here = ids == at
        value = tl.sum(tl.where(here, x, 0.0), 0).to(tl.float64)
        its_bits = tl.sum(tl.where(here, bits, 0), 0)
        score = tl.where(greedy, value, value / tl.where(greedy, 1.0, temperature) + exact_gumbel(its_bits))
        better = score > best
        best = tl.where(better, score, best)
        best_id = tl.where(better, at, best_id)
        near = near & (ids != at)
        left -= 1
    to = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + to, best)
    tl.store(id_ptr + to, best_id)


@triton.jit
def choose_kernel(best_ptr, id_ptr, token_ptr, V, chunks, W: tl.constexpr):
    """The best of a row's chunks; of equals the lowest id."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, W)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    ids = tl.load(id_ptr + row * chunks + chunk, mask=chunk < chunks, other=V)
    winner = tl.min(tl.where(best == tl.max(best, 0), ids, V), 0)
    tl.store(token_ptr + row, tl.where(winner < V, winner, 0).to(tl.int64))


@triton.jit
def above(row_ptr, V, top, scale, MASS: tl.constexpr, one, two, three, C: tl.constexpr):
    """Mass (or number) of the values whose codes lie above each of three trial codes: sums in one order."""
    sum_one = tl.zeros((C,), tl.float64)
    sum_two = tl.zeros((C,), tl.float64)
    sum_three = tl.zeros((C,), tl.float64)
    for start in range(0, V, C):
        ids = start + tl.arange(0, C)
        x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
        code = sortable(x).to(tl.int64)
        if MASS:
            weight = tl.exp((x - top) * scale).to(tl.float64)
        else:
            weight = tl.where(ids < V, 1.0, 0.0).to(tl.float64)
        sum_one += tl.where(code > one, weight, 0.0)
        sum_two += tl.where(code > two, weight, 0.0)
        sum_three += tl.where(code > three, weight, 0.0)
    return tl.sum(sum_one, 0), tl.sum(sum_two, 0), tl.sum(sum_three, 0)


@triton.jit
def search(row_ptr, V, top, scale, MASS: tl.constexpr, low, high, limit, C: tl.constexpr):
    """The lowest code above `low` such that what lies above it is less than `limit`; at `high` it is."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one = low + step
        two = tl.minimum(one + step, high)
        three = tl.minimum(two + step, high)
        m_one, m_two, m_three = above(row_ptr, V, top, scale, MASS, one, two, three, C)
        fits_one, fits_two, fits_three = m_one < limit, m_two < limit, m_three < limit
        high = tl.where(fits_one, one, tl.where(fits_two, two, tl.where(fits_three, three, high)))
        low = tl.where(fits_one, low, tl.where(fits_two, one, tl.where(fits_three, two, three)))
        low = tl.minimum(low, high - 1)
    return high


@triton.jit
def bound_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, bound_ptr, last_equal_ptr, V, row_stride,
    C: tl.constexpr,
):  # fmt: skip
    """Code that a row's kept values reach, and the last id that is kept of those that equal it. Filters in the order of
    the reference: top-k (equals of the k-th stay), min-p, top-p over what is left (the token that crosses it stays)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    bound = tl.full((), -(1 << 40), tl.int64)
    last_equal = tl.full((), 0, tl.int32) + V
    filtered = ((top_k > 0) & (top_k < V)) | (min_p > 0) | (top_p < 1)
    if (temperature > 0.0) & filtered:
        most = tl.full((C,), -float("inf"), tl.float32)
        for start in range(0, V, C):
            ids = start + tl.arange(0, C)
            most = tl.maximum(most, tl.load(row_ptr + ids, mask=ids < V, other=-float("inf")))
        top = tl.max(most, 0)
        highest = sortable(top).to(tl.int64)
        lowest = tl.full((), -(1 << 31), tl.int64)
        scale = (1.0 / temperature).to(tl.float32)
        if (top_k > 0) & (top_k < V):
            bound = search(row_ptr, V, top, scale, False, lowest, highest, top_k.to(tl.float64), C)
        if min_p > 0:
            least = top.to(tl.float64) + temperature * tl.log(min_p)
            rounded = least.to(tl.float32)
            code = sortable(rounded).to(tl.int64) + tl.where(rounded.to(tl.float64) < least, 1, 0)
            bound = tl.maximum(bound, code)
        if top_p < 1:
            under = tl.maximum(bound - 1, lowest)
            whole, _, _ = above(row_ptr, V, top, scale, True, under, under, under, C)
            limit = whole * top_p
            bound = search(row_ptr, V, top, scale, True, under, highest, limit, C)
            ahead, _, _ = above(row_ptr, V, top, scale, True, bound, bound, bound, C)
            kept = tl.zeros((), tl.int32)
            last_equal = tl.full((), -1, tl.int32)
            for start in range(0, V, C):
                ids = start + tl.arange(0, C)
                x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf"))
                equal = (sortable(x).to(tl.int64) == bound) & (ids < V)
                place = kept + tl.cumsum(equal.to(tl.int32), 0) - 1
                mass = ahead + place.to(tl.float64) * tl.exp((x - top) * scale).to(tl.float64)
                stays = equal & ((mass < limit) | (place == 0))
                last_equal = tl.maximum(last_equal, tl.max(tl.where(stays, ids, -1), 0))
                kept += tl.sum(equal.to(tl.int32), 0)
    tl.store(bound_ptr + row, bound)
    tl.store(last_equal_ptr + row, last_equal)


@triton.jit
def edit_kernel(logits_ptr, row_ptr, id_ptr, amount_ptr, count, row_stride, W: tl.constexpr):
    """Adds amounts at (row, id) pairs, no pair twice."""
    i = tl.program_id(0) * W + tl.arange(0, W)
    row = tl.load(row_ptr + i, mask=i < count, other=0)
    at = logits_ptr + row * row_stride + tl.load(id_ptr + i, mask=i < count, other=0)
    value = tl.load(at, mask=i < count, other=0.0) + tl.load(amount_ptr + i, mask=i < count, other=0.0)
    tl.store(at, value, mask=i < count)


class TritonSampling(ReferenceSampling):
    """Log-probabilities and acceptance are the reference's: batched tensor operations already."""

    def edit(self, logits: Tensor, rows: Tensor, ids: Tensor, amounts: Tensor) -> None:
        count = rows.shape[0]
        if count:
            edit_kernel[(ceil_div(count, EDIT_BLOCK),)](
                logits, rows, ids, amounts, count, logits.stride(0), W=EDIT_BLOCK, num_warps=4
            )

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        count, vocabulary = logits.shape
        device = logits.device
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        if not count:
            return tokens
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        chunks = ceil_div(vocabulary, CHUNK)
        bound = torch.empty(count, dtype=torch.int64, device=device)
        last_equal = torch.empty(count, dtype=torch.int32, device=device)
        best = torch.empty((count, chunks), dtype=torch.float64, device=device)
        ids = torch.empty((count, chunks), dtype=torch.int32, device=device)
        bound_kernel[(count,)](
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, bound, last_equal, vocabulary,
            logits.stride(0), C=CHUNK, num_warps=16,
        )  # fmt: skip
        draw_kernel[(count, chunks)](
            logits, rows.temperature, rows.key, bound, last_equal, best, ids, vocabulary, logits.stride(0), C=CHUNK,
            num_warps=8,
        )  # fmt: skip
        choose_kernel[(count,)](best, ids, tokens, vocabulary, chunks, W=max(2, next_power_of_two(chunks)), num_warps=1)
        return tokens


def create(context: KernelContext) -> TritonSampling:
    return TritonSampling(context)
