"""Bytes of the first page of a slab file and of the page in front of each slab. Pure.

    file page   magic | fingerprint (32) | u64 slot bytes | u64 slots | XXH3-64 of what precedes
    slot page   magic | name (32) | parent (32, zero: none) | u32 depth | u64 generation | digest (16) | tenant (8)
                | XXH3-64 ...

All integers are little-endian. A page whose checksum does not fit is no record.
"""

import struct

import xxhash

from headrace.ids import BlockName
from headrace.kvstore.disk.base import Record

PAGE_BYTES = 4096
_FILE = struct.Struct("<16s32sQQ")
_SLOT = struct.Struct("<16s32s32sIQ16s8s")
_SUM = struct.Struct("<Q")
FILE_MAGIC = b"headrace slabs 1"
_SLOT_MAGIC = b"headrace slab  1"
_NO_PARENT = bytes(32)
_NO_TENANT = bytes(8)


def pack_file(fingerprint: bytes, slot_bytes: int, slots: int) -> bytes:
    return _sealed(_FILE.pack(FILE_MAGIC, fingerprint, slot_bytes, slots))


def unpack_file(page: bytes) -> tuple[bytes, int, int] | None:
    """(fingerprint, slot bytes, slots), or None if this is not the first page of a slab file."""
    body = _opened(page, _FILE.size)
    if body is None:
        return None
    magic, fingerprint, slot_bytes, slots = _FILE.unpack(body)
    return (fingerprint, slot_bytes, slots) if magic == FILE_MAGIC else None


def pack_record(record: Record) -> bytes:
    parent = record.parent or _NO_PARENT
    return _sealed(
        _SLOT.pack(_SLOT_MAGIC, record.name, parent, record.depth, record.generation, record.digest, record.tenant)
    )  # fmt: skip


def unpack_record(page: bytes) -> Record | None:
    body = _opened(page, _SLOT.size)
    if body is None:
        return None
    magic, name, parent, depth, generation, digest, tenant = _SLOT.unpack(body)
    if magic != _SLOT_MAGIC:
        return None
    parent = None if parent == _NO_PARENT else BlockName(parent)
    return Record(BlockName(name), parent, depth, digest, generation, b"" if tenant == _NO_TENANT else tenant)


RECORD_BYTES = _SLOT.size + _SUM.size
"""How much of a slot page says anything."""


def _sealed(body: bytes) -> bytes:
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _opened(page: bytes, size: int) -> bytes | None:
    body, rest = bytes(page[:size]), bytes(page[size : size + _SUM.size])
    fits = len(rest) == _SUM.size and _SUM.unpack(rest)[0] == xxhash.xxh3_64_intdigest(body)
    return body if fits else None
