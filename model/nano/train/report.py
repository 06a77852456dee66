"""Measures an exported checkpoint with the plain model: held-out loss, accepted drafts, sample continuations.

No cache and no kernels: every step is a whole forward pass through FP8 rows, FP8 activations and the selection.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from headrace.model.nano.train.export import read_checkpoint
from headrace.model.nano.train.layers import Mode
from headrace.model.nano.train.model import NanoModel
from headrace.model.nano.train.naming import load_weights
from headrace.model.nano.train.shape import NanoShape
from headrace.model.nano.train.tokens import Stream

SERVED = Mode(sparse=True, fp8_activations=True, draft_steps=4)
DENSE = Mode(draft_steps=4)


def load_model(folder: Path, device: str) -> NanoModel:
    """The model with the dequantised weights of a checkpoint folder."""
    model = NanoModel(NanoShape())
    load_weights(model, read_checkpoint(folder))
    return model.to(device).eval()


@torch.inference_mode()
def losses_by_position(model: NanoModel, windows: Tensor, mode: Mode) -> Tensor:
    """Next-token loss in nats, fp32 [T], mean over windows [n, T + 1], one window at a time."""
    total = torch.zeros(windows.shape[1] - 1, device=windows.device)
    for window in windows:
        hidden = model.trunk(window[None, :-1], mode, None)
        total += functional.cross_entropy(model.head(hidden)[0].float(), window[1:], reduction="none")
    return total / windows.shape[0]


def even_windows(stream: Stream, count: int, length: int) -> Tensor:
    """int64 [count, length]: evenly spaced windows that cover a stream."""
    last = stream.ids.numel() - length
    offsets = torch.linspace(0, last, count, device=stream.ids.device).long()
    return stream.ids[offsets[:, None] + torch.arange(length, device=stream.ids.device)].long()


@torch.inference_mode()
def generate(model: NanoModel, prompts: Tensor, count: int, mode: Mode, temperature: float = 0.0) -> Tensor:
    """Continuation int64 [B, P + count] of prompts [B, P], greedy at temperature 0; padding ids never chosen."""
    tokens = prompts
    torch.manual_seed(0)
    for _ in range(count):
        logits = model.head(model.trunk(tokens, mode, None)[:, -1]).float()
        logits[:, model.shape.used_vocab_size :] = float("-inf")
        if temperature > 0:
            # Gumbel-max: adding this noise and taking the largest draws from the softmax.
            logits = logits / temperature - torch.empty_like(logits).exponential_().log()
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    return tokens


@torch.inference_mode()
def greedy_drafts(model: NanoModel, tokens: Tensor, mode: Mode) -> Tensor:
    """int64 [B, T − 1, steps]: what the chained MTP would draft after base row i, i.e. guesses of token i + 2 + j."""
    length = tokens.shape[1] - 1
    hidden = model.trunk(tokens[:, :length], mode, None)
    drafted: list[Tensor] = []

    def next_tokens(step: int, last: Tensor | None) -> Tensor:
        if last is None:
            return tokens[:, 1:]
        drafted.append(model.head(last).argmax(-1))
        return drafted[-1]

    states = model.draft(hidden, next_tokens, mode)
    drafted.append(model.head(states[-1]).argmax(-1))
    return torch.stack(drafted, -1)


def accepted_lengths(tokens: Tensor, drafts: Tensor, prompt: int) -> list[int]:
    """Tokens committed by each verify step (accepted drafts plus one) while decoding tokens[prompt:] greedily."""
    row, steps, lengths = prompt - 1, drafts.shape[-1], []
    sequence, guesses = tokens.tolist(), drafts.tolist()
    while row + 2 + steps <= len(sequence):
        accepted = 0
        while accepted < steps and guesses[row][accepted] == sequence[row + 2 + accepted]:
            accepted += 1
        lengths.append(accepted + 1)
        row += accepted + 1
    return lengths


@dataclass
class Acceptance:
    """`mean_tokens` a verify step, bonus included; `by_draft`: share of steps in which draft j was accepted."""

    mean_tokens: float
    by_draft: list[float]
    steps: int


def measure_acceptance(model: NanoModel, tokens: Tensor, prompt: int, mode: Mode) -> Acceptance:
    """Acceptance of four chained drafts when the verified tokens are tokens[:, prompt:] of [B, T].

    A draft counts iff it equals the token that was committed: exact for greedy text, and for sampled text the rule
    that draws the target's token first and accepts a draft that equals it.
    """
    drafts = torch.cat([greedy_drafts(model, row[None], mode) for row in tokens])
    lengths = [n for row, guess in zip(tokens, drafts) for n in accepted_lengths(row, guess, prompt)]
    by_draft = [sum(n > j for n in lengths) / len(lengths) for j in range(1, mode.draft_steps + 1)]
    return Acceptance(sum(lengths) / len(lengths), by_draft, len(lengths))


def sample(model: NanoModel, tokenizer: Tokenizer, prompt: str, count: int, mode: Mode = SERVED) -> str:
    """Greedy continuation of a text, up to the first stop id."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    device = model.lm_head.device
    out = generate(model, torch.tensor([ids], device=device), count, mode)[0, len(ids) :].tolist()
    base = model.shape.base_vocab_size
    stops = [i for i, token in enumerate(out) if token in (base, base + 7, base + 9)]
    return tokenizer.decode(out[: stops[0] + 1 if stops else None], skip_special_tokens=False)


