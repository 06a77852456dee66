"""What a model costs in device memory: weights of a rank by part, and tokens of KV beside them. Torch-free.

Weights are counted as GPU kernels keep them: matrices as stored (FP8 with scales, or bf16), except kv_b_proj and the
router gate, which the loader keeps in fp32 (kv_b absorbed into queries and values). Which part of a matrix a rank has,
its `Placement` says, here as in the loader.
"""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.formats import BLOCK_TOKENS, FORMATS
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec, resolve_path
from headrace.model.tensors import DTYPE_BYTES, SCALE_SUFFIX, StoredTensor, stored_tensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PARTS = (
    "routed experts",
    "attention",
    "indexers",
    "dense MLPs",
    "shared experts",
    "routers",
    "norms",
    "embedding",
    "head",
    "MTP routed experts",
    "MTP rest",
    "fp32 copies",
)
"""`fp32 copies`: what kv_b_proj and the router gate take beyond their stored bytes."""
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclasses.dataclass(frozen=True, slots=True)
class KvRoom:
    """Cache of one row format in what a rank has left."""

    row_format: str
    bytes_per_token: int
    rank_tokens: int
    group_tokens: int
    """Different tokens the group holds: a context-parallel group replicates its cache, decode ranks do not."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPlan:
    role: str
    """prefill or decode"""
    ranks: int
    head_split: bool
    """The tensor-parallel baseline: attention and dense layers are split like the experts"""
    parts: dict[str, int]
    """Bytes on the rank with the largest share"""
    left_bytes: int
    """For KV; negative: the weights do not fit"""
    kv: tuple[KvRoom, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlan:
    model: str
    tensors: int
    stored_bytes: int
    stored_parts: dict[str, int]
    max_context: int
    hbm_bytes: int
    reserve_bytes: int
    groups: tuple[GroupPlan, ...]

    @property
    def fits(self) -> bool:
        """Every group holds its weights and at least one block."""
        return all(room.rank_tokens for group in self.groups for room in group.kv)


def plan_model(
    model: str | Path, prefill_cp: int, decode_ep: int, hbm: str, reserve: str, *, prefill_tp: int = 0
) -> ModelPlan:
    """`model`: a directory, `nano` or a preset. `hbm`: memory of one device. `reserve`: what is kept for activations,
    communication buffers and the allocator, a size or a share of `hbm`. `prefill_tp`: ranks of a head-split prefill
    group in place of a context-parallel one. Raises CheckpointError, ConfigError."""
    directory = resolve_path(model)
    spec = ModelSpec.from_dir(directory)
    for name, ranks in (("--prefill-cp", prefill_cp), ("--decode-ep", decode_ep), ("--prefill-tp", prefill_tp or 1)):
        most = min(spec.n_routed_experts, spec.num_attention_heads if name == "--prefill-tp" else ranks)
        if not 1 <= ranks <= most:
            raise ConfigError(f"{name} is {ranks}; {directory.name} can be split over 1 to {most} ranks")
    hbm_bytes = parse_size("--hbm", hbm)
    reserve_bytes = parse_size("--reserve", reserve, whole=hbm_bytes)
    tensors = list(checkpoint_tensors(directory, spec))
    stored = _by_part(tensors, spec)
    # The last rank has the largest share of everything.
    prefill = Placement.expert_split(prefill_cp - 1, prefill_cp)
    if prefill_tp:
        prefill = Placement.head_split(prefill_tp - 1, prefill_tp)
    groups = tuple(
        _group(role, placement, spec, tensors, hbm_bytes - reserve_bytes)
        for role, placement in (("prefill", prefill), ("decode", Placement.expert_split(decode_ep - 1, decode_ep)))
    )
    return ModelPlan(
        model=str(model),
        tensors=len(tensors),
        stored_bytes=sum(stored.values()),
        stored_parts=stored,
        max_context=spec.max_position_embeddings,
        hbm_bytes=hbm_bytes,
        reserve_bytes=reserve_bytes,
        groups=groups,
    )


def checkpoint_tensors(directory: Path, spec: ModelSpec) -> list[StoredTensor]:
    """What a directory holds, with FP8 by the presence of scales; without weights, what its config announces."""
    names = _names(directory)
    if names is None:
        return list(stored_tensors(spec))
    return list(stored_tensors(spec, lambda name: name + SCALE_SUFFIX in names))


def parse_size(option: str, text: str, whole: int = 0) -> int:
    """`288GB`, `141GiB`, `10%` (of `whole`) -> bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*|%)\s*", text.lower())
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or number < 0 or (match[2] not in _UNITS and not (match[2] == "%" and whole)):
        raise ConfigError(f"{option}: {text!r} is not a size such as 288GB or 141GiB" + (", or 10%" if whole else ""))
    return round(number * whole / 100) if match[2] == "%" else round(number * _UNITS[match[2]])


def part_of(tensor: StoredTensor, spec: ModelSpec) -> str:
    name = tensor.name
    mtp = name.startswith(f"model.layers.{spec.mtp_layer}.")
    if tensor.expert >= 0:
        return "MTP routed experts" if mtp else "routed experts"
    if mtp:
        return "MTP rest"
    for word, part in (
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
        (".indexer.", "indexers"),
        ("norm.", "norms"),
        (".self_attn.", "attention"),
        (".shared_experts.", "shared experts"),
        (".mlp.gate.", "routers"),
    ):
        if word in name:
            return part
    return "dense MLPs"


def _group(role: str, placement: Placement, spec: ModelSpec, tensors: list[StoredTensor], budget: int) -> GroupPlan:
    ranks = placement.experts.size
    mine = [kept for tensor in tensors if (kept := placement.stored(tensor, spec)) is not None]
    parts = _by_part(mine, spec)
    parts["fp32 copies"] = sum(_fp32_extra(tensor) for tensor in mine)
    left = budget - sum(parts.values())
    rooms = []
    for name in FORMATS:
        block = spec.slab_layout(name).payload_bytes
        tokens = max(left, 0) // block * BLOCK_TOKENS
        rooms.append(KvRoom(name, block // BLOCK_TOKENS, tokens, tokens * (ranks if role == "decode" else 1)))
    return GroupPlan(role, ranks, placement.splits_layers, parts, left, tuple(rooms))


def _by_part(tensors: list[StoredTensor], spec: ModelSpec) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[part_of(tensor, spec)] += tensor.nbytes
    return {part: found[part] for part in PARTS if found[part]}


def _fp32_extra(tensor: StoredTensor) -> int:
    if tensor.name.endswith("kv_b_proj.weight" + SCALE_SUFFIX):
        return -tensor.nbytes
    if tensor.name.endswith(("kv_b_proj.weight", "mlp.gate.weight")):
        return tensor.values * DTYPE_BYTES["F32"] - tensor.nbytes
    return 0


def _names(directory: Path) -> set[str] | None:
    """Tensor names of a checkpoint, from its index or the header of its only file; None: there are no weights."""
    try:
        if (directory / INDEX_FILE).exists():
            return set(json.loads((directory / INDEX_FILE).read_text())["weight_map"])
        if not (directory / SINGLE_FILE).exists():
            return None
        with open(directory / SINGLE_FILE, "rb") as file:
            return set(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: cannot read the names of its tensors: {error}") from error
