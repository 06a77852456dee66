"""Every Triton kernel of the tree compiles for gfx950, gfx942 and sm_90, spills nothing on AMD, fits, and uses the
matrix instructions it should. The first run takes a minute or two of compiling, later ones read Triton's cache."""

import concurrent.futures
import dataclasses
import functools
import importlib.util

import pytest

from headrace.errors import KernelUnsupported
from headrace.kernels import aot
from headrace.kernels.aot import TARGETS, Compiled, compile_target, entry_kernels, faults, matrix_types_in, short_name
from headrace.kernels.aot_report import markdown, text
from headrace.kernels.cases import matrix_types

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
HOPPER_ONLY = ("hopper.", "experts.permute.")
GOOD = Compiled("k", "op", "case", "gfx950", "BM=64", 4, 2, 300, 0, 64 << 10, ("fp8",), "3.9.0")


@functools.cache
def compiled() -> dict[str, list[Compiled] | Exception]:
    """All targets at once, each in its process."""
    with concurrent.futures.ThreadPoolExecutor(len(TARGETS)) as pool:
        running = {target: pool.submit(compile_target, target) for target in TARGETS}
    return {target: future.exception() or future.result() for target, future in running.items()}  # type: ignore[misc]


@needs_triton
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", entry_kernels())
@pytest.mark.parametrize("target", TARGETS)
def test_kernel(target: str, kernel: str) -> None:
    results = compiled()[target]
    assert not isinstance(results, Exception), results
    if target != "sm_90" and kernel.startswith(HOPPER_ONLY):
        pytest.skip("written for NVIDIA Hopper")
    forms = [result for result in results if result.kernel == kernel]
    assert forms, f"no published problem launches {kernel}: add one to kernels/{kernel.split('.')[0]}/cases.py"
    wanted = matrix_types().get(short_name(kernel), frozenset())
    wrong = {f"{r.case}, {r.constants}": why for r in forms if (why := faults(r, wanted))}
    assert wrong == {}


def test_declared_matrix_types_belong_to_kernels() -> None:
    assert set(matrix_types()) <= {short_name(kernel) for kernel in entry_kernels()}


def test_what_counts_as_a_fault() -> None:
    wanted = frozenset({"fp8"})
    assert faults(GOOD, wanted) == []
    assert faults(dataclasses.replace(GOOD, spills=99), wanted) == ["99 registers spilled"]
    assert faults(dataclasses.replace(GOOD, shared=170 << 10), wanted) == [
        "174,080 bytes of shared memory, gfx950 has 163,840"
    ]
    assert faults(dataclasses.replace(GOOD, target="gfx942", shared=65537), wanted) != []
    assert faults(dataclasses.replace(GOOD, matrix=("f16",)), wanted) == ["matrix instructions: f16; wanted: fp8"]
    assert faults(GOOD, frozenset()) == ["matrix instructions: fp8; wanted: none"]
    assert faults(dataclasses.replace(GOOD, error="CompilationError: no"), wanted) == ["CompilationError: no"]
    hopper = dataclasses.replace(GOOD, target="sm_90", spills=8)
    assert (faults(hopper, wanted), aot.ignored(hopper)) == ([], ["8 bytes spilled"])


@pytest.mark.parametrize(
    ("line", "target", "types"),
    [
        ("v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[2:9]", "gfx950", ("fp8",)),
        ("v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[2:3]", "gfx942", ("fp8",)),
        ("v_mfma_f32_32x32x16_bf16 a[0:15], v[2:5]", "gfx950", ("bf16",)),
        ("v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3]", "gfx942", ("bf16",)),
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[2:3]", "gfx942", ("f16",)),
        ("v_add_f32_e32 v0, v1, v2", "gfx950", ()),
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {", "sm_90", ("fp8",)),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {", "sm_90", ("bf16",)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {", "sm_90", ("bf16",)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {", "sm_90", ("f16",)),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {", "sm_90", ("f32",)),
    ],
)
def test_matrix_instructions_are_told_apart(line: str, target: str, types: tuple[str, ...]) -> None:
    assert matrix_types_in(line, target) == types


def test_amd_metadata() -> None:
    listing = ".vgpr_count:     407\n.vgpr_spill_count: 0\n.sgpr_spill_count: 12\n.private_segment_fixed_size: 0\n"
    assert aot.amd_registers(listing) == (407, 0)
    assert aot.amd_registers(listing.replace("spill_count: 0", "spill_count: 13")) == (407, 13)
    assert aot.amd_registers(listing.replace("size: 0", "size: 64")) == (407, 16)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(KernelUnsupported, match="no target 'gfx1100'; known: gfx950, gfx942, sm_90"):
        compile_target("gfx1100")


def test_the_table_shows_faults() -> None:
    table = markdown([GOOD, dataclasses.replace(GOOD, spills=7)])
    assert "## gfx950 (MI355X)" in table
    assert "| k | op: case | BM=64 | 4 | 2 | 300 | 7 | 65,536 | fp8 | 7 registers spilled" in table
    assert "k                                      gfx950      2       300      7   65,536  fp8" in text(
        [GOOD, dataclasses.replace(GOOD, spills=7)]
    )
