"""Problems of published shapes, one list an op (`kernels/<op>/cases.py`), used four ways: `headrace kernels check` runs
them on a device against the reference, `kernels accept` on hardware nobody here has, the ahead-of-time compile runs
them on the meta device to see with which types and constants each kernel is launched, tests run the tiny ones.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.formats import BLOCK_TOKENS, FORMATS, RowFormat
from headrace.kernels.latent_rows.reference import ReferenceLatentRows
from headrace.kernels.testing.compare import calc_diff

OPS_WITH_CASES = (
    "norm",
    "rope",
    "latent_rows",
    "index_keys",
    "index_topk",
    "sparse_mla",
    "linear",
    "router",
    "experts",
    "quantise",
    "sampling",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """How far results may be from the reference's. `diff`: bound of `calc_diff`; `rtol`, `atol`: per value, where a
    share `outliers` of the values may lie beyond them."""

    diff: float = 1e-10
    rtol: float = 1e-5
    atol: float = 1e-5
    outliers: float = 0.0


EXACT = Tolerance(0.0, 0.0, 0.0)
BF16_OUTPUT = Tolerance(2e-5, 2**-7, 2e-2)
"""Of a backend that computes in bf16 where the reference has fp32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One problem. `run(kernel, device)` builds its inputs from the seed it is called under and returns the results;
    on the meta device it must not ask for a value."""

    op: str
    name: str
    run: Callable[[Any, torch.device], tuple[Tensor, ...]]
    tolerance: Tolerance = Tolerance()
    bf16_tolerance: Tolerance = BF16_OUTPUT
    row_format: str = "tile656"
    shape: dict[str, int] = dataclasses.field(default_factory=dict)
    """What `KernelContext.shape` says of the model"""
    tiny: bool = False
    """For tests and the interpreter; the others are of published sizes."""

    def context(self, device: torch.device, deterministic: bool) -> KernelContext:
        return KernelContext(device, deterministic, self.shape, self.row_format)

    def tolerance_of(self, arithmetic: str) -> Tolerance:
        """`arithmetic`: "fp32" or "bf16", what a backend computes in between (`registry.Backend`)."""
        return self.bf16_tolerance if arithmetic == "bf16" else self.tolerance

    def results(self, kernel: Any, device: torch.device) -> tuple[Tensor, ...]:
        """Run with the case's own seed, so that two backends get the same inputs."""
        torch.manual_seed(len(self.name) + 1)
        return self.run(kernel, device)


def cases_of(op: str, tiny: bool = False) -> tuple[Case, ...]:
    """The published problems of an op, or its tiny ones."""
    module = importlib.import_module(f"headrace.kernels.{op}.cases")
    return tuple(case for case in module.CASES if case.tiny == tiny)


def matrix_types() -> dict[str, frozenset[str]]:
    """Kernel name -> types its matrix instructions must have, over all ops."""
    found: dict[str, frozenset[str]] = {}
    for op in OPS_WITH_CASES:
        module = importlib.import_module(f"headrace.kernels.{op}.cases")
        found.update({name: frozenset(types) for name, types in getattr(module, "MATRIX", {}).items()})
    return found


def disagreements(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: Tolerance) -> Iterator[str]:
    """Texts that say how the results differ beyond the tolerance; none if they do not."""
    if len(got) != len(wanted):
        yield f"{len(got)} results, the reference has {len(wanted)}"
        return
    for i, (mine, its) in enumerate(zip(got, wanted)):
        if mine.shape != its.shape:
            yield f"result {i}: shape {tuple(mine.shape)}, the reference has {tuple(its.shape)}"
            continue
        if not mine.numel():
            continue
        x, y = mine.double(), its.double()
        if bool(x.isnan().any()):
            yield f"result {i}: {int(x.isnan().sum()):,} of {x.numel():,} values are NaN"
            continue
        far = (x - y).abs() > tolerance.atol + tolerance.rtol * y.abs()
        share = float(far.double().mean())
        if share > tolerance.outliers:
            worst = float((x - y).abs().max())
            yield f"result {i}: {share:.2%} of the values are off (largest difference {worst:.3g})"
        elif tolerance.diff and (diff := calc_diff(x, y)) > tolerance.diff:
            yield f"result {i}: calc_diff {diff:.3g}, allowed {tolerance.diff:.3g}"


# Inputs that several ops share.


def block_tables(lengths: list[int], device: torch.device, holes: int = 1) -> tuple[Tensor, int]:
    """(int64 [S, B] with slots in a scattered order and `holes` empty columns at the end, number of slots)."""
    blocks = [-(-n // BLOCK_TOKENS) for n in lengths]
    slots = sum(blocks) + 2
    order = [(i * 7919 + 3) % slots for i in range(slots)] if slots % 7919 else list(range(slots))
    table = torch.full((len(lengths), max(blocks) + holes), -1, dtype=torch.int64)
    used = 0
    for i, count in enumerate(blocks):
        table[i, :count] = torch.tensor(order[used : used + count])
        used += count
    return table.to(device), slots


def query_rows(lengths: list[int], rows_each: int, device: torch.device) -> tuple[QueryRows, int]:
    """The last `rows_each` rows of each sequence, and the number of slots its cache needs."""
    table, slots = block_tables(lengths, device)
    seq = torch.arange(len(lengths)).repeat_interleave(rows_each)
    last = torch.tensor([n - rows_each + j for n in lengths for j in range(rows_each)])
    return QueryRows(seq.to(device), last.to(device), table), slots


def latent_plane(slots: int, fmt: RowFormat, device: torch.device) -> Tensor:
    """A plane with a row of values around 0.1 in every place."""
    if device.type == "meta":
        return torch.empty((slots, BLOCK_TOKENS, fmt.latent_row_bytes), dtype=torch.uint8, device=device)
    values = torch.randn(slots * BLOCK_TOKENS, 576, device=device) / 10
    rows = ReferenceLatentRows().quantise(values[:, :512], values[:, 512:], fmt)
    return rows.view(slots, BLOCK_TOKENS, fmt.latent_row_bytes)


def fp8_matrix(out: int, inner: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(e4m3 codes [out, inner] of finite values, fp32 block scales): a stored weight of outputs around 1."""
    codes = torch.randint(0, 0x70, (out, inner), dtype=torch.uint8, device=device)
    codes |= torch.randint(0, 2, (out, inner), dtype=torch.uint8, device=device) << 7
    scale = (torch.rand(-(-out // 128), -(-inner // 128), device=device) + 0.5) / (60 * inner**0.5)
    return codes.view(torch.float8_e4m3fn), scale


def format_named(name: str) -> RowFormat:
    return FORMATS[name]
