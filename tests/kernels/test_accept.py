"""The acceptance kit from end to end in its tiny form, on a CPU with the interpreter; aiter's tuners as stand-ins."""

import csv
import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from headrace.cli import main
from headrace.kernels import accept as kit
from headrace.kernels import aiter_tables
from headrace.kernels.accept import Options, Skipped, accept, report
from headrace.kernels.tuned import MEASURED, parse

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")


@needs_triton
@pytest.mark.timeout(900)
def test_the_whole_procedure_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, "-P", "-m", "headrace.cli", "kernels", "--set", "model.device=cpu", "accept", "--tiny"]
    done = subprocess.run([*command, "--interpret", "--out", out, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data == json.loads((out / "report.json").read_text())
    status = {step["name"]: step["status"] for step in data["steps"]}
    assert status == {"list": "done", "check": "done", "bench": "skipped", "tune": "done", "aiter-tables": "done"}
    agreeing = {(v["op"], v["backend"]) for v in data["verdicts"] if v["status"] == "agrees"}
    assert {("sparse_mla", "triton"), ("index_topk", "triton"), ("experts", "triton")} <= agreeing
    assert all(v["text"] for v in data["verdicts"] if v["backend"] == "aiter")
    table = parse(json.loads((out / "tables/triton-sparse_mla.cpu.json").read_text()))
    assert (table.status, len(table.entries)) == (MEASURED, 2)
    text = (out / "report.md").read_text()
    assert "**Passed.**" in text
    assert "| sparse_mla | triton | 4 | 0 | 0 |" in text
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        names = archive.getnames()
    assert {"report/report.md", "report/report.json", "report/aiter/untuned_fmoe.csv"} <= set(names)


def test_it_needs_a_gpu_or_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--set", "model.device=cpu", "accept", "--out", str(tmp_path / "x")]) == 2
    assert "kernels accept needs a GPU" in capsys.readouterr().err


def test_a_step_that_breaks_is_reported_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> str:
        raise RuntimeError("HIP error: invalid argument")

    monkeypatch.setattr(kit, "_check", broken)
    found = accept(CPU, tmp_path / "r", Options(tiny=True), "here", say=lambda text: None)
    status = {step.name: (step.status, step.text) for step in found.steps}
    assert status["check"] == ("FAILED", "RuntimeError: HIP error: invalid argument")
    assert status["tune"][0] == "skipped"
    assert status["aiter-tables"][0] == "done"
    assert not found.passed
    assert "| check | FAILED |" in (tmp_path / "r/report.md").read_text()
    asked = accept(CPU, tmp_path / "s", Options(tiny=True, skip=("check", "tune")), "here", say=lambda text: None)
    assert [step.text for step in asked.steps if step.name in ("check", "tune")] == ["as asked", "as asked"]


def test_a_wrong_kernel_is_named(tmp_path: Path) -> None:
    found = kit.Acceptance(
        {"where": "here"}, [], [kit.Verdict("norm", "3 rows", "aiter", False, "DIFFERS", "2 %", 1.0)], []
    )
    assert not found.passed
    assert "norm, aiter, free order, 3 rows: DIFFERS (2 %)" in report(found)
    with pytest.raises(Skipped, match="nothing is measured on a cpu"):
        kit._bench(found, CPU)


def test_shapes_go_to_aiter_in_its_form(tmp_path: Path) -> None:
    files = aiter_tables.write_untuned(tmp_path, "torch.float8_e4m3fn")
    with files["gemm"].open() as file:
        gemms = list(csv.DictReader(file))
    assert list(gemms[0]) == ["M", "N", "K"]
    shapes = {(int(row["N"]), int(row["K"])) for row in gemms}
    assert {(16384, 2048), (6144, 16384), (4096, 2048), (6144, 4096), (6144, 512)} <= shapes
    assert len(gemms) == len(shapes) * len(aiter_tables.GEMM_ROWS)
    with files["moe"].open() as file:
        experts = list(csv.DictReader(file))
    assert list(experts[0]) == list(aiter_tables.MOE_COLUMNS)
    kinds = {(row["inter_dim"], row["expert"], row["topk"]) for row in experts}
    assert kinds == {("2048", "32", "8"), ("512", "256", "8")}
    assert {row["q_dtype_w"] for row in experts} == {"torch.float8_e4m3fn"}


TUNER = """
import pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows = pathlib.Path(given["-i"]).read_text().splitlines()
pathlib.Path(given["-o"]).write_text("cu_num," + rows[0] + "\\n")
print("libtype", given.get("--libtype"))
"""


def test_aiters_tuners_are_found_run_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = aiter_tables.write_untuned(tmp_path / "out", "torch.float8_e4m3fn", tiny=True)
    none = aiter_tables.run_tuners(files, tmp_path / "out", 60)
    assert [run.status for run in none] == ["not run", "not run"]
    assert "gemm_moe_tune.py -i" in none[1].command
    package = tmp_path / "site/aiter"
    gemm = tmp_path / "site/aiter_meta/csrc" / aiter_tables.GEMM_TUNER
    moe = tmp_path / "site/aiter_meta/csrc" / aiter_tables.MOE_TUNER
    for path in (package / "__init__.py", gemm, moe):
        path.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    gemm.write_text(TUNER)
    moe.write_text("import time; print('half way', flush=True); time.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    runs = aiter_tables.run_tuners(files, tmp_path / "out", 5)
    assert [run.status for run in runs] == ["tuned", "out of time"]
    assert (tmp_path / "out/a8w8_blockscale_tuned_gemm.csv").read_text() == "cu_num,M,N,K\n"
    assert (tmp_path / "out/gemm.log").read_text() == "libtype both\n"
    assert (tmp_path / "out/moe.log").read_text() == "half way\n"
    moe.write_text("raise SystemExit(3)\n")
    assert aiter_tables.run_tuners(files, tmp_path / "out", 60)[1].status == "failed"
