"""A rank's model from a checkpoint directory or from random weights."""

from collections.abc import Callable
from pathlib import Path

import torch

from headrace.errors import CheckpointError
from headrace.model.build import build_model
from headrace.model.dummy import DummySource
from headrace.model.placement import Placement
from headrace.model.source import SafetensorsSource, TensorSource, check_tensors, mtp_copies
from headrace.model.spec import ModelSpec, resolve_path
from headrace.model.stream import WINDOW_BYTES, LoadReport, TensorStream
from headrace.model.tensors import SCALE_SUFFIX, TensorShape, model_tensors
from headrace.model.transformer import Transformer


def load_model(
    spec: ModelSpec,
    path: str | Path,
    load_format: str,
    device: torch.device | str,
    placement: Placement,
    row_format: str,
    deterministic: bool,
    *,
    kernels: str = "auto",
    dummy_seed: int = 0,
    progress: Callable[[LoadReport], None] | None = None,
) -> Transformer:
    """One rank's part of a model, as `placement` says.

    `load_format` is `safetensors` or `dummy` (then `path` is not read). Raises CheckpointError listing every tensor
    that is missing, extra, misshapen or wrongly typed; ConfigError when the model cannot be split so; KernelUnsupported
    when no backend takes it. `progress` hears after every tensor read from files. The host holds, beside what the rank
    keeps, at most half a shard read ahead and what is in work: a matrix, or its experts of one layer.
    """
    placement.check(spec)
    if load_format == "dummy":
        dummy = DummySource(spec, dummy_seed, device=device)
        return build_model(dummy, spec, device, placement, row_format, deterministic, kernels=kernels)
    if load_format != "safetensors":
        raise CheckpointError(f"load format {load_format!r} is not one of safetensors, dummy")
    source = SafetensorsSource(resolve_path(path))
    try:
        check_tensors(source, spec)
        stream = TensorStream(
            source,
            read_order(source, spec, placement.experts.of(spec.n_routed_experts)),
            window_bytes=min(WINDOW_BYTES, source.largest_shard_bytes // 2),
            progress=progress,
            copies=mtp_copies(source, spec),
        )
        try:
            return build_model(stream, spec, device, placement, row_format, deterministic, kernels=kernels)
        finally:
            stream.close()
    finally:
        source.close()


def read_order(source: TensorSource, spec: ModelSpec, experts: range) -> list[str]:
    """Names of a rank's tensors, nearly in the order in which `_Builder` asks for them: by layer, and in a layer the
    gates of all experts before the ups and the downs; embedding and head last."""
    mine = [tensor for tensor in model_tensors(spec) if tensor.expert < 0 or tensor.expert in experts]
    parts = ("gate_proj", "up_proj", "down_proj")

    def place(tensor: TensorShape) -> tuple[int, int]:
        words = tensor.name.split(".")
        layer = int(words[2]) if words[1] == "layers" else spec.mtp_layer + 1
        return layer, parts.index(words[-2]) if tensor.expert >= 0 else -1

    pairs = [(tensor.name, tensor.name + SCALE_SUFFIX) for tensor in sorted(mine, key=place)]
    return [name for pair in pairs for name in pair if source.has(name)]
