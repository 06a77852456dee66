"""Where weights come from: safetensors files of a checkpoint, or a random generator. Both answer by tensor name."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kernels import fp8
from headrace.kernels.formats import FP8_MAX
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_SUFFIX, TensorShape, model_tensors, scale_shape

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class TensorSource(Protocol):
    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor:
        """On the CPU, in the stored dtype. The caller drops it as soon as it is on its device."""
        ...


class SafetensorsSource:
    """Memory-mapped shards, opened when first needed. Only tensors that are asked for are read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def names(self) -> Iterable[str]:
        return self._where

    def has(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._where[name]).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._where[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The safetensors name: F8_E4M3, BF16, F32, F16."""
        return str(self._open(self._where[name]).get_slice(name).get_dtype())

    def close(self) -> None:
        self._files.clear()

    def _locate(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        if index.exists():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            absent = sorted({file for file in weight_map.values() if not (self._directory / file).exists()})
            if absent:
                raise CheckpointError(f"{self._directory}: {len(absent)} shards are missing: {', '.join(absent)}")
            return weight_map
        if not (self._directory / SINGLE_FILE).exists():
            raise CheckpointError(f"{self._directory}: neither {INDEX_FILE} nor {SINGLE_FILE}")
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self._directory / file), framework="pt", device="cpu")
            except Exception as error:
                raise CheckpointError(f"{self._directory / file}: not a safetensors file: {error}") from error
        return self._files[file]


def check_tensors(source: SafetensorsSource, spec: ModelSpec) -> None:
    """Raise one CheckpointError listing every missing, extra, misshapen or wrongly typed tensor."""
    problems: list[str] = []
    expected: set[str] = set()
    for tensor in model_tensors(spec):
        expected.update((tensor.name, tensor.name + SCALE_SUFFIX))
        if not source.has(tensor.name):
            problems.append(f"missing: {tensor.name} {list(tensor.shape)}")
            continue
        problems += _check_one(source, tensor)
    copies = (f"model.layers.{spec.mtp_layer}.embed_tokens.", f"model.layers.{spec.mtp_layer}.shared_head.head.")
    for name in source.names():
        if name not in expected and not name.startswith(copies):
            problems.append(f"extra: {name}")
    if problems:
        raise CheckpointError(f"{len(problems)} tensors are wrong:\n  " + "\n  ".join(problems))


def _check_one(source: SafetensorsSource, tensor: TensorShape) -> list[str]:
    found: list[str] = []
    shape, dtype = source.shape(tensor.name), source.dtype(tensor.name)
    if shape != tensor.shape:
        found.append(f"shape: {tensor.name} is {list(shape)}, want {list(tensor.shape)}")
    scale = tensor.name + SCALE_SUFFIX
    if not source.has(scale):
        if dtype not in ("BF16", "F32", "F16"):
            found.append(f"dtype: {tensor.name} is {dtype} without {scale}")
        return found
    if dtype != "F8_E4M3":
        found.append(f"dtype: {tensor.name} is {dtype} but has {scale}; want F8_E4M3")
    if len(tensor.shape) == 2 and source.shape(scale) != scale_shape(tensor.shape):
        found.append(f"shape: {scale} is {list(source.shape(scale))}, want {list(scale_shape(tensor.shape))}")
    return found


class DummySource:
    """Random weights of a spec's shapes. A tensor's values depend on (seed, name) alone, so any split over ranks holds
    shards of the same model. `quantised` False: bf16, as the BF16 repositories; None: as the config announces."""

    def __init__(self, spec: ModelSpec, seed: int, quantised: bool | None = None) -> None:
        self._seed = seed
        self._shapes = {tensor.name: tensor for tensor in model_tensors(spec)}
        fp8_matrices = spec.quantised if quantised is None else quantised
        self._scaled = {name for name, tensor in self._shapes.items() if fp8_matrices and tensor.quantisable}
        self._last: tuple[str, Tensor, Tensor] | None = None

    def has(self, name: str) -> bool:
        if name.endswith(SCALE_SUFFIX):
            return name.removesuffix(SCALE_SUFFIX) in self._scaled
        return name in self._shapes

    def get(self, name: str) -> Tensor:
        base = name.removesuffix(SCALE_SUFFIX)
        if base not in self._scaled:
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            return self._values(name).to(dtype)
        if self._last is None or self._last[0] != base:
            self._last = (base, *quantise_blocks(self._values(base)))
        return self._last[2] if name != base else self._last[1]

    def _values(self, name: str) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}|{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        shape = self._shapes[name].shape
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            return values if name.endswith("embed_tokens.weight") else values * shape[1] ** -0.5
        if name.endswith("norm.weight"):
            return 1 + 0.1 * values
        return 0.05 * values


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [out, in] -> e4m3 [out, in] and fp32 scale_inv [ceil(out/128), ceil(in/128)]."""
    out, inner = weight.shape
    rows, columns = scale_shape((out, inner))
    padded = torch.nn.functional.pad(weight, (0, columns * 128 - inner, 0, rows * 128 - out))
    blocks = padded.view(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
    codes = fp8.encode(blocks / scale[:, None, :, None]).view(rows * 128, columns * 128)[:out, :inner]
    return codes.contiguous().view(torch.float8_e4m3fn), scale
