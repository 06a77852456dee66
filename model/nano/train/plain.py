"""An exported checkpoint read by the model it was trained as: no cache and no kernels, every step a whole forward pass.

The independent second opinion that tests compare the serving code with.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.model.nano.train.export import read_checkpoint
from headrace.model.nano.train.layers import Mode
from headrace.model.nano.train.model import NanoModel
from headrace.model.nano.train.naming import load_weights
from headrace.model.nano.train.shape import NanoShape

SERVED = Mode(sparse=True, fp8_activations=True, draft_steps=4)


def load_model(folder: Path, device: str) -> NanoModel:
    """The model with the dequantised weights of a checkpoint folder."""
    model = NanoModel(NanoShape())
    load_weights(model, read_checkpoint(folder))
    return model.to(device).eval()


@torch.inference_mode()
def generate(model: NanoModel, prompts: Tensor, count: int, mode: Mode) -> Tensor:
    """Greedy continuation int64 [B, P + count] of prompts [B, P]; padding ids never chosen."""
    tokens = prompts
    for _ in range(count):
        logits = model.head(model.trunk(tokens, mode, None)[:, -1]).float()
        logits[:, model.shape.used_vocab_size :] = float("-inf")
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


def sample(model: NanoModel, tokenizer: Tokenizer, prompt: str, count: int, mode: Mode = SERVED) -> str:
    """Greedy continuation of a text, up to the first stop id."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    device = model.lm_head.device
    out = generate(model, torch.tensor([ids], device=device), count, mode)[0, len(ids) :].tolist()
    base = model.shape.base_vocab_size
    stops = [i for i, token in enumerate(out) if token in (base, base + 7, base + 9)]
    return tokenizer.decode(out[: stops[0] + 1 if stops else None], skip_special_tokens=False)
