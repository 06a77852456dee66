"""Which part of a model a rank holds. Torch-free, so that plans count what loaders load.

Three placements of one and the same layers:

    Placement()                      everything whole on every rank (context parallel, data parallel, alone)
    Placement.expert_split(r, n)     routed experts split over n ranks, the rest whole: how both pools run
    Placement.head_split(r, n)       also the attention heads, and the inner widths of dense and shared MLPs: the
                                     tensor-parallel baseline. Every rank computes every row; the layers' outputs are
                                     parts that `model.exchange.SplitExchange` adds up

Under all three, down-projections to latents, indexers, routers, norms, embedding and head are whole.
"""

import dataclasses

from headrace.errors import ConfigError
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_BLOCK, SCALE_SUFFIX, StoredTensor

ROWS, COLUMNS = 0, 1


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Part `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def of(self, count: int, unit: int = 1) -> range:
        """A contiguous share of `count` things that stay together by `unit`; the last unit may be partial."""
        units = -(-count // unit)
        start, stop = (part * units // self.size * unit for part in (self.rank, self.rank + 1))
        return range(start, min(stop, count))


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    experts: Share = Share()
    heads: Share = Share()

    @classmethod
    def expert_split(cls, rank: int, size: int) -> "Placement":
        return cls(experts=Share(rank, size))

    @classmethod
    def head_split(cls, rank: int, size: int) -> "Placement":
        return cls(experts=Share(rank, size), heads=Share(rank, size))

    @property
    def splits_layers(self) -> bool:
        return self.heads.size > 1

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError where a rank would have no head or no expert."""
        for what, share, count in (
            ("experts", self.experts, spec.n_routed_experts),
            ("attention heads", self.heads, spec.num_attention_heads),
        ):
            if not 0 <= share.rank < share.size or share.size > count:
                raise ConfigError(f"rank {share.rank} of {share.size} to split {count} {what}: want 1 to {count} ranks")

    def cut(self, name: str, spec: ModelSpec) -> tuple[int, range] | None:
        """(ROWS or COLUMNS, which) this rank keeps of a matrix, by its name without suffix; None: all of it. Whole
        experts are another matter (`experts`)."""
        if not self.splits_layers:
            return None
        owner, part = ["", *name.split(".")][-2:]
        if owner == "self_attn":
            heads = self.heads.of(spec.num_attention_heads)
            size = {
                "q_b_proj": spec.qk_head_dim,
                "kv_b_proj": spec.qk_nope_head_dim + spec.v_head_dim,
                "o_proj": spec.v_head_dim,
            }.get(part)
            if size is None:
                return None
            return (COLUMNS if part == "o_proj" else ROWS), range(heads.start * size, heads.stop * size)
        if owner in ("mlp", "shared_experts") and part in ("gate_proj", "up_proj", "down_proj"):
            width = spec.intermediate_size
            if owner == "shared_experts":
                width = spec.moe_intermediate_size * spec.n_shared_experts
            return (COLUMNS if part == "down_proj" else ROWS), self.heads.of(width, SCALE_BLOCK)
        return None

    def stored(self, tensor: StoredTensor, spec: ModelSpec) -> StoredTensor | None:
        """What this rank keeps of a tensor of the checkpoint, in its stored form; None: nothing."""
        if tensor.expert >= 0 and tensor.expert not in self.experts.of(spec.n_routed_experts):
            return None
        scale = tensor.name.endswith(SCALE_SUFFIX)
        cut = self.cut(tensor.name.removesuffix(SCALE_SUFFIX).removesuffix(".weight"), spec)
        if cut is None:
            return tensor
        dim, kept = cut
        if scale:
            first = kept.start // SCALE_BLOCK
            kept = range(first, -(-kept.stop // SCALE_BLOCK) if kept else first)
        shape = (len(kept), tensor.shape[1]) if dim == ROWS else (tensor.shape[0], len(kept))
        return dataclasses.replace(tensor, shape=shape)


WHOLE = Placement()
