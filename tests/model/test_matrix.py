"""The architecture matrix: Headrace, transformers and the formulas written out plainly agree on random weights over
pairs of all dimensions (lib/matrix.py), and Headrace with itself however a prompt is cut or batched.

What is neutralised for the comparison with transformers, and only that, is in model/oracle.py.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import matrix
import transformers
from plain_model import Plain

from headrace.kvstore.pool import DevicePool
from headrace.model import oracle
from headrace.model.base import StepRows
from headrace.model.exchange import LocalExchange
from headrace.model.testing import tiny_spec, write_checkpoint
from headrace.model.transformer import Transformer

LENGTH = 80
"""Row r sees r + 1 rows: below, at and above an index_topk of 16 or 64."""
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _neutral() -> Iterator[None]:
    torch.set_num_threads(1)
    with oracle.neutral():
        yield


def tokens_of(seed: int, count: int = LENGTH) -> Tensor:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed))


def make(directory: Path, case: matrix.Case, seed: int = 0) -> tuple[Any, Transformer, Plain]:
    changes = matrix.config_of(case)
    family = changes.pop("model_type")
    reference = oracle.make_reference(directory, changes, seed, family)
    return reference, oracle.load_ours(directory), Plain(directory)


def in_chunks(model: Transformer, tokens: list[int], chunk: int) -> tuple[Tensor, DevicePool]:
    pool = oracle.pool_for(model, len(tokens))
    out = []
    for start in range(0, len(tokens), chunk):
        rows = oracle.rows_of(tokens[start : start + chunk], start, pool)
        out.append(model.forward(rows, pool, LocalExchange()))
    return torch.cat(out), pool


@torch.no_grad()
def check(directory: Path, case: matrix.Case, seed: int) -> None:
    reference, model, plain = make(directory, case, seed)
    tokens = tokens_of(seed)
    hidden, pool = in_chunks(model, tokens.tolist(), LENGTH)
    got = model.logits(hidden)
    wanted = reference(tokens[None]).logits[0]
    assert wanted.std() > 0.3
    torch.testing.assert_close(got, wanted, **CLOSE)
    torch.testing.assert_close(plain.logits(plain.forward(tokens)).float(), wanted, **CLOSE)
    for chunk in (37, 1):
        again, other = in_chunks(model, tokens.tolist(), chunk)
        assert torch.equal(again, hidden), f"chunks of {chunk}"
        assert torch.equal(other.latent, pool.latent)
        assert torch.equal(other.index, pool.index)


@pytest.mark.parametrize("case", matrix.pairs(), ids=lambda case: ".".join(case))
def test_three_implementations_agree_and_chunks_change_no_bit(case: matrix.Case, tmp_path: Path) -> None:
    check(tmp_path, case, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wide_sample_of_the_whole_grid(tmp_path: Path) -> None:
    for number, case in enumerate(random.Random(5).sample(list(matrix.everything()), 400)):
        directory = tmp_path / str(number)
        directory.mkdir()
        check(directory, case, seed=number)


BASE = {
    "glm": ("glm", "types", "groups", "pairs-pairs", "plain", "untied", "1", "first", "16"),
    "deepseek": ("deepseek", "none", "groups", "pairs-halves", "yarn", "untied", "1", "first", "16"),
}


@torch.no_grad()
@pytest.mark.parametrize("family", BASE)
def test_contexts_around_index_topk(family: str, tmp_path: Path) -> None:
    """Alone, so that transformers too clips its top-k at the context, and what is selected is what should be."""
    reference, model, plain = make(tmp_path, BASE[family])
    for length in (1, 15, 16, 17, 40):
        tokens = tokens_of(length, length)
        hidden, _ = in_chunks(model, tokens.tolist(), length)
        torch.testing.assert_close(model.logits(hidden), reference(tokens[None]).logits[0], **CLOSE)
        torch.testing.assert_close(plain.forward(tokens).float(), hidden, **CLOSE)
        seen = plain.kept[0].sum(1).tolist()
        assert seen == [min(row + 1, 16) for row in range(length)]


def ragged_step(lengths: list[int], tokens: list[Tensor], pool: DevicePool, seed: int) -> tuple[StepRows, list[Tensor]]:
    """All rows of all sequences in one step, mixed, their blocks dealt over the pool; and where each sequence's are."""
    mixed = torch.Generator().manual_seed(seed)
    blocks = -(-max(lengths) // 64)
    tables = torch.randperm(pool.slots, generator=mixed)[: len(lengths) * blocks].view(len(lengths), blocks)
    seq = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    order = torch.randperm(len(seq), generator=mixed)
    positions = torch.cat([torch.arange(n) for n in lengths])[order]
    rows = StepRows(
        token_ids=torch.cat(tokens)[order],
        positions=positions,
        seq=seq[order],
        write=torch.ones_like(seq, dtype=torch.bool),
        block_tables=tables,
        local=torch.arange(len(seq)),
    )
    where = [torch.nonzero(rows.seq == i).flatten() for i in range(len(lengths))]
    return rows, [found[positions[found].argsort()] for found in where]


@torch.no_grad()
@pytest.mark.parametrize("family", BASE)
def test_a_ragged_batch_equals_each_sequence_alone(family: str, tmp_path: Path) -> None:
    """Ours as one step of mixed rows and scattered blocks; transformers' as a padded batch."""
    reference, model, _ = make(tmp_path, BASE[family])
    lengths = [1, 15, 16, 70, 33]
    tokens = [tokens_of(seed, length) for seed, length in enumerate(lengths)]
    pool = oracle.pool_for(model, 64 * 2 * len(lengths))
    rows, where = ragged_step(lengths, tokens, pool, seed=3)
    together = model.forward(rows, pool, LocalExchange())
    padded = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for i, sequence in enumerate(tokens):
        padded[i, : lengths[i]], mask[i, : lengths[i]] = sequence, 1
    wanted = reference(padded, attention_mask=mask).logits
    for i, sequence in enumerate(tokens):
        alone, _ = in_chunks(model, sequence.tolist(), lengths[i])
        assert torch.equal(together[where[i]], alone)
        torch.testing.assert_close(model.logits(alone), wanted[i, : lengths[i]], **CLOSE)


@torch.no_grad()
def test_deepseek_with_shared_indexes(tmp_path: Path) -> None:
    """Served so by override; transformers' model has no sharing, so the formulas alone are compared with."""
    spec = tiny_spec(model_type="deepseek_v32", indexer_interleaved=False, quantised=False, used_vocab_size=512)
    write_checkpoint(spec, tmp_path, seed=4)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["indexer_types"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"index_topk_freq": 2, "index_skip_topk_offset": 1}))
    model, plain = oracle.load_ours(tmp_path), Plain(tmp_path)
    assert model.spec.full_layers == (0, 2)
    tokens = tokens_of(2)
    hidden, _ = in_chunks(model, tokens.tolist(), 50)
    torch.testing.assert_close(hidden, plain.forward(tokens).float(), **CLOSE)
    assert torch.equal(plain.kept[0], plain.kept[1])
    assert not torch.equal(plain.kept[1], plain.kept[2])


