"""Where weights come from: the safetensors files of a checkpoint, and whether they are what a model needs. The other
source is `dummy.py`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from headrace.errors import CheckpointError
from headrace.model.shards import ShardFile
from headrace.model.spec import ModelSpec
from headrace.model.tensors import SCALE_SUFFIX, TensorShape, model_tensors, scale_shape

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class TensorSource(Protocol):
    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor:
        """In the stored dtype; from files on the CPU, where the caller drops it as soon as it is on its device."""
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

    @property
    def largest_shard_bytes(self) -> int:
        sizes = [sum(entry.nbytes for entry in shard.entries.values()) for shard in self._shards.values()]
        return max(sizes, default=0)

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
    if len(tensor.shape) != 2:
        found.append(f"scale: {scale}: only matrices have scales, {tensor.name} is {list(tensor.shape)}")
    elif source.shape(scale) != scale_shape(tensor.shape):
        found.append(f"shape: {scale} is {list(source.shape(scale))}, want {list(scale_shape(tensor.shape))}")
    return found
