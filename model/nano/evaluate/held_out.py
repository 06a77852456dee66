"""The held-out text: source files of packages that no training file comes from, shipped with their licences."""

import json
import lzma
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace.errors import CheckpointError

HELD_OUT_FILE = Path(__file__).resolve().parent.parent / "held_out.json.xz"
END = "<|endoftext|>"
# A control token stands for one byte, the same for the model and for the byte model it is compared with.
CONTROL_BYTE = b"\0"


@dataclass(frozen=True)
class HeldOutPackage:
    """`files`: (path, text) in path order; `licence_text`: what its authors ask to go with copies."""

    name: str
    version: str
    licence: str
    licence_text: str
    files: list[tuple[str, str]]


def write_held_out(packages: list[HeldOutPackage], path: Path = HELD_OUT_FILE) -> None:
    raw = json.dumps([asdict(package) for package in packages], ensure_ascii=False).encode()
    path.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))


def read_held_out(path: Path = HELD_OUT_FILE) -> list[HeldOutPackage]:
    """Raises CheckpointError if the file is missing or damaged."""
    try:
        found = json.loads(lzma.decompress(path.read_bytes()))
        return [HeldOutPackage(**{**entry, "files": [(p, t) for p, t in entry["files"]]}) for entry in found]
    except (OSError, lzma.LZMAError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the held-out text cannot be read ({error}); it ships with Headrace") from error


def held_out_tokens(packages: list[HeldOutPackage], tokenizer: Tokenizer) -> Tensor:
    """int64 [n]: all files in order, each followed by the end-of-text token."""
    end: int = tokenizer.token_to_id(END)  # type: ignore[assignment]  # of the nano family; the caller has checked
    texts = [text for package in packages for _, text in package.files]
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids += [*encoding.ids, end]
    return torch.tensor(ids)


def even_windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """int64 [count, length]: evenly spaced windows that cover the tokens [n]."""
    offsets = torch.linspace(0, tokens.numel() - length, count).long()
    return tokens[offsets[:, None] + torch.arange(length)]


def _byte_of_character() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the others for 256, 257, ..."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes each id stands for; one zero byte for added tokens."""
    alphabet = _byte_of_character()
    added = tokenizer.get_added_tokens_decoder()
    return [
        CONTROL_BYTE if i in added else bytes(alphabet[c] for c in tokenizer.id_to_token(i) or "")
        for i in range(tokenizer.get_vocab_size())
    ]