@torch.no_grad()
def test_fp8_weights_equal_the_formulas(tmp_path: Path) -> None:
    """With exact cache rows. Where fp32 and fp64 round an activation to different FP8 values, a row and all that attend
    to it move by hundredths; so the prompts are short and many, and nearly all rows must agree to the last bits."""
    spec = tiny_spec(
        hidden_size=256, q_lora_rank=160, moe_intermediate_size=160, num_attention_heads=3, qk_nope_head_dim=24,
        used_vocab_size=512,
    )  # fmt: skip
    write_checkpoint(spec, tmp_path, seed=3)
    model, plain = oracle.load_ours(tmp_path), Plain(tmp_path)
    off = []
    for seed in range(20):
        tokens = tokens_of(seed, 7)
        hidden, pool = in_chunks(model, tokens[:6].tolist(), 6)
        out = model.mtp_extend(oracle.rows_of(tokens[1:].tolist(), 0, pool), hidden, pool, LocalExchange())
        pairs = (hidden, plain.forward(tokens[:6])), (out.hidden, plain.mtp(tokens[1:], hidden))
        off += [(got - wanted).norm(dim=1) / wanted.norm(dim=1) for got, wanted in pairs]
    exact = (torch.cat(off) < 1e-5).double().mean()
    assert exact > 0.8


def rounding_cache(config: Any) -> Any:
    """A transformers cache whose rows are bf16, as ours are in the format bf16."""
    cache = transformers.DynamicCache(config=config)
    update, update_indexer = cache.update, cache.update_indexer

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    cache.update = lambda k, v, layer, **kwargs: update(rounded(k), rounded(v), layer, **kwargs)
    cache.update_indexer = lambda k, layer: update_indexer(rounded(k), layer)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("family", BASE)
def test_bf16_cache_rows(family: str, tmp_path: Path) -> None:
    """A last bit of fp32 may round to the other bf16: such flips cost up to 2^-9 of a value, and one may swap a nearly
    tied selection, so one row in 80 may be off."""
    reference, _, _ = make(tmp_path, BASE[family], 1)
    tokens = tokens_of(1)
    wanted = reference(tokens[None], cache=rounding_cache(reference.config), use_cache=True).logits[0]
    model = oracle.load_ours(tmp_path, "bf16")
    got = model.logits(in_chunks(model, tokens.tolist(), 32)[0])
    off = (got - wanted).abs().amax(1)
    assert (off > 3e-3).sum() <= 1
    assert off.median() < 1e-3


def test_a_dimension_that_is_wrong_is_seen(tmp_path: Path) -> None:
    """The comparison must be able to fail: every dimension, given a neighbour's value, moves the logits."""
    base = ("glm", "types", "groups", "pairs-pairs", "yarn", "untied", "1", "first", "16")
    tokens = tokens_of(1)
    oracle.make_reference(tmp_path, {k: v for k, v in matrix.config_of(base).items() if k != "model_type"}, 1)
    plain = Plain(tmp_path)
    right = plain.forward(tokens)
    for key, value in (
        ("topk_group", 1),
        ("n_group", 2),
        ("rope_interleave", False),
        ("indexer_rope_interleave", False),
        ("rope_parameters", matrix.YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
        ("index_topk", 15),
        ("norm_topk_prob", False),
    ):
        changed = Plain(tmp_path)
        changed.raw[key] = value
        assert (changed.forward(tokens) - right).abs().max() > 0.01, key
