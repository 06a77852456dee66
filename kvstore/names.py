"""Block names: SHA-256 chains over 64-token blocks. Pure: numpy and hashlib only, no state, no randomised hashes.

Encoding of one block (all integers little-endian u32):

    len(parent) parent | token count | tokens as u32 | number of extras | (len(extra) extra) ...

Every variable part is framed by its length, so ("ab", "c") and ("a", "bc") never give the same bytes. The parent of the
first block is the namespace; a namespace starts with another frame length than a block, so the two kinds never collide.
`fingerprint` holds a fixed vector as *this* process computes it: builds that name blocks differently refuse to pair.
"""

import hashlib
import secrets
import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.ids import BlockName, Namespace
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.layout import SlabLayout

NAME_BYTES = 32
BLOCK_BYTES = BLOCK_TOKENS * 4
"""Bytes of the tokens of one block."""
Tokens: TypeAlias = "bytes | Sequence[int] | npt.NDArray[np.integer]"
"""Little-endian u32 bytes, or anything numpy turns into integers in 0..2^32-1."""

_PRIVATE_TAG = b"private\0"
_U32 = struct.Struct("<I")
_PARENT_FRAME = _U32.pack(NAME_BYTES)
_BLOCK_COUNT = _U32.pack(BLOCK_TOKENS)
_NO_EXTRAS = _U32.pack(0)


def token_bytes(tokens: Tokens) -> bytes:
    """Little-endian u32 form. Raises ValueError for a byte string that is not whole tokens or an id outside u32."""
    if isinstance(tokens, bytes):
        if len(tokens) % 4:
            raise ValueError(f"{len(tokens)} bytes are not whole u32 tokens")
        return tokens
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 0xFFFFFFFF:
        raise ValueError(f"tokens must be integers in 0..2^32-1, got {array.dtype} {array.min()}..{array.max()}")
    return array.astype("<u4").tobytes()


def frame(parts: Sequence[bytes]) -> bytes:
    """Each part after its length: an injective encoding of a list of byte strings of known length."""
    return b"".join(_U32.pack(len(part)) + part for part in parts)


def block_name(parent: bytes, tokens: bytes, extras: Sequence[bytes] = ()) -> BlockName:
    """Name of one block. `tokens` is u32 bytes; `extras` is whatever else decides its bytes (an image's digest)."""
    count = _U32.pack(len(tokens) // 4)
    tail = _U32.pack(len(extras)) + frame(extras)
    return BlockName(hashlib.sha256(frame([parent]) + count + tokens + tail).digest())


def chain(root: Namespace, tokens: Tokens, start_parent: BlockName | None = None) -> list[BlockName]:
    """Names of the full blocks of `tokens`, in order; a rest of fewer than 64 tokens is left out. With `start_parent`
    the tokens continue that block instead of starting at the root."""
    data = token_bytes(tokens)
    parent: bytes = root if start_parent is None else start_parent
    if len(parent) != NAME_BYTES:
        raise ValueError(f"a parent has {NAME_BYTES} bytes, got {len(parent)}")
    sha256, head, count, tail = hashlib.sha256, _PARENT_FRAME, _BLOCK_COUNT, _NO_EXTRAS
    names = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = sha256(head + parent + count + data[start : start + BLOCK_BYTES] + tail).digest()
        names.append(BlockName(parent))
    return names


class NameChain:
    """Names of a growing sequence: `extend` hashes only what is new. Not thread-safe."""

    def __init__(self, root: Namespace) -> None:
        self.root = root
        self.names: list[BlockName] = []
        """Names of the full blocks so far."""
        self._rest = b""

    @property
    def num_tokens(self) -> int:
        return len(self.names) * BLOCK_TOKENS + len(self._rest) // 4

    def extend(self, tokens: Tokens) -> list[BlockName]:
        """Append tokens; returns the names of the blocks that became full by it."""
        data = self._rest + token_bytes(tokens)
        new = chain(self.root, data, self.names[-1] if self.names else None)
        self._rest = data[len(new) * BLOCK_BYTES :]
        self.names += new
        return new

    @property
    def rest(self) -> bytes:
        """Tokens after the last full block, little-endian u32."""
        return self._rest

    def follow(self, names: Sequence[BlockName], rest: bytes) -> None:
        """Append blocks whose names are known, and the tokens after them: what `extend` would have made of them."""
        self.names += names
        self._rest = rest

    def truncate(self, blocks: int) -> None:
        """Keep the first `blocks` full blocks and forget all tokens after them (a conversation that was edited)."""
        if blocks <= len(self.names):
            del self.names[blocks:]
            self._rest = b""

    def copy(self) -> "NameChain":
        other = NameChain(self.root)
        other.names, other._rest = list(self.names), self._rest
        return other


def private_name() -> BlockName:
    """A fresh random name for the partial last block of one request: no digest of tokens, never in a directory."""
    return BlockName(_PRIVATE_TAG + secrets.token_bytes(NAME_BYTES - len(_PRIVATE_TAG)))


def is_private(name: BlockName) -> bool:
    return name.startswith(_PRIVATE_TAG)


def namespace(model_fingerprint: bytes, tenant_salt: bytes | str, lora: str = "") -> Namespace:
    """Root of every chain of one model, layout, tenant and LoRA. The salt comes from the router's own tenant table."""
    salt = tenant_salt.encode() if isinstance(tenant_salt, str) else tenant_salt
    return Namespace(hashlib.sha256(frame([b"headrace namespace 1", model_fingerprint, salt, lora.encode()])).digest())


def tenant_id(root: Namespace) -> bytes:
    """8 bytes that stand for a tenant (with its LoRA) in the store's accounts. No name can be made from them."""
    return hashlib.sha256(frame([b"headrace tenant id 1", root])).digest()[:8]


def fingerprint(weights_version: bytes | str, layout: SlabLayout) -> bytes:
    """32 bytes of the handshake: equal only if both sides name blocks alike, serve the same weights and lay slabs out
    alike."""
    version = weights_version.encode() if isinstance(weights_version, str) else weights_version
    vector = b"".join(_test_vector())
    return hashlib.sha256(frame([b"headrace fingerprint 1", vector, version, layout.fingerprint()])).digest()


def _test_vector() -> list[BlockName]:
    root = namespace(b"\x01" * 32, b"salt", "lora")
    names = chain(root, np.arange(2 * BLOCK_TOKENS, dtype=np.uint32) * 66_051)
    return [*names, block_name(names[-1], token_bytes([7, 8, 9]), [b"ab", b"c"])]


TEST_VECTOR = (
    "13ce40a3bf8130b964283432c23e7e6d0248ed2832633bfdf4f63824d2e62d0a",
    "06fb8cdbf5e481c110f6c5bb995d3c6c95942f3089f32eedb6f236b4d790b992",
    "24cb60018b89bdf4a9bb326a960221db51ad6213e385027b8b3ffcb02ce51db1",
)
"""What `_test_vector` gives on every machine and every build of this version, as hex."""
