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
CHAT_WINDOW_SHARE = 0.2
# Half of the windows begin where a document does, as every request does.
ALIGNED_SHARE = 0.5
# A package is drawn with its size to this power: the largest few are repetitive and would be half of all windows.
SIZE_POWER = 0.6


@dataclass
class Stream:
    """`ids` int16/int32 [n] on one device; `starts` int64 [m], offsets at which documents start; `packages` int64 [p],
    the documents (indices into `starts`) at which packages start."""

    ids: Tensor
    starts: Tensor
    packages: Tensor

    def to(self, device: str) -> "Stream":
        return Stream(self.ids.to(device), self.starts.to(device), self.packages.to(device))

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length]: windows of packages drawn by size to SIZE_POWER, half at a document's start."""
        device, last = self.ids.device, self.ids.numel() - length
        begins = self.starts[self.packages]
        sizes = torch.diff(begins, append=begins.new_tensor([self.ids.numel()]))
        documents = torch.diff(self.packages, append=begins.new_tensor([self.starts.numel()]))
        drawn = torch.multinomial(sizes.double() ** SIZE_POWER, count, replacement=True, generator=generator)
        place, pick, aligned = torch.rand(3, count, generator=generator, device=device, dtype=torch.float64)
        offsets = begins[drawn] + (place * sizes[drawn]).long()
        starts = self.starts[self.packages[drawn] + (pick * documents[drawn]).long()]
        offsets = torch.where(aligned < ALIGNED_SHARE, starts, offsets).clamp_max(last)
        return self.ids[offsets[:, None] + torch.arange(length, device=device)].long()


def _batched(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + ENCODE_BATCH] for i in range(0, len(texts), ENCODE_BATCH)]


def encode_stream(tokenizer: Tokenizer, groups: list[list[str]], end: str | None) -> Stream:
    """Encodes the texts of each package in order, each followed by the token `end` if given."""
    texts = [text for group in groups for text in group]
    firsts = np.cumsum([0, *(len(group) for group in groups)])[:-1]
    tail = [] if end is None else [tokenizer.token_to_id(end)]
    chunks: list[np.ndarray] = []
    starts, total = [], 0
    for batch in _batched(texts):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = np.array(encoding.ids + tail, dtype=np.int16)
            starts.append(total)
            total += len(ids)
            chunks.append(ids)
    return Stream(torch.from_numpy(np.concatenate(chunks)), torch.tensor(starts), torch.from_numpy(firsts))


def _texts(packages: list[Package]) -> list[list[str]]:
    return [[text for _, text in package.documents] for package in packages if package.documents]


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
        code = encode_stream(tokenizer, _texts(order), "<|endoftext|>")
        chat = encode_stream(tokenizer, [conversations(training, checkpoint / "chat_template.jinja")], None)
        return cls(code, chat, encode_stream(tokenizer, _texts(held_out), "<|endoftext|>"))

    def to(self, device: str) -> "Corpus":
        return Corpus(self.code.to(device), self.chat.to(device), self.held_out.to(device))

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [count, length] training windows."""
        chats = int(count * CHAT_WINDOW_SHARE + 0.5)
        code = self.code.windows(count - chats, length, generator)
        return torch.cat((code, self.chat.windows(chats, length, generator))) if chats else code

    def save(self, path: Path) -> None:
        torch.save([(s.ids, s.starts, s.packages) for s in (self.code, self.chat, self.held_out)], path)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        return cls(*(Stream(*parts) for parts in torch.load(path, weights_only=True)))
