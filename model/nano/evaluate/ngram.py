"""The baseline: a byte n-gram model with interpolated modified Kneser-Ney smoothing.

Formulas: Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998), section 3. For a
context h and a byte w, with counts c that are raw at the highest order and continuation counts below it,

    p(w | h) = max(c(hw) - D(c(hw)), 0) / c(h·)  +  (D1·N1(h·) + D2·N2(h·) + D3·N3+(h·)) / c(h·) · p(w | h')

where h' is h without its first byte, N1, N2 and N3+ are the numbers of bytes seen once, twice and more after h, and the
discounts of an order come from its counts of counts. Below the unigrams stands the uniform distribution over 256 bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
ALPHABET = 256
CHUNK_BYTES = 1 << 25


def _sums(sorted_keys: Keys, weights: NDArray[np.int64]) -> tuple[Keys, NDArray[np.int64]]:
    """Distinct keys of a sorted array and the sum of the weights of each."""
    first = np.flatnonzero(np.diff(sorted_keys, prepend=sorted_keys[:1] - 1))
    return sorted_keys[first], np.add.reduceat(weights, first)


def _merged(keys: Keys, counts: NDArray[np.int64]) -> tuple[Keys, NDArray[np.int64]]:
    order = np.argsort(keys, kind="stable")
    return _sums(keys[order], counts[order])


def gram_keys(text: NDArray[np.uint8], order: int) -> Keys:
    """int64 [n - order + 1]: the bytes of each n-gram as one number, the first byte highest."""
    keys = np.zeros(max(0, len(text) - order + 1), dtype=np.int64)
    for i in range(order):
        keys = (keys << 8) | text[i : i + len(keys)]
    return keys


def count_grams(texts: Iterable[bytes], order: int) -> tuple[Keys, NDArray[np.int64]]:
    """Sorted distinct n-grams of the texts, none reaching over a text's end, and their counts."""
    keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    pending: list[Keys] = []
    for text in texts:
        pending.append(gram_keys(np.frombuffer(text, np.uint8), order))
        if sum(map(len, pending)) >= CHUNK_BYTES:
            keys, counts = _with_chunk(keys, counts, pending)
            pending = []
    return _with_chunk(keys, counts, pending) if pending else (keys, counts)


def _with_chunk(keys: Keys, counts: NDArray[np.int64], pending: list[Keys]) -> tuple[Keys, NDArray[np.int64]]:
    chunk = np.sort(np.concatenate(pending))
    if not len(chunk):
        return keys, counts
    new, seen = _sums(chunk, np.ones(len(chunk), np.int64))
    return _merged(np.concatenate((keys, new)), np.concatenate((counts, seen)))


@dataclass(frozen=True)
class _Order:
    """One order: n-grams and their discounted counts; contexts with their totals and the mass they leave below."""

    keys: Keys
    kept: NDArray[np.float64]
    contexts: Keys
    totals: NDArray[np.float64]
    left: NDArray[np.float64]

    @classmethod
    def build(cls, keys: Keys, counts: NDArray[np.int64]) -> "_Order":
        discounts = _discounts(counts)
        taken = discounts[np.minimum(counts, 3)]
        contexts = keys >> 8
        first = np.flatnonzero(np.diff(contexts, prepend=contexts[:1] - 1))
        totals = np.add.reduceat(counts, first).astype(np.float64)
        return cls(keys, counts - taken, contexts[first], totals, np.add.reduceat(taken, first))

    def interpolate(self, grams: Keys, below: NDArray[np.float64]) -> NDArray[np.float64]:
        """p(w | h) of the n-grams, given p(w | h')."""
        context, known = _find(self.contexts, grams >> 8)
        gram, seen = _find(self.keys, grams)
        kept = np.where(seen, self.kept[gram], 0.0)
        return np.where(known, (kept + self.left[context] * below) / self.totals[context], below)


def _find(keys: Keys, wanted: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """D(0), D1, D2, D3+. On texts too small for the estimates, the usual half."""
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == i)) for i in (1, 2, 3, 4))
    if min(n1, n2, n3) == 0:
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = n1 / (n1 + 2 * n2)
    wanted = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return np.array([min(max(d, 0.0), float(i)) for i, d in enumerate(wanted)])


class ByteNgram:
    """A byte model of `order` trained on texts."""

    def __init__(self, texts: Iterable[bytes], order: int = 5) -> None:
        keys, counts = count_grams(texts, order)
        if not len(keys):
            raise ValueError(f"the n-gram model needs a text of at least {order} bytes")
        self.order, self._orders = order, [_Order.build(keys, counts)]
        for lower in range(order - 1, 0, -1):
            # How many different bytes precede each shorter n-gram: continuation counts.
            shorter = np.sort(keys & ((1 << (8 * lower)) - 1))
            keys, counts = _sums(shorter, np.ones(len(shorter), np.int64))
            self._orders.append(_Order.build(keys, counts))

    def bits(self, text: bytes, first: int = 0) -> float:
        """Bits needed for text[first:], each byte given up to order - 1 bytes before it."""
        raw = np.frombuffer(text, np.uint8)
        total = 0.0
        for i in range(first, min(len(raw), self.order - 1)):
            total += self._bits(gram_keys(raw[: i + 1], i + 1), i + 1)
        start = max(first, self.order - 1)
        if start < len(raw):
            total += self._bits(gram_keys(raw[start - self.order + 1 :], self.order), self.order)
        return total

    def _bits(self, grams: Keys, order: int) -> float:
        p = np.full(len(grams), 1.0 / ALPHABET)
        for length in range(1, order + 1):
            p = self._orders[self.order - length].interpolate(grams & ((1 << (8 * length)) - 1), p)
        return float(-np.log2(p).sum())
