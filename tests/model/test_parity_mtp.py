"""The MTP layer, three ways: Headrace's, transformers' generic MTP model (with the shim of model/oracle.py) and the
formula written out in lib/plain_model.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import matrix
from plain_model import Plain

from headrace.model import oracle
from headrace.model.base import MtpOutput
from headrace.model.exchange import LocalExchange
from headrace.model.transformer import Transformer

LENGTH = 70
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CASES = {
    "glm": ("glm", "types", "free", "pairs-pairs", "plain", "untied", "1", "first", "16"),
    "glm-5.1": ("glm", "none", "free", "pairs-pairs", "plain", "untied", "1", "first", "16"),
    "glm-tied-groups": ("glm", "rule", "groups", "pairs-halves", "yarn", "tied", "2", "replace", "16"),
    "glm-no-shared": ("glm", "pattern", "raw-weights", "halves-pairs", "plain", "untied", "0", "first", "64"),
    "deepseek": ("deepseek", "none", "groups", "pairs-halves", "yarn", "untied", "1", "first", "16"),
}


@pytest.fixture(autouse=True)
def _neutral() -> Iterator[None]:
    torch.set_num_threads(1)
    with oracle.neutral():
        yield


class Three:
    """The same random weights in all three, and a prompt with the main model's hidden states."""

    def __init__(self, directory: Path, case: matrix.Case) -> None:
        changes = matrix.config_of(case)
        self.main = oracle.make_reference(directory, changes, family=changes.pop("model_type"))
        self.mtp = oracle.make_mtp(self.main, directory)
        self.model: Transformer = oracle.load_ours(directory)
        self.plain = Plain(directory)
        self.tokens = torch.randint(0, 96, (LENGTH + 1,), generator=torch.Generator().manual_seed(3))
        self.hidden: Tensor = self.main.model(self.tokens[None, :LENGTH]).last_hidden_state[0]

    def extend(self, chunk: int = LENGTH) -> tuple[MtpOutput, Any]:
        pool = oracle.pool_for(self.model, LENGTH)
        parts = []
        for start in range(0, LENGTH, chunk):
            rows = oracle.rows_of(self.tokens[start + 1 : start + 1 + chunk].tolist(), start, pool)
            parts.append(self.model.mtp_extend(rows, self.hidden[start : start + chunk], pool, LocalExchange()))
        return MtpOutput(torch.cat([p.hidden for p in parts]), torch.cat([p.selection for p in parts])), pool


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_extend_equals_transformers_and_the_formula(case: str, tmp_path: Path) -> None:
    three = Three(tmp_path, CASES[case])
    out, pool = three.extend()
    positions = torch.arange(LENGTH).unsqueeze(0)
    generic = three.mtp.forward_layer(0, three.hidden[None], positions, None, input_ids=three.tokens[None, 1:])[0]
    plain = three.plain.mtp(three.tokens[1:], three.hidden)
    torch.testing.assert_close(plain.float(), generic, **CLOSE)
    torch.testing.assert_close(out.hidden, generic, **CLOSE)
    torch.testing.assert_close(three.model.logits(out.hidden), three.main.lm_head(generic), **CLOSE)
    kept = three.plain.kept[three.model.spec.mtp_layer]
    for row, selected in enumerate(out.selection.tolist()):
        # MTP position p lies in cache row p + 1.
        assert [s - 1 for s in selected if s >= 0] == torch.nonzero(kept[row]).flatten().tolist()
    for chunk in (33, 1):
        again, other = three.extend(chunk)
        assert torch.equal(again.hidden, out.hidden)
        assert torch.equal(other.latent, pool.latent)
        assert torch.equal(other.index, pool.index)


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "deepseek"])
@pytest.mark.parametrize("shared", [True, False])
def test_draft_steps_chain_the_post_norm_hidden(case: str, tmp_path: Path, shared: bool) -> None:
    """Three drafts. With a shared index every one attends to what the last true row selected, and writes nothing."""
    three = Three(tmp_path, CASES[case])
    model = three.model
    model.shares_draft_index = shared
    out, pool = three.extend()
    before = pool.latent.clone()
    tokens, hidden = three.tokens[1:], three.hidden
    step = MtpOutput(out.hidden[-1:], out.selection[-1:])
    last_sees = out.selection[-1].long() - 1 if shared else None
    for number, drafted in enumerate((17, 3, 60)):
        rows = oracle.rows_of([drafted], LENGTH + number, pool)
        tokens, hidden = torch.cat((tokens, torch.tensor([drafted]))), torch.cat((hidden, step.hidden))
        step = model.mtp_draft(rows, step.hidden, step.selection, pool, LocalExchange())
        wanted = three.plain.mtp(tokens, hidden, last_sees)
        torch.testing.assert_close(step.hidden, wanted[-1:].float(), **CLOSE)
    assert torch.equal(pool.latent, before) == shared
