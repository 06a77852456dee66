"""The benchmark's arithmetic, inputs and cases, on a CPU with the reference kernels. Times are a GPU's matter."""

import itertools
import json

import pytest
import torch

from headrace.errors import KernelUnsupported
from headrace.kernels.base import Granularity, KernelContext
from headrace.kernels.bench import attention, dense, inputs, rows, run, selection
from headrace.kernels.bench.case import Case, Work, record
from headrace.kernels.bench.cases import all_cases
from headrace.kernels.bench.measure import Ceilings, Timing, summary
from headrace.kernels.formats import FORMATS
from headrace.kernels.registry import OPS, default_registry
from headrace.kernels.sampling.reference import Filters

CPU = torch.device("cpu")
CARD = Ceilings(copy=4e12, bf16=8e14, fp8=1.6e15)


def test_a_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    assert Work(bf16_flop=8e11, fp8_flop=1.6e12, bytes=4e9).floor_us(CARD) == (pytest.approx(2000), "fp8")
    assert Work(bf16_flop=8e9, bytes=4e9).floor_us(CARD) == (pytest.approx(1000), "copy")


def test_a_record_says_whether_the_goal_is_met() -> None:
    timing = summary([1000.0, 2000.0, 3000.0], 3, "events")
    case = Case("norm", "x", lambda kernel, device, seed: lambda: None, Work(bytes=4e9), goal_ratio=0.6)
    found = record(case, "triton", "burst", timing, CARD)
    assert (found.median_us, found.ratio, found.met) == (2000.0, pytest.approx(0.5), False)
    assert found.tbytes == pytest.approx(2.0)
    timed = Case("norm", "x", case.build, case.work, goal_us=2000)
    assert record(timed, "triton", "burst", timing, CARD).met


def test_the_report_is_json_and_a_table_with_what_failed() -> None:
    found = record(all_cases()[0], "triton", "hot", Timing(5.0, 4.0, 6.0, 20, "graph"), CARD)
    report = run.Report(
        "card", "2", "3", "now", "cmd", [CARD], [found], [("a", "b", "no entry")], [("c", "d", "broke")]
    )
    assert json.loads(report.to_json())["records"][0]["p90_us"] == 6.0
    assert "FAILED c d: broke" in report.table()


def test_cases_have_names_of_their_own_and_known_ops() -> None:
    cases = all_cases()
    assert len({(case.op, case.name) for case in cases}) == len(cases)
    assert {case.op for case in cases} <= set(OPS)
    assert all(case.work.floor_us(CARD)[0] > 0 for case in cases)
    assert [case.op for case in run.matching(cases, ["rope 16384"])] == ["rope"]


@pytest.mark.parametrize(
    "case",
    [
        attention.sparse_mla(2, 3, 200, 4, 32, drifting=True),
        attention.sparse_mla(1, 3, 200, 4, 32, drifting=False),
        selection.index_topk(2, 3, 200, 32, heads=4),
        dense.router(3),
        dense.quantise(5, 200, Granularity.GROUP),
        dense.sampling(2, Filters(1.0, top_p=0.9)),
        rows.latent_scatter(70),
        rows.rms(3, 100),
        rows.rope(3, 2),
    ],
    ids=lambda case: f"{case.op} {case.name}",
)
def test_a_case_builds_a_call_that_its_kernel_takes(case: Case) -> None:
    kernel = default_registry().choose(case.op, KernelContext(CPU, True, row_format="tile656"), "reference").kernel
    out = case.build(kernel, CPU, 1)()
    results = out if isinstance(out, tuple) else () if out is None else (out,)
    assert all(bool(torch.isfinite(result.float()).all()) for result in results)


def test_an_entry_that_a_backend_lacks_is_refused() -> None:
    kernel = default_registry().choose("latent_rows", KernelContext(CPU, True), "reference").kernel
    with pytest.raises(KernelUnsupported, match="write_projection"):
        rows.latent_write(64, "tile656").build(kernel, CPU, 1)


def test_drifting_selections_share_most_rows() -> None:
    chosen = inputs.drifting_selection(2, 40, 10_000, 256, CPU, 3)
    assert chosen.shape == (80, 256)
    assert (chosen.diff(dim=1) >= 0).all()
    kept = [len(set(a.tolist()) & set(b.tolist())) / 256 for a, b in itertools.pairwise(chosen[:40])]
    assert 0.7 < sum(kept) / len(kept) < 0.9
    assert len(set(chosen[39].tolist()) & set(chosen[40].tolist())) < 64
    assert inputs.different_rows(chosen, 2, 10_000) < 80 * 256


def test_uniform_selections_are_distinct_and_ascending() -> None:
    chosen = inputs.uniform_selection(300, 500, 64, CPU, 3)
    assert chosen.shape == (300, 64)
    assert (chosen.diff(dim=1) > 0).all()


def test_pools_are_valid_rows() -> None:
    fmt = FORMATS["tile656"]
    pool = inputs.latent_pool(600, fmt, CPU, 1)
    assert pool.shape == (600, 64, 656)
    assert torch.equal(pool[0], pool[512])
    query = inputs.query_rows(3, 2, 130, CPU, 1)
    assert query.block_tables.unique().numel() == 9
    assert query.last_row.tolist() == [128, 129] * 3


def test_codes_of_a_product_are_all_written() -> None:
    """More rows than one part of the drawing."""
    found = dense.codes((8200, 128), CPU, inputs.generator(CPU, 1)).float()
    assert found.isfinite().all()
    assert found[8195:].abs().max() > 100
    reference = default_registry().choose("linear", KernelContext(CPU, False), "reference").kernel
    with pytest.raises(KernelUnsupported, match="has no product"):
        dense.linear(2, 128, 256, 1.0).build(reference, CPU, 0)
