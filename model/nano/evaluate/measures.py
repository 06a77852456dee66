"""The figures of the card, each from tokens and a `Reader`: bits a byte, accepted drafts, recall, loss by position."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.messages import SamplingParams
from headrace.model.mono import MonoEngine
from headrace.model.nano.evaluate.held_out import bytes_of_tokens
from headrace.model.nano.evaluate.ngram import ByteNgram
from headrace.model.nano.evaluate.reader import Mass, Reader

DRAFTS = 4
LOG2 = 0.6931471805599453
# A greedy answer that repeats itself at one distance for this many tokens is in a loop.
LOOP_TOKENS = 24


@dataclass(frozen=True)
class ByteLoss:
    nats_a_token: float
    bits_a_byte: float
    bytes: int
    tokens: int


def byte_loss(reader: Reader, tokenizer: Tokenizer, windows: Tensor) -> ByteLoss:
    """Loss over windows int64 [n, T + 1], the first token of each given."""
    nats = sum(float(reader.losses(window).sum()) for window in windows)
    sizes = torch.tensor([len(b) for b in bytes_of_tokens(tokenizer)])
    count, size = windows[:, 1:].numel(), int(sizes[windows[:, 1:]].sum())
    return ByteLoss(nats / count, nats / LOG2 / size, size, count)


def baseline_bits_a_byte(baseline: ByteNgram, tokenizer: Tokenizer, windows: Tensor) -> float:
    """The n-gram model over the same bytes of the same windows."""
    table, bits, size = bytes_of_tokens(tokenizer), 0.0, 0
    for window in windows.tolist():
        given = len(table[window[0]])
        text = b"".join(table[token] for token in window)
        bits += baseline.bits(text, given)
        size += len(text) - given
    return bits / size


@dataclass(frozen=True)
class Acceptance:
    """Tokens committed by a verify step, the bonus token included, and the share of steps that accepted draft j."""

    tokens_a_step: float
    by_draft: list[float]
    steps: int


def accepted_lengths(tokens: list[int], drafts: list[list[int]], first: int, end: int) -> list[int]:
    """Tokens committed by each verify step while decoding tokens[first + 1 : end]; drafts[r - first] follows base
    row r. Steps that the end would cut short are left out."""
    row, lengths = first, []
    count = len(drafts[0]) if drafts else 0
    while row + 2 + count <= end:
        guess, accepted = drafts[row - first], 0
        while accepted < count and guess[accepted] == tokens[row + 2 + accepted]:
            accepted += 1
        lengths.append(accepted + 1)
        row += accepted + 1
    return lengths


def loop_start(tokens: list[int], prompt: int) -> int:
    """Where an answer begins to repeat itself: the first index from which LOOP_TOKENS tokens equal those at one fixed
    distance before, the source lying in the answer too. len(tokens) if it never does."""
    for start in range(prompt + 1, len(tokens) - LOOP_TOKENS + 1):
        tail = tokens[start : start + LOOP_TOKENS]
        if any(tokens[source : source + LOOP_TOKENS] == tail for source in range(prompt, start)):
            return start
    return len(tokens)


def summary(lengths: list[int], drafts: int = DRAFTS) -> Acceptance:
    if not lengths:
        return Acceptance(0.0, [0.0] * drafts, 0)
    by_draft = [sum(n > j for n in lengths) / len(lengths) for j in range(1, drafts + 1)]
    return Acceptance(sum(lengths) / len(lengths), by_draft, len(lengths))


def acceptance(reader: Reader, texts: list[list[int]], prompt: int, without_loops: bool = False) -> Acceptance:
    """Of DRAFTS drafts along texts whose first `prompt` tokens were given. A draft counts iff it is the token that was
    committed, which is how the engine accepts at any temperature."""
    lengths: list[int] = []
    for tokens in texts:
        end = loop_start(tokens, prompt) if without_loops else len(tokens)
        if end < prompt + DRAFTS + 1:
            continue
        drafts = reader.drafts(torch.tensor(tokens[:end]), prompt - 1, DRAFTS)
        lengths += accepted_lengths(tokens[:end], drafts.tolist(), prompt - 1, end)
    return summary(lengths)


def answers(
    reader: Reader, prompts: list[list[int]], count: int, temperature: float, top_p: float = 1.0, stop: bool = False
) -> list[list[int]]:
    """Each prompt with its continuation by the one-process engine; `stop`: end where the model ends its turn."""
    engine, found = MonoEngine(reader.model), []
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=count,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=reader.model.spec.eos_token_ids if stop else (),
        )
        found.append([*prompt, *engine.generate(prompt, params, DRAFTS).tokens])
    return found


def joined(parts: tuple[Mass, ...]) -> Mass:
    """The samples of one layer from several windows."""
    whole = Mass()
    for part in parts:
        whole.positions += part.positions
        whole.selected += part.selected
        whole.best += part.best
    return whole


def recall(masses: list[Mass], edges: list[int]) -> dict[str, list[float]]:
    """By position range: the mean share of dense attention that each layer's selection catches."""
    return {f"{low}-{high}": _means([m.mean(m.selected, low, high) for m in masses]) for low, high in pairwise(edges)}


def best_recall(masses: list[Mass], edges: list[int]) -> dict[str, list[float]]:
    """The same if every row selected the rows with most attention: no indexer can do better."""
    return {f"{low}-{high}": _means([m.mean(m.best, low, high) for m in masses]) for low, high in pairwise(edges)}


def _means(values: list[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def control_losses(reader: Reader, tokens: Tensor, half: int, first: int, count: int) -> Tensor:
    """Nats fp32 [count * half]: `count` spans of `half` tokens evenly over positions first.., each with only `half` to
    2·`half` tokens before it. Returned with the spans' starts by `control_starts`."""
    parts = []
    for start in control_starts(len(tokens) - 1, half, first, count):
        nats = reader.losses(tokens[start - half : start + half + 1])
        parts.append(nats[half:])
    return torch.cat(parts)


def control_starts(length: int, half: int, first: int, count: int) -> list[int]:
    """Multiples of `half` from `first` to the last whole span before `length`, at most `count`, evenly spaced."""
    starts = list(range(max(first, half), length - half + 1, half))
    if len(starts) <= count:
        return starts
    return [starts[round(i * (len(starts) - 1) / (count - 1))] for i in range(count)] if count > 1 else starts[-1:]
