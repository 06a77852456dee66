"""All measures of a checkpoint in one dictionary, in two sizes. Deterministic on one machine, but for the seconds."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace.errors import InputError
from headrace.model.load import load_model
from headrace.model.nano.evaluate import measures
from headrace.model.nano.evaluate.chat import chat_score
from headrace.model.nano.evaluate.held_out import END, HeldOutPackage, even_windows, held_out_tokens, read_held_out
from headrace.model.nano.evaluate.ngram import ByteNgram
from headrace.model.nano.evaluate.reader import Reader
from headrace.model.placement import Placement
from headrace.model.spec import ModelSpec, resolve_path

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much is measured. Lengths in tokens."""

    windows: int
    """of 2,048 tokens, for the loss"""
    prompts: int
    prompt: int
    answer: int
    long_windows: int
    long: int
    """length of a long window"""
    spans: int
    """stretches of 1,024 tokens in a long window that are also read with a short context"""
    recall_every: int
    """one query row in this many is compared with dense attention"""
    chats: int
    chat_length: int
    baseline_bytes: int
    """of training text for the byte model, at most"""


QUICK = Size(6, 4, 384, 64, 1, 8_192, 3, 64, 4, 96, 8_000_000)
FULL = Size(48, 12, 512, 128, 2, 32_768, 15, 256, 16, 160, 400_000_000)
RECALL_EDGES = [512, 2_048, 8_192, 32_768]
LOSS_EDGES = [1_024, 2_048, 4_096, 8_192, 16_384, 32_768]
HALF = 1_024


class Evaluation:
    """One checkpoint, its tokenizer and the held-out text. Sets one thread: more do not help a model this small."""

    def __init__(self, path: str, size: Size, progress: Progress = lambda _: None) -> None:
        torch.set_num_threads(1)
        self.size, self._progress = size, progress
        folder = resolve_path(path)
        self.spec = ModelSpec.from_dir(path)
        if not (Path(folder) / "tokenizer.json").exists():
            raise InputError(f"{folder} has no tokenizer.json; the evaluation needs a checkpoint of the nano family")
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.reader = Reader(
            load_model(self.spec, path, "safetensors", device, Placement(), "tile656", device.type == "cpu")
        )
        self.packages: list[HeldOutPackage] = read_held_out()
        if self.tokenizer.token_to_id(END) is None:
            raise InputError(f"{folder}: the tokenizer has no {END}; the evaluation needs one of the nano family")
        self.tokens = held_out_tokens(self.packages, self.tokenizer)

    def run(self, baseline: list[bytes] | None, baseline_source: str) -> dict[str, Any]:
        """Everything. `baseline`: texts the byte model is trained on; None: leave it out."""
        started = time.perf_counter()
        result: dict[str, Any] = {"size": asdict(self.size), "held_out_tokens": len(self.tokens)}
        result["loss"] = self._timed("loss", self.loss)
        if baseline is not None:
            result["baseline"] = self._timed("baseline", lambda: self.baseline(baseline, baseline_source))
        result["accepted"] = self._timed("accepted drafts", self.accepted)
        result |= self._timed("long context and recall", self.long_context)
        scores, result["chat_samples"] = self._timed("chat", self.chat)
        result["chat"] = {name: asdict(score) for name, score in scores.items()}
        result["seconds"] = round(time.perf_counter() - started, 1)
        return result

    def _timed(self, name: str, measure: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = measure()
        self._progress(f"{name}: {time.perf_counter() - started:.0f} s")
        return found

    def _windows(self) -> torch.Tensor:
        return even_windows(self.tokens, self.size.windows, 2 * HALF + 1)

    def loss(self) -> dict[str, Any]:
        return asdict(measures.byte_loss(self.reader, self.tokenizer, self._windows()))

    def baseline(self, texts: list[bytes], source: str) -> dict[str, Any]:
        kept, size = [], 0
        for text in texts:
            if size >= self.size.baseline_bytes:
                break
            kept.append(text)
            size += len(text)
        bits = measures.baseline_bits_a_byte(ByteNgram(kept), self.tokenizer, self._windows())
        return {"model": "byte 5-gram, interpolated modified Kneser-Ney", "bits_a_byte": bits,
                "trained_on": source, "trained_on_bytes": size}  # fmt: skip

    def accepted(self) -> dict[str, Any]:
        s, reader = self.size, self.reader
        pieces = even_windows(self.tokens, s.prompts, s.prompt + s.answer).tolist()
        prompts = [piece[: s.prompt] for piece in pieces]
        texts = {
            "greedy": measures.answers(reader, prompts, s.answer, 0.0),
            "temperature_0.7": measures.answers(reader, prompts, s.answer, 0.7),
            "temperature_1_top_p_0.95": measures.answers(reader, prompts, s.answer, 1.0, 0.95),
            "temperature_1": measures.answers(reader, prompts, s.answer, 1.0),
            "held_out_text": pieces,
        }
        found = {name: asdict(measures.acceptance(reader, text, s.prompt)) for name, text in texts.items()}
        for name in ("greedy", "temperature_0.7"):
            fresh = measures.acceptance(reader, texts[name], s.prompt, without_loops=True)
            found[f"{name}_without_loops"] = asdict(fresh)
        return found

    def long_context(self) -> dict[str, Any]:
        """Loss by position with the whole context and with 1,024 to 2,048 tokens of it, over the same spans; and the
        recall of every layer's selection."""
        s, reader = self.size, self.reader
        starts = measures.control_starts(s.long, HALF, HALF, s.spans)
        whole, short, masses = [], [], []
        for window in even_windows(self.tokens, s.long_windows, s.long + 1):
            nats = reader.losses(window)
            whole.append(torch.stack([nats[a : a + HALF].mean() for a in starts]))
            short.append(measures.control_losses(reader, window, HALF, HALF, s.spans).view(-1, HALF).mean(1))
            masses.append(reader.attention_mass(window, s.recall_every, RECALL_EDGES[0]))
        full, control = torch.stack(whole).mean(0), torch.stack(short).mean(0)
        by_position = {}
        for low, high in pairwise(LOSS_EDGES):
            inside = [i for i, start in enumerate(starts) if low <= start < high]
            if inside:
                a, b = float(full[inside].mean()), float(control[inside].mean())
                by_position[f"{low}-{high}"] = {"nats": a, "short_context_nats": b, "cost": a - b}
        merged = [measures.joined(layer) for layer in zip(*masses, strict=True)]
        return {
            "long_context": by_position,
            "recall": {
                "indexer_layers": [i for i in range(len(merged)) if self._has_indexer(i)],
                "by_layer": measures.recall(merged, RECALL_EDGES),
                "best_possible": measures.best_recall(merged, RECALL_EDGES),
            },
        }

    def _has_indexer(self, layer: int) -> bool:
        return layer == self.spec.num_hidden_layers or layer in self.spec.full_layers

    def chat(self) -> Any:
        return chat_score(self.reader, self.tokenizer, self.packages, self.size.chats, self.size.chat_length)


def installed_training_texts() -> tuple[list[bytes], str]:
    """What the training rules take from the packages installed here, and what that is in words."""
    from headrace.model.nano.train.corpus import gather

    training, _, _ = gather()
    texts = [text.encode() + b"\0" for package in training for _, text in package.documents]
    return texts, f"{len(training)} permissively licensed packages installed here"
