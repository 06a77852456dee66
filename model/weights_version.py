"""A 32-byte digest of a checkpoint; part of the namespace, so KV of other weights is never hit. Torch-free.

Hashed: config.json, the shard index, and per safetensors file its name, size and content. Reading 756 GB at every start
is out of the question: of files above 64 MiB the header and three samples of 1 MiB stand for the content. Whoever
patches single tensors of a big shard in place says so with `extra`.
"""

import hashlib
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.model.spec import resolve_path

WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20
DUMMY_VERSION = 2
"""Changes when `model/dummy.py` makes other values from the same seed."""


def weights_version(path: str | Path, load_format: str = "safetensors", dummy_seed: int = 0, extra: str = "") -> bytes:
    """Digest of a checkpoint directory, or with `dummy` of its config and the seed. Raises CheckpointError."""
    directory = resolve_path(path)
    digest = hashlib.sha256()
    _frame(digest, b"weights-v1", load_format.encode(), extra.encode(), _read(directory / "config.json"))
    if load_format == "dummy":
        _frame(digest, f"{DUMMY_VERSION}|{dummy_seed}".encode())
        return digest.digest()
    index = directory / "model.safetensors.index.json"
    if index.exists():
        _frame(digest, _read(index))
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{directory}: no safetensors file")
    for shard in shards:
        _frame(digest, shard.name.encode(), str(shard.stat().st_size).encode(), _shard_bytes(shard))
    return digest.digest()


def _shard_bytes(shard: Path) -> bytes:
    """Digest of a small file's content; of a big one's header and of three samples of 1 MiB."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        header = int.from_bytes(file.read(8), "little")
        if header > size:
            raise CheckpointError(f"{shard}: header of {header} bytes in a file of {size}")
        digest.update(file.read(header))
        for start in (header + 8, size // 2, size - _SAMPLE_BYTES):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
        return digest.digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _frame(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
