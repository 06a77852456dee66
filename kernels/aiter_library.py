"""The one door to AMD's aiter: where its functions live, how they are called, and what must hold before.

Functions are called by keyword only, because positions differ between releases; a keyword that some releases lack goes
in `optional` and is left out where the function does not take it. Nothing is imported before the first call: importing
aiter on a machine without ROCm raises. What adapters pass is held against recorded signatures in tests
(`tests/kernels/aiter/signatures.json`, made by `tools/aiter_signatures.py`).
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext
from headrace.kernels.formats import SCALE_TILE
from headrace.kernels.launch import FNUZ_ARCHITECTURES, architecture

FUNCTIONS = {
    "rmsnorm2d_fwd": "aiter.ops.rmsnorm",
    "concat_and_cache_mla": "aiter.ops.cache",
    "indexer_k_quant_and_cache": "aiter.ops.cache",
    "cp_gather_indexer_k_quant_cache": "aiter.ops.cache",
    "fp8_mqa_logits": "aiter.ops.triton.fp8_mqa_logits",
    "deepgemm_fp8_paged_mqa_logits": "aiter.ops.triton.pa_mqa_logits",
    "top_k_per_row_prefill": "aiter.ops.topk",
    "top_k_per_row_decode": "aiter.ops.topk",
    "biased_grouped_topk": "aiter.ops.topk",
    "mla_decode_fwd": "aiter.mla",
    "get_mla_metadata_info_v1": "aiter.ops.attention",
    "get_mla_metadata_v1": "aiter.ops.attention",
    "per_group_quant_hip": "aiter.ops.quant",
    "gemm_a8w8_blockscale": "aiter.ops.gemm_op_a8w8",
    "shuffle_weight": "aiter.ops.shuffle",
    "fused_moe": "aiter.fused_moe",
}
"""Function -> module, in every known release. (`aiter.ops.triton.fp8_mqa_logits` moved; the old name still works.)"""

ARCHITECTURES = ("gfx942", "gfx950")
LOGITS_ROWS = 4096
LOGITS_BYTES = 2**31
"""Index logits of one call: with more rows and as many bytes as this a variant is chosen that aborts the process inside
the compiler, where nothing can be caught (ROCm/aiter issue 5114)."""
LOGITS_PAD = 256
"""Columns that a row of logits is padded to"""
HEAD_GROUP = 16
"""Heads of a sequence that aiter's kernel for bf16 queries and fp8 rows knows"""
ROW_OFFSET_BYTES = 2**31
"""Offsets of cached rows are 32-bit in aiter's kernels."""


def installed() -> str | None:
    """Why AMD's aiter is not here, or None. Imports nothing: the PyPI package called `aiter` is something else."""
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return "aiter is not installed (AMD's images bring it; from PyPI: amd-aiter)"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "mla.py").exists() for folder in folders):
        return "the package `aiter` here is not AMD's (that one is amd-aiter)"
    return None


def refuses_aiter(context: KernelContext) -> str | None:
    """Why no aiter kernel runs in this context, or None."""
    missing = installed()
    if missing is not None:
        return missing
    target = architecture(context.device)
    if target not in ARCHITECTURES:
        return f"needs gfx942 or gfx950, the device is {target}"
    if context.deterministic:
        return "aiter promises nothing about a row's independence of its batch (model.deterministic is on)"
    return None


def _refuses_latent_rows(context: KernelContext) -> str | None:
    if context.row_format != "plain576":
        return f"aiter's rows have one scale a tensor (plain576), the format is {context.row_format or 'unset'}"
    return refuses_aiter(context)


def _refuses_index_keys(context: KernelContext) -> str | None:
    if context.row_format != "tile656":
        return f"aiter's index keys have a scale each (tile656), the format is {context.row_format or 'unset'}"
    if architecture(context.device) in FNUZ_ARCHITECTURES:
        return "its scales are for fnuz codes there, stored planes hold OCP codes"
    return refuses_aiter(context)


