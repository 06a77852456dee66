"""Token streams: documents and conversations encoded once, then sampled as windows on the training device."""

import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.model.nano.train.chats import ChatMaker
from headrace.model.nano.train.corpus import Package

ENCODE_BATCH = 512
# Share of files that also become conversations, and of windows that come from the conversation stream.
CHAT_FILE_SHARE = 0.5
CHAT_WINDOW_SHARE = 0.15
# Half of the windows begin where a document does, as every request does.
ALIGNED_SHARE = 0.5


@dataclass
class Stream:
    """`ids` int16/int32 [n] on one device, and the offsets at which documents start, int64 [m]."""

    ids: Tensor
    starts: Tensor

    def to(self, device: str) -> "Stream":
        return Stream(self.ids.to(device), self.starts.to(device))

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length]: windows at random offsets, part of them aligned to document starts."""
        device, last = self.ids.device, self.ids.numel() - length
        offsets = torch.randint(last, (count,), generator=generator, device=device)
        picks = torch.randint(self.starts.numel(), (count,), generator=generator, device=device)
        aligned = torch.rand(count, generator=generator, device=device) < ALIGNED_SHARE
        offsets = torch.where(aligned, self.starts[picks].clamp_max(last), offsets)
        return self.ids[offsets[:, None] + torch.arange(length, device=device)].long()


def _batched(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + ENCODE_BATCH] for i in range(0, len(texts), ENCODE_BATCH)]


def encode_stream(tokenizer: Tokenizer, texts: list[str], end: str | None) -> Stream:
    """Encodes texts in order, each followed by the token `end` if given."""
    tail = [] if end is None else [tokenizer.token_to_id(end)]
    chunks: list[np.ndarray] = []
    starts, total = [], 0
    for batch in _batched(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = np.array(encoding.ids + tail, dtype=np.int16)
            starts.append(total)
            total += len(ids)
            chunks.append(ids)
    return Stream(torch.from_numpy(np.concatenate(chunks)), torch.tensor(starts))


_maker: ChatMaker | None = None


def _start_maker(template: Path) -> None:
    global _maker
    _maker = ChatMaker(template)


def _chats_about(job: tuple[int, str, str]) -> list[str]:
    seed, path, source = job
    return _maker.make(path, source, random.Random(seed)) if _maker else []


def conversations(packages: list[Package], template: Path, seed: int = 1) -> list[str]:
    """Shuffled conversations about a share of the files."""
    rng = random.Random(seed)
    jobs = [
        (i, path, text)
        for i, (path, text) in enumerate(d for p in packages for d in p.documents)
        if rng.random() < CHAT_FILE_SHARE
    ]
    with multiprocessing.Pool(initializer=_start_maker, initargs=(template,)) as pool:
        chats = [chat for made in pool.map(_chats_about, jobs, chunksize=64) for chat in made]
    rng.shuffle(chats)
    return chats


@dataclass
class Corpus:
    """Raw code, conversations, and held-out code."""

    code: Stream
    chat: Stream
    held_out: Stream

    @classmethod
    def build(cls, training: list[Package], held_out: list[Package], checkpoint: Path) -> "Corpus":
        """Encodes everything with the checkpoint's tokenizer and template. Packages stay whole: long windows then
        hold files that refer to each other."""
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        order = list(training)
        random.Random(0).shuffle(order)
        code = encode_stream(tokenizer, [text for p in order for _, text in p.documents], "<|endoftext|>")
        chat = encode_stream(tokenizer, conversations(training, checkpoint / "chat_template.jinja"), None)
        fresh = encode_stream(tokenizer, [text for p in held_out for _, text in p.documents], "<|endoftext|>")
        return cls(code, chat, fresh)

    def to(self, device: str) -> "Corpus":
        return Corpus(self.code.to(device), self.chat.to(device), self.held_out.to(device))

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length] training windows."""
        chats = int(count * CHAT_WINDOW_SHARE + 0.5)
        code = self.code.windows(count - chats, length, generator)
        return torch.cat((code, self.chat.windows(chats, length, generator))) if chats else code

    def save(self, path: Path) -> None:
        torch.save([(s.ids, s.starts) for s in (self.code, self.chat, self.held_out)], path)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        return cls(*(Stream(ids, starts) for ids, starts in torch.load(path, weights_only=True)))
