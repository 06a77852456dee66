"""`headrace kernels` as it is called. Triton's interpreter is for a whole process, so `check` has one of its own."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from headrace.cli import main
from headrace.kernels.base import KernelContext
from headrace.kernels.check import check, standings
from headrace.kernels.registry import OPS, Backend, Registry, default_registry

CPU = ["kernels", "--set", "model.device=cpu"]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_list_names_every_op_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["deterministic"], found["row_format"]) == ("cpu", True, "tile656")
    assert [op["op"] for op in found["ops"]] == list(OPS)
    for op in found["ops"]:
        assert op["chosen"] == "reference"
        assert dict(op["backends"])["reference"] == ""
        assert all(reason for name, reason in op["backends"] if name != "reference")
    assert main([*CPU, "list"]) == 0
    text = capsys.readouterr().out
    assert "* reference  can" in text
    assert "triton     " in text


def test_list_says_what_a_forced_choice_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "--set", "model.kernels=sparse_mla=triton", "list"]) == 1
    assert "sparse_mla  CANNOT: forced to triton: " in capsys.readouterr().out


def test_standings_are_what_would_be_chosen() -> None:
    context = KernelContext(torch.device("cpu"), True, {"heads": 64}, "tile656")
    for standing in standings(context):
        assert standing.chosen == default_registry().choose(standing.op, context).backend


def test_measuring_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "bench"]) == 2
    assert "kernels bench needs a GPU" in capsys.readouterr().err


@needs_triton
def test_check_interprets_triton_on_a_cpu() -> None:
    command = [sys.executable, "-P", "-m", "headrace.cli", *CPU, "check", "--tiny", "--interpret", "--json"]
    done = subprocess.run([*command, "--op", "norm", "linear"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bad"] == 0
    agreeing = {v["op"] for v in found["verdicts"] if v["backend"] == "triton" and v["status"] == "agrees"}
    assert agreeing == {"norm", "linear"}


class WrongNorms:
    def rms(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * weight

    def layer(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        raise RuntimeError("illegal address")


class NearNorms(WrongNorms):
    def layer(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return x


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made: Any = {"near": NearNorms, "wrong": WrongNorms}
    registry = Registry()
    monkeypatch.setattr(Backend, "create", lambda self, context: made[self.name]())
    registry.register("norm", Backend("near", "x:y"))
    registry.register("norm", Backend("wrong", "x:y"))
    registry.register("norm", Backend("absent", "x:y", lambda context: "not here"))
    return registry


def test_check_tells_wrong_from_broken_from_refused(registry: Registry) -> None:
    verdicts = list(check(torch.device("cpu"), ["norm"], tiny=True, registry=registry))
    status = {v.backend: (v.status, v.bad, v.text) for v in verdicts}
    assert status["near"][:2] == ("DIFFERS", True)
    assert "% of the values are off" in status["near"][2]
    assert status["wrong"] == ("FAILED", True, "RuntimeError: illegal address")
    assert status["absent"] == ("refused", False, "not here")
