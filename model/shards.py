"""Safetensors files read by offset: no mapping, so reads run in parallel without the interpreter lock and the memory in
use is exactly the tensors that are held."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import CheckpointError

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
_READ_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies; offsets in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class ShardFile:
    """One open file. Raises CheckpointError when its header is not sound or the file is shorter than it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.entries = self._header()
        except OSError as error:
            self.close()
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in memory of its own."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is {entry.dtype}, not one of {', '.join(DTYPES)}")
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        while done < entry.nbytes:
            count = os.preadv(self._fd, [view[done : done + _READ_BYTES]], entry.start + done)
            if not count:
                raise CheckpointError(f"{self.path} ends at byte {entry.start + done}, inside {name}")
            done += count
        return data.view(DTYPES[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _header(self) -> dict[str, Entry]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{self.path}: not a safetensors file: header of {length} bytes in {size}")
        try:
            raw = json.loads(os.pread(self._fd, length, 8))
            raw.pop("__metadata__", None)
            entries = {name: _entry(item, 8 + length) for name, item in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: not a safetensors file: {error!r} in its header") from error
        ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
        for (first, a), (second, b) in itertools.pairwise(ordered):
            if b.start < a.end:
                raise CheckpointError(f"{self.path}: not a safetensors file: {first} and {second} share bytes")
        end = max((entry.end for entry in entries.values()), default=0)
        if end > size:
            raise CheckpointError(f"{self.path}: {size} bytes, but its header speaks of {end}: the file is cut off")
        return entries


def _entry(item: dict[str, object], base: int) -> Entry:
    start, end = (int(offset) for offset in item["data_offsets"])  # type: ignore[attr-defined]
    shape = tuple(int(side) for side in item["shape"])  # type: ignore[attr-defined]
    entry = Entry(str(item["dtype"]), shape, base + start, base + end)
    dtype = DTYPES.get(entry.dtype)
    if (
        start < 0
        or end < start
        or min(shape, default=0) < 0
        or (dtype is not None and entry.nbytes != math.prod(shape) * dtype.itemsize)
    ):
        raise ValueError(f"{entry.dtype} {list(shape)} in {end - start} bytes")
    return entry
