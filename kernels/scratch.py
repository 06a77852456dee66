"""Buffers that the CPU reference reuses from call to call. Fresh pages cost more than the arithmetic done in them."""

import torch
from torch import Tensor


class Scratch:
    """Grow-only, one buffer per name; contents are garbage at `take`. As thread-safe as its owner: not at all."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor that stays valid until the same name is taken again."""
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != dtype or buffer.device != device:
            buffer = torch.empty(count + count // 4, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:count].view(shape)
