"""Cases of products, routed experts, router, query quantisation and sampling at GLM-5.2's sizes."""

from typing import Any

import torch
from torch import Tensor

from headrace.errors import KernelUnsupported
from headrace.kernels.base import Granularity, RouterRule
from headrace.kernels.bench import inputs
from headrace.kernels.bench.case import Case, Work
from headrace.kernels.bench.measure import Call
from headrace.kernels.bench.rows import GOAL, entry
from headrace.kernels.sampling.reference import Filters, noise_key, sample_rows

HIDDEN, INNER, EXPERTS, LOCAL, TOP = 6144, 2048, 256, 32, 8
VOCABULARY = 154_880
PUBLIC_US = {
    (2624, 6144): {16: 10.6, 64: 9.8, 128: 10.5, 640: 22.1, 4096: 117.1},
    (16384, 2048): {16: 11.7, 64: 12.0, 128: 12.5, 640: 40.3, 4096: 209.4},
    (6144, 16384): {16: 29.9, 64: 29.9, 128: 32.4, 640: 103.9, 4096: 565.5},
    (24576, 6144): {16: 40.5, 64: 40.7, 128: 45.8, 640: 166.2, 4096: 876.4},
    (6144, 12288): {16: 23.2, 64: 22.6, 128: 24.4, 640: 77.9, 4096: 425.9},
}
"""(out, in) -> rows -> the fastest public kernel with the same scales on an H200, measured in an earlier run"""


