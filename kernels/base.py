"""Interfaces of the kernel room: one per op. `kernels/<op>/reference.py` is the definition of each; other backends
match it within the tolerance their tests state. Kernels know tensors and cache rows, never requests or ranks.

Shape letters: t rows, D channels, H heads, R rope dims (64), K selected rows per query row, n gathered cache rows,
E local experts. A *cache row* is a flat int64 index `slot * 64 + row in block` into one plane.

Deterministic mode (`KernelContext.deterministic`): a row's result depends on that row alone, not on how many rows are
computed with it, where it lies among them, or how long other rows' histories are.
"""

import dataclasses
import enum
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.formats import RowFormat

Pair = tuple[Tensor, Tensor | None]
"""A stored matrix [out, in]: e4m3 with its fp32 128 x 128 block scales (multipliers; last blocks may be partial, so
matrices stacked by rows need not share a grid of scales), or bf16/fp32 with None."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelContext:
    """What a backend's creator may look at."""

    device: torch.device
    deterministic: bool
    shape: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes fixed for the life of a model ("heads", "hidden", ...): a backend that cannot take them says so here."""
    row_format: str = ""


class Norms(Protocol):
    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """fp32 [t, D] -> fp32 [t, D]: x / sqrt(mean(x^2) + eps) * weight."""
        ...

    def layer(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """fp32 [t, D]: (x - mean) / sqrt(var + eps) * weight + bias."""
        ...


class Rope(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """fp32 [t, ..., R], cos and sin fp32 [t, R/2] -> rotated, pair order kept. Pair j is (2j, 2j+1) when
        interleaved, (j, j + R/2) when not."""
        ...


class LatentRows(Protocol):
    """Latent rows in one of the formats of `kernels/formats.py`."""

    def quantise(self, latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
        """fp32 [t, 512] and [t, 64] -> uint8 [t, row bytes]."""
        ...

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor) -> None:
        """Write rows into uint8 [slots, 64, row bytes]. A cache row of -1 is dropped."""
        ...

    def gather(self, plane: Tensor, cache_rows: Tensor, fmt: RowFormat) -> Tensor:
        """cache rows [n] -> fp32 [n, 576], dequantised; rows must be >= 0."""
        ...


class IndexKeys(Protocol):
    """Index keys, planar inside a block. The row form that travels between ranks is key bytes then scale bytes."""

    def quantise(self, keys: Tensor, fmt: RowFormat) -> Tensor:
        """fp32 [t, 128] -> uint8 [t, 132] (fp8 formats) or [t, 256] (bf16)."""
        ...

    def write(self, plane: Tensor, cache_rows: Tensor, row_bytes: Tensor, fmt: RowFormat) -> None:
        """Write rows into uint8 [slots, plane bytes]. A cache row of -1 is dropped."""
        ...

    def gather(self, plane: Tensor, cache_rows: Tensor, fmt: RowFormat) -> Tensor:
        """cache rows [n] -> fp32 [n, 128], dequantised; rows must be >= 0."""
        ...


@dataclasses.dataclass(slots=True)
class QueryRows:
    """Which cache rows each query row may see: request-relative rows first_row .. last_row[i], inclusive, of sequence
    seq[i]."""

    seq: Tensor
    """int64 [t], index into block_tables"""
    last_row: Tensor
    """int64 [t]; below first_row: the row sees nothing"""
    block_tables: Tensor
    """int64 [S, B] slot of each block; -1 where there is none"""
    first_row: int = 0
    """1 for the MTP layer, whose row 0 is empty"""
    groups: list[tuple[int, Tensor, int]] | None = None
    """Cached (sequence, its query rows, its largest last_row): filled on first use, shared by all layers of a step."""
    plan: Any = None
    """What a backend derived from the fields above, likewise."""


class IndexTopk(Protocol):
    def __call__(self, q: Tensor, weights: Tensor, rows: QueryRows, plane: Tensor, fmt: RowFormat, k: int) -> Tensor:
        """Score every visible key: sum over heads of weights * relu(q . key), keep the k best.

        q fp32 [t, Hi, 128], weights fp32 [t, Hi] (all scale factors folded in), plane uint8 [slots, index plane bytes]
        -> int32 [t, k] request-relative cache rows, ascending, -1 padded. Of equal scores the lower row wins. Rows with
        at most k visible keys select all of them. With an fp8 format q is quantised per row and head first.
        """
        ...


class SparseMla(Protocol):
    def __call__(
        self, q: Tensor, plane: Tensor, selection: Tensor, rows: QueryRows, fmt: RowFormat, scale: float
    ) -> Tensor:
        """Absorbed attention over the selected cache rows: q fp32 [t, H, 576], selection int32 [t, K] (-1: none)
        -> fp32 [t, H, 512]. fp32 softmax. A row without a valid selection gives 0."""
        ...


class Granularity(enum.Enum):
    """What shares one FP8 scale."""

    TENSOR = "tensor"
    TOKEN = "token"
    GROUP = "group"
    """128 channels of a row"""


class Quantise(Protocol):
    def __call__(self, x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
        """fp32 or bf16 [..., D] -> (e4m3 [..., D], fp32 scales [1], [...] or [..., ceil(D/128)]); a scale is
        max(amax, 1e-10) / 448. Both may be buffers that the next call overwrites."""
        ...


class LinearWeight(Protocol):
    """A weight in whatever form its backend wants it."""

    out_features: int
    in_features: int
    quantised: bool
    """True: FP8 weight, so activations are quantised too."""


class Linear(Protocol):
    def prepare(self, *parts: Pair) -> Any:
        """Matrices stacked by rows, all FP8 or none."""
        ...

    def __call__(self, x: Tensor, weight: Any) -> Tensor:
        """fp32 [t, in] -> fp32 [t, out]. FP8 weights: x is first quantised per row and 128 channels."""
        ...

    def per_head(self, x: Tensor, matrix: Tensor) -> Tensor:
        """fp32 [t, H, a] times fp32 [H, a, b] -> fp32 [t, H, b]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RouterRule:
    """How experts are chosen."""

    top_k: int
    groups: int
    groups_kept: int
    normalise: bool
    scaling: float


