"""Definition of sampling: filters, penalties, Gumbel-max with noise from a counter-based hash, log-probabilities.

One row at a time in fp64, so a draw depends on its logits and its key (seed, choice, output index) alone: not on the
batch, the draft length, or the device's random generator.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, SampleRows

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Filters:
    """temperature 0: greedy. top_k 0, top_p 1, min_p 0: off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def adjust(
    logits: Tensor, counts: Mapping[int, int], presence: float, frequency: float, bias: Mapping[int, float]
) -> Tensor:
    """Penalties by how often a token is already in the answer, and the client's bias. [V] -> [V]; may be `logits`."""
    penalised = counts if presence or frequency else {}
    if not penalised and not bias:
        return logits
    logits = logits.clone()
    if penalised:
        ids = torch.tensor(list(penalised), dtype=torch.int64, device=logits.device)
        seen = torch.tensor(list(penalised.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= presence + frequency * seen
    if bias:
        ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
        logits[ids] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits


def target_log_probs(logits: Tensor, filters: Filters) -> Tensor:
    """[V] -> fp64 [V] log-probabilities that are sampled from; -inf outside the filters. temperature must be > 0."""
    scores = torch.log_softmax(logits.double() / filters.temperature, -1)
    if filters.top_k and filters.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(filters.top_k).values[-1], -torch.inf)
    if filters.min_p > 0:
        scores = scores.masked_fill(scores < scores.max() + torch.log(scores.new_tensor(filters.min_p)), -torch.inf)
    if filters.top_p < 1:
        scores = torch.log_softmax(scores, -1)
        ordered, order = scores.sort(descending=True, stable=True)
        mass = ordered.exp()
        # The token that crosses top_p stays; the first one always does.
        drop = mass.cumsum(-1) - mass >= filters.top_p
        drop[0] = False
        scores = scores.index_fill(0, order[drop], -torch.inf)
    return torch.log_softmax(scores, -1)


def sample(logits: Tensor, filters: Filters, key: int) -> int:
    """Draw one token from [V] logits. Equal maxima: the lowest id."""
    if filters.temperature == 0:
        return int(logits.argmax())
    scores = target_log_probs(logits, filters)
    return int((scores + gumbel(key, scores.shape[0], scores.device)).argmax())


def noise_key(seed: int, choice: int, output_index: int) -> int:
    """64-bit key of one draw."""
    key = _mix64(seed & _MASK64)
    key = _mix64(key ^ (choice & _MASK64))
    return _mix64(key ^ (output_index & _MASK64))


def gumbel(key: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """fp64 [count] Gumbel noise: -log(-log u), u from 52 hashed bits of (key, id), never 0 or 1."""
    ids = torch.arange(count, dtype=torch.int64, device=device)
    high = _hash32(ids, key & _MASK32, key >> 32)
    low = _hash32(ids, (key >> 32) ^ 0x6A09E667, (key & _MASK32) ^ 0xBB67AE85)
    uniform = ((high << 20) | (low >> 12)).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform))


def log_probs(logits: Tensor, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of `token` and the `top` best under the model's own distribution (no temperature, filters,
    penalties or bias), as the OpenAI API reports them. Equal ones: lower ids first."""
    scores = torch.log_softmax(logits.double(), -1)
    best = scores.sort(descending=True, stable=True) if top else None
    pairs = [] if best is None else list(zip(best.indices[:top].tolist(), best.values[:top].tolist()))
    return float(scores[token]), pairs


class ReferenceSampling:
    """The functions above for rows of a step; one row at a time where they are defined so."""

    def __init__(self, context: KernelContext) -> None:
        pass

    def edit(self, logits: Tensor, rows: Tensor, ids: Tensor, amounts: Tensor) -> None:
        logits[rows, ids] += amounts

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        filters = [Filters(*values) for values in zip(*(column.tolist() for column in columns))]
        keys = [key & _MASK64 for key in rows.key.tolist()]
        tokens = [sample(*each) for each in zip(logits, filters, keys)]
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

    def log_probs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.log_softmax(logits.double(), -1)
        best = scores.sort(dim=-1, descending=True, stable=True)
        return scores.gather(1, tokens[:, None]).squeeze(1), best.indices[:, :top], best.values[:, :top]

    def accepted(self, tokens: Tensor, drafts: Tensor, first: Tensor) -> Tensor:
        """A row counts if no row of its sequence up to it differs."""
        wrong = (tokens != drafts).to(torch.int64)
        before = torch.nn.functional.pad(wrong.cumsum(0), (1, 0))
        counts = first.diff()
        base = before[first[:-1]].repeat_interleave(counts)
        sequence = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
        return torch.zeros_like(counts).scatter_add_(0, sequence, (before[1:] == base).to(torch.int64))


def sample_rows(filters: Sequence[Filters], keys: Sequence[int], device: torch.device | str = "cpu") -> SampleRows:
    """Rows' filters and noise keys (`noise_key`) as tensors."""
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]

    def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype).to(device)

    return SampleRows(
        column((f.temperature for f in filters), torch.float64),
        column((f.top_k for f in filters), torch.int64),
        column((f.top_p for f in filters), torch.float64),
        column((f.min_p for f in filters), torch.float64),
        column(signed, torch.int64),
    )


def create(context: KernelContext) -> ReferenceSampling:
    return ReferenceSampling(context)


def _hash32(ids: Tensor, first: int, second: int) -> Tensor:
    """32-bit finaliser applied twice, in int64 tensors masked to 32 bits: the same on every device."""
    mixed = ids
    for salt in (first, second):
        mixed = (mixed ^ salt) & _MASK32
        mixed = ((mixed ^ (mixed >> 16)) * 0x7FEB352D) & _MASK32
        mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B) & _MASK32
        mixed = mixed ^ (mixed >> 16)
    return mixed


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