def codes(shape: tuple[int, ...], device: torch.device, source: torch.Generator) -> Tensor:
    """Values of every size e4m3 has: a card draws less power on tame ones and runs faster."""
    out = torch.empty(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    for part in out.view(-1, shape[-1]).split(8192):
        draw = torch.randn(part.shape, device=device, generator=source) * 100
        part.copy_(draw.clamp_(-448, 448).to(torch.float8_e4m3fn))
    return out


def scales(shape: tuple[int, ...], device: torch.device, source: torch.Generator) -> Tensor:
    return (torch.rand(shape, device=device, generator=source) + 0.5) * 1e-3


def linear(rows: int, out: int, inner: int, public_us: float) -> Case:
    """The product alone, bf16 results, of activations that are quantised already."""

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        blocks = (-(-out // 128), inner // 128)
        weight = kernel.prepare((codes((out, inner), device, source), scales(blocks, device, source)))
        product = entry(kernel, "product")
        x, x_scales = entry(kernel, "encode")(torch.randn((rows, inner), device=device, generator=source))
        return lambda: product(x, x_scales, weight, torch.bfloat16)

    work = Work(fp8_flop=2.0 * rows * out * inner, bytes=out * inner + rows * inner + 2.0 * rows * out)
    sets = 6 if rows < 4096 else 2
    return Case("linear", f"{rows} x {out} x {inner}", build, work, goal_us=1.05 * public_us, sets=sets)


def expert_weight(kernel: Any, device: torch.device, source: torch.Generator) -> Any:
    def pairs(out: int, inner: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (codes((out, inner), device, source), scales((out // 128, inner // 128), device, source))
            for _ in range(LOCAL)
        ]

    return kernel.prepare(pairs(INNER, HIDDEN), pairs(INNER, HIDDEN), pairs(HIDDEN, INNER))


def experts(rows: int) -> Case:
    """One rank of eight: all ranks' rows arrive, an eighth of the pairs is for its 32 experts; gathering and the fp64
    sum are part of it."""

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        weight = expert_weight(kernel, device, source)
        x = codes((rows, HIDDEN), device, source).view(torch.uint8)
        x_scales = scales((rows, HIDDEN // 128), device, source)
        ids = torch.rand((rows, EXPERTS), device=device, generator=source).topk(TOP).indices.sort(-1).values.int()
        gains = torch.rand((rows, TOP), device=device, generator=source)
        return lambda: kernel(x, x_scales, ids, gains, weight, 0)

    pairs = rows * TOP * LOCAL / EXPERTS
    weights = 3.0 * HIDDEN * INNER * min(LOCAL, pairs)
    work = Work(fp8_flop=6.0 * pairs * HIDDEN * INNER, bytes=weights + rows * HIDDEN * 9.0)
    return Case("experts", f"{rows} rows of 8 ranks, {LOCAL} of {EXPERTS} experts", build, work, sets=2, graph=False)


def grouped(rows: int, second: bool, goal_ratio: float) -> Case:
    """One grouped product over rows that lie by expert, spread at random over 32: gate, up, SiLU * mul and
    requantisation, or the second product with its weights."""

    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        if type(kernel).__name__ != "GluonExperts":
            raise KernelUnsupported(f"{type(kernel).__name__} gathers rows as it reads them")
        from headrace.kernels.experts.gluon import choose_shape
        from headrace.kernels.experts.permute import plan_places
        from headrace.kernels.hopper.launch import GroupedRows, down, gated

        source = inputs.generator(device, seed)
        shape = choose_shape(rows, LOCAL)
        ids = torch.randint(0, LOCAL, (rows,), device=device, generator=source)
        places = plan_places(ids, LOCAL, shape.rows)
        width = INNER if second else HIDDEN
        by_expert = GroupedRows(
            codes((places.rows, width), device, source), scales((places.rows, width // 128), device, source),
            places.expert, places.tiles, shape,
        )  # fmt: skip
        if second:
            matrix = codes((LOCAL, HIDDEN, INNER), device, source)
            its_scales = scales((LOCAL, HIDDEN // 128, INNER // 128), device, source)
            gains = torch.rand(places.rows, device=device, generator=source)
            return lambda: down(by_expert, matrix, its_scales, gains)
        matrix = codes((LOCAL, 2 * INNER, HIDDEN), device, source)
        its_scales = scales((LOCAL, 2, INNER // 128, HIDDEN // 128), device, source)
        return lambda: gated(by_expert, matrix, its_scales)

    half = 1 if second else 2
    weights = half * float(HIDDEN) * INNER * min(LOCAL, rows)
    moved = rows * (INNER + 2.0 * HIDDEN) if second else rows * (HIDDEN + float(INNER))
    work = Work(fp8_flop=half * 2.0 * rows * HIDDEN * INNER, bytes=weights + moved)
    name = "second product" if second else "gate, up, SiLU, requantise"
    return Case("experts", f"{name}, {rows} rows of {LOCAL} experts", build, work, goal_ratio=goal_ratio, sets=2)


def router(rows: int) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        source = inputs.generator(device, seed)
        x = torch.randn((rows, HIDDEN), device=device, generator=source)
        gate = torch.randn((EXPERTS, HIDDEN), device=device, generator=source) / HIDDEN**0.5
        bias, rule = torch.rand(EXPERTS, device=device, generator=source) / 10, RouterRule(TOP, 1, 1, True, 2.5)
        return lambda: kernel(x, gate, bias, rule)

    return Case("router", f"{rows} rows", build, Work(bytes=4.0 * HIDDEN * (rows + EXPERTS)))


def quantise(rows: int, width: int, granularity: Granularity) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        x = torch.randn((rows, width), device=device, generator=inputs.generator(device, seed)).bfloat16()
        return lambda: kernel(x, granularity)

    name = f"{rows} x {width} bf16, a scale a {granularity.value}"
    return Case("quantise", name, build, Work(bytes=3.0 * rows * width), goal_ratio=GOAL)


def sampling(rows: int, filters: Filters) -> Case:
    def build(kernel: Any, device: torch.device, seed: int) -> Call:
        logits = torch.randn((rows, VOCABULARY), device=device, generator=inputs.generator(device, seed)) * 3
        how = sample_rows([filters] * rows, [noise_key(seed, 0, i) for i in range(rows)], device)
        return lambda: kernel.sample(logits, how)

    name = f"{rows} rows, temperature {filters.temperature:g}, top_p {filters.top_p:g}, top_k {filters.top_k}"
    return Case("sampling", name, build, Work(bytes=4.0 * rows * VOCABULARY))


def cases() -> list[Case]:
    queries = [quantise(640 * 64, 576, granularity) for granularity in Granularity]
    return [
        *(linear(rows, *size, us) for size, public in PUBLIC_US.items() for rows, us in public.items()),
        grouped(65_500, False, 0.85),
        grouped(65_500, True, 0.85),
        grouped(128, False, 0.90),
        grouped(128, True, 0.90),
        grouped(1056, False, 0.90),
        grouped(1056, True, 0.90),
        experts(128),
        experts(5120),
        experts(65_536),
        *(router(rows) for rows in (1, 128, 640, 4096)),
        quantise(65_536, HIDDEN, Granularity.GROUP),
        *queries,
        *(sampling(rows, f) for rows in (128, 640) for f in (Filters(1.0), Filters(1.0, top_p=0.95), Filters(0.0))),
    ]