class Router(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, bias: Tensor, rule: RouterRule) -> tuple[Tensor, Tensor]:
        """fp32 [t, D], gate fp32 [experts, D], bias fp32 [experts] -> ids int32 [t, k] ascending, weights fp32 [t, k].
        The bias decides the choice only. Ties: the lower id."""
        ...


@dataclasses.dataclass(slots=True)
class SampleRows:
    """How the token after each row of logits is drawn; all on the device of the logits."""

    temperature: Tensor
    """fp64 [R]; 0: greedy"""
    top_k: Tensor
    """int64 [R]; 0: off"""
    top_p: Tensor
    """fp64 [R] in (0, 1]; 1: off"""
    min_p: Tensor
    """fp64 [R]; 0: off"""
    key: Tensor
    """int64 [R]: bits of the draw's noise key"""


class Sampling(Protocol):
    """Draws for all rows of a step. A row's token depends on its logits, filters and key alone."""

    def edit(self, logits: Tensor, rows: Tensor, ids: Tensor, amounts: Tensor) -> None:
        """Add fp32 amounts [n] (penalties, bias, -inf: never) to fp32 logits [R, V] at int64 (row, id) [n], in place.
        No pair may come twice."""
        ...

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """fp32 [R, V] -> int64 [R]. Equal maxima: the lowest id."""
        ...

    def log_probs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Under the model's own distribution (fp32 [R, V]): fp64 [R] of the tokens, and the `top` best as int64 ids and
        fp64 [R, top]. Equal ones: lower ids first."""
        ...

    def accepted(self, tokens: Tensor, drafts: Tensor, first: Tensor) -> Tensor:
        """Sequences of rows: sequence s has rows first[s] .. first[s + 1] - 1 (int64 [S + 1]); row j of it holds the
        token drawn after draft j - 1, and drafts [R] the draft it is compared with (-1 in a sequence's last row).
        -> int64 [S]: how many drafts in a row, from the first, equal their tokens."""
        ...


class Experts(Protocol):
    """The routed experts of one rank."""

    def prepare(self, gates: list[Pair], ups: list[Pair], downs: list[Pair]) -> Any:
        """Per local expert: gate and up [I, D], down [D, I]."""
        ...

    def encode(self, x: Tensor, weight: Any) -> tuple[Tensor, Tensor | None]:
        """fp32 [t, D] -> what is sent to other ranks: (uint8 [t, D] e4m3 bytes, fp32 scales [t, D/128]), or
        (fp32 [t, D], None) when the experts are not FP8."""
        ...

    def __call__(
        self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, weight: Any, first_expert: int
    ) -> Tensor:
        """Encoded rows [N, ...], ids int32 [N, k], weights fp32 [N, k] -> float64 [N, D]: the sum over this rank's
        experts of the weighted outputs, each rounded to bf16 first so that the sum has no order."""
        ...
