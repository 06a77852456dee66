"""The slab file: what survives, what is noticed, what is refused."""

import dataclasses
import os

import pytest

from headrace.errors import ConfigError
from headrace.kvstore.disk.base import Record
from headrace.kvstore.disk.file import open_file, slot_start, slots_in
from headrace.kvstore.disk.record import PAGE_BYTES, pack_record, unpack_record

SLOT = 8192
PRINT = bytes(range(32))


def opened(path, slots=4, fingerprint=PRINT, slot_bytes=SLOT):
    return open_file(path, fingerprint=fingerprint, disk_bytes=slot_start(slots, slot_bytes), slot_bytes=slot_bytes)


def record(names, number, generation=1):
    return Record(names[number], names[number - 1] if number else None, number, bytes([number]) * 16, generation)


def slab(number):
    return memoryview(bytearray(os.urandom(SLOT - 1) + bytes([number])))


def test_what_was_written_is_found_by_the_next_one_who_opens_the_file(tmp_path, names):
    file, first, second = opened(tmp_path / "a"), slab(1), slab(2)
    file.write(0, record(names, 0), first)
    file.write(3, record(names, 1), second)
    file.close()
    again = opened(tmp_path / "a")
    assert again.records() == [record(names, 0), None, None, record(names, 1)]
    into = memoryview(bytearray(SLOT))
    assert again.read(3, into) == record(names, 1)
    assert into == second
    again.erase(3)
    assert again.read(3, into) is None
    assert into == second
    again.close()
    third = opened(tmp_path / "a")
    assert third.records() == [record(names, 0), None, None, None]
    third.close()


def test_the_whole_file_is_allocated_at_the_start(tmp_path):
    file = opened(tmp_path / "a", slots=16)
    assert os.stat(tmp_path / "a").st_blocks * 512 >= slot_start(16, SLOT)
    file.close()


def test_aligned_memory_is_used_without_a_copy_and_other_memory_works_too(tmp_path, names):
    import mmap

    file = opened(tmp_path / "a")
    aligned = memoryview(mmap.mmap(-1, SLOT))
    odd = memoryview(bytearray(SLOT + 7))[7:]
    aligned[:] = odd[:] = bytes(range(256)) * (SLOT // 256)
    file.write(0, record(names, 0), odd)
    got = memoryview(mmap.mmap(-1, SLOT))
    file.read(0, got)
    assert got == aligned
    with pytest.raises(ValueError, match="8192 bytes here"):
        file.write(0, record(names, 0), aligned[:4096])
    file.close()


@pytest.mark.parametrize(("fingerprint", "slot_bytes"), [(bytes(32), SLOT), (PRINT, 2 * SLOT)])
def test_a_file_of_other_weights_or_another_layout_starts_empty_and_says_so(
    tmp_path, names, caplog, fingerprint, slot_bytes
):
    file = opened(tmp_path / "a")
    file.write(0, record(names, 0), slab(0))
    file.close()
    other = opened(tmp_path / "a", 4, fingerprint, slot_bytes)
    assert other.records() == [None] * 4
    other.close()
    assert "starts empty" in caplog.text
    back = opened(tmp_path / "a")
    assert back.records() == [None] * 4
    back.close()


def test_a_file_of_another_size_keeps_the_slots_that_both_have(tmp_path, names):
    file = opened(tmp_path / "a", 4)
    for slot in range(4):
        file.write(slot, record(names, slot), slab(slot))
    file.close()
    smaller = opened(tmp_path / "a", 2)
    assert [r is not None for r in smaller.records()] == [True, True]
    smaller.close()
    larger = opened(tmp_path / "a", 6)
    assert [r is not None for r in larger.records()] == [True, True, False, False, False, False]
    larger.close()


def test_a_file_that_is_no_slab_file_is_left_alone(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"somebody's diary")
    with pytest.raises(ConfigError, match="left alone"):
        opened(path)
    assert path.read_bytes() == b"somebody's diary"


def test_two_daemons_cannot_share_a_file(tmp_path):
    file = opened(tmp_path / "a")
    with pytest.raises(ConfigError, match="another daemon"):
        opened(tmp_path / "a")
    file.close()
    opened(tmp_path / "a").close()


def test_a_damaged_record_is_none_and_a_damaged_head_empties_the_file(tmp_path, names):
    file = opened(tmp_path / "a")
    for slot in (0, 1):
        file.write(slot, record(names, slot), slab(slot))
    file.close()
    with open(tmp_path / "a", "r+b") as raw:
        raw.seek(slot_start(1, SLOT) + 40)
        raw.write(b"\xff")
    file = opened(tmp_path / "a")
    assert file.records() == [record(names, 0), None, None, None]
    file.close()
    with open(tmp_path / "a", "r+b") as raw:
        raw.seek(20)
        raw.write(b"\xff\xfe")
    file = opened(tmp_path / "a")
    assert file.records() == [None] * 4
    file.close()


def test_every_byte_of_a_record_is_covered_by_its_checksum(names):
    made = dataclasses.replace(record(names, 2, generation=1 << 40), tenant=b"somebody")
    whole = pack_record(made)
    assert unpack_record(whole + bytes(PAGE_BYTES - len(whole))) == made
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        assert unpack_record(bytes(damaged)) is None
    assert unpack_record(bytes(PAGE_BYTES)) is None
    assert unpack_record(b"") is None


def test_a_size_that_holds_no_block_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="9000 does not hold one block of 8192"):
        slots_in(9000, SLOT)


def test_the_probe_uses_no_slot(tmp_path, names):
    file, data = opened(tmp_path / "a", 1), slab(0)
    file.write(0, record(names, 0), data)
    file.probe()
    into = memoryview(bytearray(SLOT))
    assert file.read(0, into) == record(names, 0)
    assert into == data
    with pytest.raises(IndexError, match="slot 1 is outside"):
        file.read(1, into)
    file.close()
