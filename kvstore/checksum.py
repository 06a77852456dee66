"""The digest that travels with a block. Pure: no torch."""

import xxhash

DIGEST_BYTES = 16


def digest(payload: memoryview | bytes) -> bytes:
    """XXH3-128 of exactly these bytes (a slab's payload, without the padding of its slot). It finds torn, short and
    flipped bytes; it is no defence against somebody who forges them (block names and file modes are)."""
    return xxhash.xxh3_128_digest(payload)
