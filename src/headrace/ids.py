"""Distinct types for the identifiers that cross rooms, so that mypy catches a swapped argument."""

import secrets
from enum import StrEnum
from typing import NewType

BlockName = NewType("BlockName", bytes)
"""32-byte digest that names one block of 64 tokens (see kvstore/names.py)."""

Namespace = NewType("Namespace", bytes)
"""32-byte root of every chain of block names of one model, layout and tenant."""

RequestId = NewType("RequestId", str)
"""One sampled sequence. A client request with `n` choices becomes `n` of these."""

Incarnation = NewType("Incarnation", str)
"""Random id a process draws at start; whatever is remembered about a peer is bound to it."""

SlotIndex = NewType("SlotIndex", int)
"""Index of a slot in one tier. Meaningless outside that tier."""


class Tier(StrEnum):
    """Where a block's bytes lie. The value is the name on the wire, in logs and in metrics."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"


class Role(StrEnum):
    """What a rank does."""

    PREFILL = "prefill"
    DECODE = "decode"


def new_incarnation() -> Incarnation:
    """Draw the id of this run of this process: 64 random bits as hex."""
    return Incarnation(secrets.token_hex(8))
