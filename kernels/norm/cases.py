"""Problems of the norms: GLM-5.2's widths."""

import functools
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cases import Case, Tolerance


def norms(kernel: Any, device: torch.device, rows: int, width: int) -> tuple[Tensor, ...]:
    x, w, b = (torch.randn(shape, device=device) for shape in ((rows, width), (width,), (width,)))
    return kernel.rms(x * 3, w, 1e-5), kernel.layer(x * 3, w, b, 1e-6)


CASES = tuple(
    Case("norm", f"{rows} rows of {width}", functools.partial(norms, rows=rows, width=width), tiny=tiny,
         tolerance=Tolerance(1e-9, 1e-5, 1e-5))
    for rows, width, tiny in ((3, 96, True), (640, 6144, False), (640, 2048, False), (5, 512, False), (640, 128, False))
)  # fmt: skip
