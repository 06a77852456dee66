"""Every test here has two forms: interpreted on a CPU (the default) or compiled on a GPU (`-m gpu`). One process does
one of them, because `triton.jit` decides when a module is imported.

Every buffer a backend allocates starts as NaN, so what a kernel forgets to write shows.
"""

import importlib.util
from typing import Any

import pytest
import torch

COMPILES = torch.cuda.is_available()

if importlib.util.find_spec("triton") is not None and not COMPILES:
    from headrace.kernels.testing import interpreter

    interpreter.install()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and COMPILES:
        pytest.skip("this process compiles for its GPU; the interpreter runs where there is none")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() and out.element_size() > 1 else out.fill_(-1 & 0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)
