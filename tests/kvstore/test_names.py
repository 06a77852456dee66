"""Block names: framing, chaining, the fixed vector, speed."""

import hashlib
import itertools
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kvstore import names
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.names import NameChain, block_name, chain, fingerprint, frame, namespace, token_bytes

ROOT = namespace(b"m" * 32, "tenant")
LAYOUT = SlabLayout(3, (0, 2), True, "tile656")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=300)


def test_vector_is_what_every_build_must_give():
    assert tuple(n.hex() for n in names._test_vector()) == names.TEST_VECTOR


def test_encoding_is_the_documented_one():
    tokens = list(range(64))
    raw = struct.pack("<I", 32) + ROOT + struct.pack("<I", 64) + struct.pack("<64I", *tokens) + struct.pack("<I", 0)
    assert chain(ROOT, tokens) == [hashlib.sha256(raw).digest()] == [block_name(ROOT, token_bytes(tokens))]


def test_same_names_in_another_process_with_other_hash_seed():
    code = "from headrace.kvstore import names; print(*[n.hex() for n in names._test_vector()])"
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert tuple(out.split()) == names.TEST_VECTOR


@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
def test_framing_is_injective(left, right):
    parts = lambda items: struct.pack("<I", len(items)) + frame(items)  # noqa: E731
    assert (parts(left) == parts(right)) == (left == right)
    assert (block_name(ROOT, b"", left) == block_name(ROOT, b"", right)) == (left == right)


def test_extras_and_namespace_parts_do_not_run_together():
    assert block_name(ROOT, b"", [b"ab", b"c"]) != block_name(ROOT, b"", [b"a", b"bc"])
    assert namespace(b"m", "ab", "c") != namespace(b"m", "a", "bc")
    assert namespace(b"m", "", "x") != namespace(b"m", "x", "")


@given(token_lists, st.lists(st.integers(0, 300), max_size=6))
@settings(max_examples=60)
def test_incremental_equals_whole(tokens, cuts):
    whole, grown, new = chain(ROOT, tokens), NameChain(ROOT), []
    edges = sorted({0, len(tokens), *(min(c, len(tokens)) for c in cuts)})
    for start, end in itertools.pairwise(edges):
        new += grown.extend(np.array(tokens[start:end], dtype=np.int64))
    assert new == whole == grown.names
    assert grown.num_tokens == len(tokens)
    assert len(whole) == len(tokens) // 64


@given(token_lists, st.integers(0, 299))
@settings(max_examples=60)
def test_a_name_depends_on_its_prefix_and_nothing_else(tokens, where):
    names_before = chain(ROOT, tokens)
    if where >= len(tokens):
        return
    changed = [*tokens]
    changed[where] ^= 1
    for block, (old, new) in enumerate(zip(names_before, chain(ROOT, changed))):
        assert (old == new) == (block < where // 64)


def test_start_parent_continues_a_chain():
    tokens = np.arange(256, dtype=np.uint32)
    whole = chain(ROOT, tokens)
    assert whole[2:] == chain(ROOT, tokens[128:], whole[1])


def test_truncate_and_copy():
    tokens = list(range(200))
    first = NameChain(ROOT)
    first.extend(tokens)
    branch = first.copy()
    branch.truncate(1)
    branch.extend([5] * 64)
    assert branch.names[0] == first.names[0]
    assert branch.names[1] == chain(ROOT, tokens[:64] + [5] * 64)[1]
    assert first.num_tokens == 200


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], b"abc"])
def test_bad_tokens_are_refused(bad):
    with pytest.raises(ValueError, match="token"):
        chain(ROOT, bad)


def test_private_names_are_tagged_and_differ():
    drawn = {names.private_name() for _ in range(100)}
    assert len(drawn) == 100
    assert all(names.is_private(n) and len(n) == 32 for n in drawn)
    assert not any(names.is_private(n) for n in chain(ROOT, range(640)))


def test_fingerprint_differs_by_weights_and_layout():
    same = fingerprint("v1", LAYOUT)
    assert len(same) == 32
    assert same == fingerprint(b"v1", SlabLayout(3, (0, 2), True, "tile656"))
    others = [fingerprint("v2", LAYOUT)]
    others += [fingerprint("v1", SlabLayout(*args)) for args in [
        (3, (0, 1), True, "tile656"), (3, (0, 2), False, "tile656"),
        (3, (0, 2), True, "plain576"), (4, (0, 2), True, "tile656"),
    ]]  # fmt: skip
    assert len({same, *others}) == 6


def test_128k_tokens_hash_in_milliseconds():
    tokens = np.random.default_rng(0).integers(0, 150_000, 131_072).astype(np.uint32)
    best = min(_seconds(lambda: chain(ROOT, tokens)) for _ in range(5))
    assert best < 0.02, f"2,048 names took {best * 1e3:.1f} ms"
    grown = NameChain(ROOT)
    grown.extend(tokens)
    turn = tokens[:1000]
    best = min(_seconds(lambda: grown.extend(turn)) for _ in range(5))
    assert best < 0.002, f"a turn of 1,000 tokens took {best * 1e3:.2f} ms"


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
