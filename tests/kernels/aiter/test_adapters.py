"""Adapters against the reference through a stand-in that computes by plain formulas behind the recorded signatures, on
a device that counts as gfx950 and as gfx942 (fnuz), and the limits that are checked before anything is launched."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from headrace.errors import KernelUnsupported
from headrace.kernels import aiter_library, launch
from headrace.kernels.aiter_library import LOGITS_BYTES, LOGITS_ROWS, REFUSALS, logits_rows
from headrace.kernels.base import KernelContext
from headrace.kernels.cases import Case, cases_of, disagreements, query_rows
from headrace.kernels.formats import PLAIN576
from headrace.kernels.index_topk import aiter as index_topk
from headrace.kernels.registry import default_registry
from headrace.kernels.sparse_mla.aiter import group_heads, pages
from headrace.kernels.testing import aiter_standin

TABLE = json.loads(Path(__file__).with_name("signatures.json").read_text())
CPU = torch.device("cpu")
CASES = [case for op in REFUSALS for case in cases_of(op, tiny=True)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def result_of(backend: str, case: Case) -> tuple[torch.Tensor, ...]:
    create = importlib.import_module(f"headrace.kernels.{case.op}.{backend}").create
    return case.results(create(case.context(CPU, False)), CPU)


def takes(case: Case, target: str) -> bool:
    if case.op in ("latent_rows", "sparse_mla"):
        return case.row_format == "plain576"
    return case.op != "index_keys" or (case.row_format == "tile656" and target == "gfx950")


@pytest.mark.parametrize("target", ["gfx950", "gfx942"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op} {c.name}")
def test_adapter_agrees_with_the_reference(case: Case, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes(case, target):
        pytest.skip("refused by the registry")
    wanted = result_of("reference", case)
    if target == "gfx942":
        for module in (launch, aiter_library):
            monkeypatch.setattr(module, "FNUZ_ARCHITECTURES", ("cpu",))
    with aiter_standin.installed(TABLE["snapshot"]["functions"]) as calls:
        got = result_of("aiter", case)
    assert calls or case.op == "linear"
    assert list(disagreements(got, wanted, case.bf16_tolerance)) == []


@pytest.mark.parametrize("op", ["norm", "latent_rows", "index_keys", "sparse_mla", "linear", "router", "experts"])
def test_the_older_release_is_called_as_it_wants(op: str) -> None:
    for case in cases_of(op, tiny=True):
        if takes(case, "gfx950"):
            with aiter_standin.installed(TABLE["wheel"]["functions"]):
                assert (
                    list(disagreements(result_of("aiter", case), result_of("reference", case), case.bf16_tolerance))
                    == []
                )


def test_the_older_release_selects_2048_keys_only() -> None:
    case = cases_of("index_topk", tiny=True)[0]
    with (
        aiter_standin.installed(TABLE["wheel"]["functions"]),
        pytest.raises(KernelUnsupported, match="selects 2048 keys a row, not 64"),
    ):
        result_of("aiter", case)


def test_many_rows_are_gathered_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_topk, "PAGED_ROWS", 0)
    monkeypatch.setattr(index_topk, "logits_rows", lambda width: logits_rows(width, most=2))
    case = cases_of("index_topk", tiny=True)[0]
    with aiter_standin.installed(TABLE["snapshot"]["functions"]) as calls:
        got = result_of("aiter", case)
    assert list(disagreements(got, result_of("reference", case), case.bf16_tolerance)) == []
    rows = [given["Q"].shape[0] for name, given in calls if name == "fp8_mqa_logits"]
    assert rows == [2, 1], "3 rows of the one sequence that has more than k keys"


@pytest.mark.parametrize("paged", [8, 0])
def test_the_empty_row_of_the_mtp_layer_is_never_selected(paged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_topk, "PAGED_ROWS", paged)
    rows, slots = query_rows([150, 40], 3, CPU)
    rows.first_row = 1
    plane = torch.zeros((slots, PLAIN576.index_plane_bytes), dtype=torch.uint8)
    plane[:, : 64 * 128] = 0x30
    plane[:, 64 * 128 :] = torch.ones(slots, 64).view(torch.uint8)
    q, weights = torch.rand(6, 4, 128), torch.rand(6, 4)
    with aiter_standin.installed(TABLE["snapshot"]["functions"]):
        got = index_topk.create(KernelContext(CPU, False))(q, weights, rows, plane, PLAIN576, 64)
    assert int(got[got >= 0].min()) == 1
    assert (got[:3].diff(dim=1) > 0).all()
    assert (got[3:] >= 0).sum(1).tolist() == [37, 38, 39]


@pytest.mark.parametrize("width", [1, 255, 4096, 131072, 131073, 1 << 20, 1 << 28])
def test_logits_of_one_call_stay_below_both_bounds(width: int) -> None:
    rows = logits_rows(width)
    padded = -(-width // 256) * 256
    assert 1 <= rows <= LOGITS_ROWS
    assert 4 * rows * padded < LOGITS_BYTES
    assert rows == LOGITS_ROWS or 4 * (rows + 1) * padded >= LOGITS_BYTES


def test_a_row_too_wide_for_any_call_is_refused() -> None:
    with pytest.raises(KernelUnsupported, match="one row of 536,870,912 index logits"):
        logits_rows(1 << 29)


def test_planes_beyond_32_bit_offsets_are_refused_before_a_launch() -> None:
    plane = torch.empty((60_000, 64, 576), dtype=torch.uint8, device="meta")
    rows, _ = query_rows([100], 1, CPU)
    kernel = importlib.import_module("headrace.kernels.sparse_mla.aiter").create(KernelContext(CPU, False))
    with (
        aiter_standin.installed(TABLE["snapshot"]["functions"]) as calls,
        pytest.raises(KernelUnsupported, match=r"2,211,840,000 bytes; aiter addresses less than 2,147,483,648"),
    ):
        kernel(torch.zeros(1, 16, 576), plane, torch.zeros(1, 8, dtype=torch.int32), rows, PLAIN576, 1.0)
    assert calls == []


def test_pages_hold_valid_rows_in_order_and_one_for_an_empty_row() -> None:
    rows, _ = query_rows([150, 70], 1, CPU)
    rows.block_tables = torch.tensor([[5, 7, 2], [1, -1, -1]])
    selection = torch.tensor([[3, -1, 64, 149], [-1, -1, 64, -1]], dtype=torch.int32)
    indptr, indices, empty = pages(selection, rows, 2)
    assert indptr.tolist() == [0, 3, 6, 7, 8]
    assert indices[:6].tolist() == [5 * 64 + 3, 7 * 64, 2 * 64 + 21] * 2
    assert empty.tolist() == [False, True]


@pytest.mark.parametrize(("heads", "groups"), [(8, 1), (16, 1), (32, 2), (64, 4), (128, 8)])
def test_heads_go_in_groups_of_16(heads: int, groups: int) -> None:
    q = torch.arange(2 * heads).view(2, heads, 1).expand(2, heads, 576).float()
    grouped, found = group_heads(q)
    assert (grouped.shape, found) == ((2 * groups, 16, 576), groups)
    assert grouped[0, -1, 0] == (15 if heads >= 16 else heads - 1)
    assert grouped[groups, 0, 0] == heads


class TestRefusals:
    def context(self, **changes: Any) -> KernelContext:
        given = {
            "device": CPU,
            "deterministic": False,
            "shape": {"heads": 64, "experts": 256},
            "row_format": "plain576",
        }
        return KernelContext(**(given | changes))

    @pytest.fixture(autouse=True)
    def _an_mi355x(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aiter_library, "installed", lambda: None)
        monkeypatch.setattr(aiter_library, "architecture", lambda device: "gfx950")

    def test_an_mi355x_takes_them(self) -> None:
        for op, refuses in REFUSALS.items():
            row_format = "tile656" if op == "index_keys" else "plain576"
            assert refuses(self.context(row_format=row_format)) is None, op

    @pytest.mark.parametrize(
        ("op", "changes", "reason"),
        [
            ("linear", {"deterministic": True}, "independence of its batch"),
            ("sparse_mla", {"row_format": "tile656"}, "one scale a tensor (plain576), the format is tile656"),
            ("sparse_mla", {"shape": {"heads": 24}}, "heads must divide 16 or be a multiple of it, the model has 24"),
            ("latent_rows", {"row_format": "bf16"}, "the format is bf16"),
            ("index_keys", {}, "have a scale each (tile656), the format is plain576"),
            ("index_topk", {"row_format": "bf16"}, "are fp8, the format is bf16"),
            (
                "experts",
                {"shape": {"experts": 8, "hidden": 100}},
                "hidden must be a multiple of 128, the model has 100",
            ),
            ("experts", {"shape": {}}, "how many experts"),
        ],
    )
    def test_reasons(self, op: str, changes: dict[str, Any], reason: str) -> None:
        assert reason in (REFUSALS[op](self.context(**changes)) or "")

    def test_another_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aiter_library, "architecture", lambda device: "sm_90")
        assert REFUSALS["linear"](self.context()) == "needs gfx942 or gfx950, the device is sm_90"

    def test_fnuz_index_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aiter_library, "architecture", lambda device: "gfx942")
        assert "fnuz codes" in (REFUSALS["index_keys"](self.context(row_format="tile656")) or "")


def test_the_other_package_of_that_name_is_not_amds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not installed" in (aiter_library.installed() or "")
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter/__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert aiter_library.installed() == "the package `aiter` here is not AMD's (that one is amd-aiter)"
    (tmp_path / "aiter/mla.py").touch()
    assert aiter_library.installed() is None


def test_order_of_preference() -> None:
    registry = default_registry()
    assert registry.backends("linear")[0] == "aiter"
    for op in ("norm", "latent_rows", "index_keys"):
        assert registry.backends(op)[-2:] == ("aiter", "reference")


def test_a_release_that_lacks_a_keyword_is_named() -> None:
    facts = {"rmsnorm2d_fwd": {"arguments": ["x"], "required": ["x"]}}
    with (
        aiter_standin.installed(facts),
        pytest.raises(
            KernelUnsupported, match="rmsnorm2d_fwd takes no input, weight, epsilon; it takes x: another release"
        ),
    ):
        result_of("aiter", cases_of("norm", tiny=True)[0])
    with (
        aiter_standin.installed(facts),
        pytest.raises(KernelUnsupported, match=r"no aiter\.mla\.mla_decode_fwd"),
    ):
        aiter_library.call("mla_decode_fwd")