def _refuses_index_topk(context: KernelContext) -> str | None:
    if context.row_format not in ("tile656", "plain576"):
        return f"aiter's index keys are fp8, the format is {context.row_format or 'unset'}"
    return refuses_aiter(context)


def _refuses_sparse_mla(context: KernelContext) -> str | None:
    heads = context.shape.get("heads", HEAD_GROUP)
    if heads % HEAD_GROUP and HEAD_GROUP % heads:
        return f"heads must divide {HEAD_GROUP} or be a multiple of it, the model has {heads}"
    return _refuses_latent_rows(context)


def _refuses_experts(context: KernelContext) -> str | None:
    for name in ("hidden", "inner"):
        if context.shape.get(name, SCALE_TILE) % SCALE_TILE:
            return f"{name} must be a multiple of {SCALE_TILE}, the model has {context.shape[name]}"
    if "experts" not in context.shape:
        return "needs to know how many experts the model has"
    return refuses_aiter(context)


REFUSALS: dict[str, Callable[[KernelContext], str | None]] = {
    "norm": refuses_aiter,
    "latent_rows": _refuses_latent_rows,
    "index_keys": _refuses_index_keys,
    "index_topk": _refuses_index_topk,
    "sparse_mla": _refuses_sparse_mla,
    "linear": refuses_aiter,
    "router": refuses_aiter,
    "experts": _refuses_experts,
}
"""Every op that has an adapter (`<op>/aiter.py`), and why it cannot"""


def call(name: str, /, optional: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Call an aiter function by keyword. Raises KernelUnsupported where this release cannot be called so."""
    target, accepted = function(name)
    extra = {key: value for key, value in (optional or {}).items() if key in accepted}
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        raise KernelUnsupported(
            f"aiter's {name} takes no {', '.join(unknown)}; it takes {', '.join(sorted(accepted))}: another release"
        )
    return target(**arguments, **extra)


def accepts(name: str, keyword: str) -> bool:
    """Whether this release's function takes a keyword."""
    return keyword in function(name)[1]


@functools.cache
def function(name: str) -> tuple[Callable[..., Any], frozenset[str]]:
    """(the function, its keywords)"""
    module = FUNCTIONS[name]
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise KernelUnsupported(f"this release of aiter has no {module}.{name}: {error}") from error
    return found, frozenset(inspect.signature(found).parameters)


def enum_value(enum: str, name: str) -> Any:
    """A member of one of aiter's enums, e.g. ("QuantType", "per_1x128")."""
    return getattr(getattr(importlib.import_module("aiter"), enum), name)


def fp8_type(device: torch.device) -> torch.dtype:
    """aiter's fp8 by architecture: fnuz on gfx942, OCP on gfx950."""
    return torch.float8_e4m3fnuz if architecture(device) in FNUZ_ARCHITECTURES else torch.float8_e4m3fn


def stored_gain(device: torch.device) -> float:
    """What our OCP bytes are worth where they are read in `fp8_type`: fnuz halves them."""
    return 2.0 if fp8_type(device) == torch.float8_e4m3fnuz else 1.0


def check_offsets(plane: Tensor, what: str) -> None:
    """Raises KernelUnsupported for a plane beyond 32-bit offsets, before anything is launched."""
    size = plane.numel() * plane.element_size()
    if size >= ROW_OFFSET_BYTES:
        raise KernelUnsupported(
            f"{what} has {size:,} bytes; aiter addresses less than {ROW_OFFSET_BYTES:,}: use fewer device_blocks, or "
            "the triton backend for this op"
        )


def logits_rows(width: int, most: int = LOGITS_ROWS) -> int:
    """Query rows of one call over `width` keys. Raises KernelUnsupported if not even one row fits."""
    padded = -(-width // LOGITS_PAD) * LOGITS_PAD
    rows = min(most, (LOGITS_BYTES - 1) // (4 * padded)) if padded else most
    if rows < 1:
        raise KernelUnsupported(f"one row of {width:,} index logits is beyond {LOGITS_BYTES:,} bytes")
    return rows
