"""Tokenizer of a checkpoint: `tokenizer.json` through the `tokenizers` library, special ids by name, ids to bytes.

Only byte-level vocabularies are taken (GLM, and most others of its kind): every id is a fixed byte string, so turning
ids back into text is exact, incremental and O(1) a token. Knows nothing of requests.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headrace.errors import CheckpointError, InputError


def _printable_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: printable Latin-1 as itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """Thread-safe: `encode` may run in worker threads (the library releases the GIL)."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when the folder has no usable tokenizer."""
        file = folder / "tokenizer.json"
        try:
            raw = file.read_text(encoding="utf-8")
            self._library = tokenizers.Tokenizer.from_str(raw)
        except Exception as error:
            raise CheckpointError(f"{file}: cannot load a tokenizer: {error}") from error
        spec = json.loads(raw)
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError(f"{file}: only byte-level decoders are supported, got {spec.get('decoder')}")
        self._library.no_truncation()
        self._library.no_padding()
        self._added = {int(t["id"]): str(t["content"]) for t in spec.get("added_tokens", ())}
        self.borders = _borders(spec.get("added_tokens", ()))
        self.special_ids = frozenset(int(t["id"]) for t in spec.get("added_tokens", ()) if t["special"])
        self._bytes = self._byte_table()

    def _byte_table(self) -> list[bytes]:
        alphabet = _printable_alphabet()
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values()) + 1)
        for text, token in vocabulary.items():
            if token in self._added:
                table[token] = self._added[token].encode()
            else:
                table[token] = bytes(alphabet[char] for char in text)
        return table

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any automatic prefix or suffix. Added tokens written in the text become their ids.
        Raises InputError for text that is not valid Unicode (lone surrogates)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"text is not valid Unicode: {error.reason} at character {error.start}") from error
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def is_border(self, text: str, at: int) -> bool:
        """Whether `text` may be cut at character `at` for tokenising: the ids of both parts, joined, are those of the
        whole, because an added token starts or ends there. Both ends of the text are such places."""
        if at in (0, len(text)):
            return True
        return text.startswith(self.borders, at) or text.endswith(self.borders, 0, at)

    def is_added(self, token: int) -> bool:
        """Whether it is an added token that text may be cut after (`is_border`)."""
        return self._added.get(token) in self.borders

    def id_of(self, text: str) -> int | None:
        """The id of a token that is written exactly so."""
        found: int | None = self._library.token_to_id(text)
        return found

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.bytes_of(i) for i in ids if i not in skipped).decode("utf-8", "replace")


def _borders(added: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Added tokens that separate what is around them wherever they are written: those that take no neighbouring space
    and share no character with another added token that could be found in their place."""
    every = [str(token["content"]) for token in added]
    found = []
    for token in added:
        text = str(token["content"])
        greedy = any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word", "normalized"))
        if text and not greedy and not any(_overlap(text, other) for other in every if other):
            found.append(text)
    return tuple(found)


def _overlap(one: str, other: str) -> bool:
    if one != other and (one in other or other in one):
        return True
    sizes = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:n]) or other.endswith(one[:n]) for n in sizes)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(inner) for inner in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"
