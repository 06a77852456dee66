"""The MTP layer against transformers' generic MTP model and against a plain formula written out here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from headrace.model import oracle
from headrace.model.base import MtpOutput
from headrace.model.exchange import LocalExchange
from headrace.model.transformer import Transformer

LENGTH = 70


@pytest.fixture(autouse=True)
def _neutral() -> Iterator[None]:
    torch.set_num_threads(1)
    with oracle.neutral():
        yield


def plain_mtp(main: Any, layer: Any, next_tokens: Tensor, hidden: Tensor, selection: Tensor | None = None) -> Tensor:
    """u = eh_proj[enorm(e) ; hnorm(h)], one decoder block with position p, causal, then the head norm. [n, D].
    `selection` int [K]: the last row attends to these positions and to nothing else."""
    count = next_tokens.shape[0]
    embedded = main.model.embed_tokens(next_tokens)
    x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), -1)).unsqueeze(0)
    positions = torch.arange(count).unsqueeze(0)
    mask = torch.full((count, count), -torch.inf).triu(1).view(1, 1, count, count)
    block = layer.mtp_block
    indexer = block.self_attn.indexer.forward
    if selection is not None:
        # Reused selections do not hold the row itself; the mask keeps only them.
        mask[0, 0, -1] = -torch.inf
        mask[0, 0, -1, selection] = 0
        block.self_attn.indexer.forward = lambda *a, **k: torch.arange(count).expand(1, count, count).int()
    try:
        out = block(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=main.model.rotary_emb(x, position_ids=positions),
        )
    finally:
        block.self_attn.indexer.forward = indexer
    return layer.post_norm(out[0])


def prepare(tmp_path: Path) -> tuple[Any, Any, Transformer, Tensor, Tensor]:
    main = oracle.make_reference(tmp_path, {"indexer_types": ["full", "shared", "full", "shared"]})
    mtp = oracle.make_mtp(main, tmp_path)
    tokens = torch.randint(0, 96, (LENGTH + 1,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        hidden = main.model(tokens[None, :LENGTH]).last_hidden_state[0]
    return main, mtp, oracle.load_ours(tmp_path), tokens, hidden


def ours(model: Transformer, tokens: Tensor, hidden: Tensor) -> tuple[MtpOutput, Any]:
    pool = oracle.pool_for(model, LENGTH)
    rows = oracle.rows_of(tokens[1:].tolist(), 0, pool)
    return model.mtp_extend(rows, hidden, pool, LocalExchange()), pool


@torch.no_grad()
def test_extend_equals_transformers_mtp_and_the_plain_formula(tmp_path: Path) -> None:
    main, mtp, model, tokens, hidden = prepare(tmp_path)
    out, _ = ours(model, tokens, hidden)
    plain = plain_mtp(main, mtp.layers[0], tokens[1:], hidden)
    positions = torch.arange(1, LENGTH + 1).unsqueeze(0)
    generic = mtp.forward_layer(0, hidden[None], positions, None, input_ids=tokens[None, 1:])[0]
    torch.testing.assert_close(plain, generic, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.hidden, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(out.hidden), main.lm_head(plain), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("shared", [True, False])
def test_draft_step_chains_the_post_norm_hidden(tmp_path: Path, shared: bool) -> None:
    main, mtp, model, tokens, hidden = prepare(tmp_path)
    model.shares_draft_index = shared
    out, pool = ours(model, tokens, hidden)
    drafted = 17
    before = pool.latent.clone()
    rows = oracle.rows_of([drafted], LENGTH, pool)
    got = model.mtp_draft(rows, out.hidden[-1:], out.selection[-1:], pool, LocalExchange())
    chained = torch.cat((hidden, out.hidden[-1:]))
    selection = out.selection[-1].long() - 1 if shared else None
    wanted = plain_mtp(main, mtp.layers[0], torch.cat((tokens[1:], torch.tensor([drafted]))), chained, selection)
    torch.testing.assert_close(got.hidden, wanted[-1:], rtol=1e-4, atol=1e-4)
    assert torch.equal(pool.latent, before) == shared, "with a shared index a draft writes nothing"