PROMPTS = (
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    'import os\nimport json\n\n\ndef load_config(path):\n    """Load a JSON file and return its content."""\n',
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
    (
        '[gMASK]<sop><|user|>Complete this Python function.\n\ndef read_lines(path, encoding="utf-8"):\n'
        '    """Read a text file and return its lines."""\n<|assistant|><think></think>'
    ),
    (
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Write a Python function `clamp`. "
        "Limit a value to a range.<|assistant|><think>"
    ),
)


def _long_context(model: NanoModel, held_out: Stream) -> str:
    """Loss by position in 32K windows: it must not rise."""
    losses = losses_by_position(model, even_windows(held_out, 8, 32_769), SERVED)
    edges = (0, 1024, 2048, 4096, 8192, 16_384, 32_768)
    return ", ".join(f"{a}–{b}: {losses[a:b].mean().item():.3f}" for a, b in pairwise(edges))


def acceptance_lines(model: NanoModel, held_out: Stream, prompts: int, length: int, count: int) -> list[str]:
    """Table rows of accepted tokens a verify step: on greedy text, on sampled text, and along the files themselves."""
    starts = even_windows(held_out, prompts, length)
    texts = {
        "greedy": generate(model, starts, count, SERVED),
        "temperature 1": generate(model, starts, count, SERVED, temperature=1.0),
        "held-out text itself": even_windows(held_out, prompts, length + count),
    }
    lines = []
    for name, tokens in texts.items():
        got = measure_acceptance(model, tokens, length, SERVED)
        rates = ", ".join(f"{rate:.3f}" for rate in got.by_draft)
        lines.append(
            f"| accepted tokens a verify step, 4 drafts, {name} | {got.mean_tokens:.3f} "
            f"({got.steps} steps; draft 1–4: {rates}) |"
        )
    return lines


def write_report(folder: Path, held_out: Stream, device: str, long_context: bool, shrink: int = 1) -> str:
    """Markdown with the figures and samples of a checkpoint folder; `shrink` divides all counts, for dry runs."""
    model = load_model(folder, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out = held_out.to(device)
    windows = even_windows(held_out, max(1, 96 // shrink), 2_048 // shrink + 1)
    text_bytes = sum(len(tokenizer.decode(w.tolist(), skip_special_tokens=False).encode()) for w in windows)
    lines = ["| measure | value |", "|---|--:|"]
    for name, mode in (("as served (sparse, FP8)", SERVED), ("dense, bf16 activations", DENSE)):
        nats = losses_by_position(model, windows, mode).mean().item()
        bits = nats / 0.693147 * windows[:, 1:].numel() / text_bytes
        lines.append(f"| held-out loss, {name}, 2,048 tokens | {nats:.4f} nats a token, {bits:.3f} bits a byte |")
    lines += acceptance_lines(model, held_out, max(1, 48 // shrink), 512 // shrink, 128 // shrink)
    if long_context:
        lines.append(f"| loss by position in 32K windows | {_long_context(model, held_out)} |")
    lines.append("")
    for prompt in PROMPTS:
        text = sample(model, tokenizer, prompt, 96 // shrink)
        lines += ["Prompt and greedy continuation:", "", "````text", prompt, "─" * 20, text, "````", ""]
    return "\n".join(lines)
