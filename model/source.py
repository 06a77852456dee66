"""Where weights come from: safetensors files of a checkpoint, or a random generator. Both answer by tensor name."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kernels import fp8
from headrace.kernels.formats import FP8_MAX
from headrace.model.shards import ShardFile
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
    """The shards of a directory. Opening reads their headers; `get` reads one tensor and may be called from any thread.

    `problems` says what is wrong with the files themselves; `check_tensors` reports it with the rest."""

    def __init__(self, directory: Path) -> None:
        self.problems: list[str] = []
        self._shards: dict[str, ShardFile] = {}
        files = self._files(directory)
        for file in sorted(set(files.values())) if files else [SINGLE_FILE]:
            try:
                self._shards[file] = ShardFile(directory / file)
            except CheckpointError as error:
                self.problems.append(f"shard: {error}")
        self._where = {name: (shard, entry) for shard in self._shards.values() for name, entry in shard.entries.items()}
        for name, file in files.items():
            shard = self._shards.get(file)
            if shard is not None and name not in shard.entries:
                self.problems.append(f"index: {name} is not in {file}")
            elif shard is not None:
                self._where[name] = (shard, shard.entries[name])

    def names(self) -> Iterable[str]:
        return self._where

    def has(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        return self._where[name][0].read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][1].shape

    def dtype(self, name: str) -> str:
        """The safetensors name: F8_E4M3, BF16, F32, F16."""
        return self._where[name][1].dtype

    def nbytes(self, name: str) -> int:
        return self._where[name][1].nbytes

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    @staticmethod
    def _files(directory: Path) -> dict[str, str]:
        """Tensor -> file as the index says; empty: there is one file and no index."""
        index = directory / INDEX_FILE
        if index.exists():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                return {str(name): str(file) for name, file in weight_map.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: not an index of safetensors files: {error!r}") from error
        if not (directory / SINGLE_FILE).exists():
            raise CheckpointError(f"{directory}: neither {INDEX_FILE} nor {SINGLE_FILE}")
        return {}


def mtp_copies(source: SafetensorsSource, spec: ModelSpec) -> list[str]:
    """Embedding and head that DeepSeek's checkpoints repeat under the MTP layer; nobody reads them."""
    prefix = f"model.layers.{spec.mtp_layer}."
    return [n for n in source.names() if n.startswith((f"{prefix}embed_tokens.", f"{prefix}shared_head.head."))]


def check_tensors(source: SafetensorsSource, spec: ModelSpec) -> None:
    """Raise one CheckpointError: every unreadable shard, every missing, extra, misshapen or wrongly typed tensor."""
    problems = list(source.problems)
    expected = set(mtp_copies(source, spec))
    for tensor in model_tensors(spec):
        expected.update((tensor.name, tensor.name + SCALE_SUFFIX))
        if not source.has(tensor.name):
            problems.append(f"missing: {tensor.name} {list(tensor.shape)}")
            continue
        problems += _check_one(source, tensor)
    problems += [f"extra: {name}" for name in source.names() if name not in expected]
    if problems:
        raise CheckpointError(f"{len(problems)} tensors or files are wrong:\n  " + "\n  ".join(problems))


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
    if source.dtype(scale) != "F32":
        found.append(f"dtype: {scale} is {source.dtype(scale)}, want F32")
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
