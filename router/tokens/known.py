"""Texts whose token ids are known: what was tokenised before, and what was generated.

A model need not write its answer the way the tokenizer would cut it. When a client sends such an answer back, cutting
the text again gives other ids, other block names, and misses. So texts (a prompt, or a prompt with its answer) are kept
with the ids they really had, and a new text that begins with a known one takes its ids and tokenises only the rest.
That is done only where an added token (`<|user|>`, `</think>`) starts or ends, so without generated ids the result is
exactly that of tokenising the whole.

Only digests of the texts are kept. Entries form chains (prompt, answer, next prompt, ...), each holding the ids its
text adds to the one before; using one uses its chain, so the least recently used entry never has others standing on it.
"""

import array
import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from headrace.ids import BlockName, Namespace
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.kvstore.names import NameChain
from headrace.router.tokens.tokenizer import Tokenizer

ENTRY_BYTES = 1024
"""What an entry counts beside four bytes a token: objects, dictionary slots."""
NAME_COST = 80
"""Bytes a remembered block name takes: 32, an object around it, a place in a list."""
LARGEST_SHARE = 4
"""An entry larger than this part (1/4) of the memory would push out everybody else's, and is not kept."""


class Entry:
    """One known text of a tenant. Opaque to callers."""

    __slots__ = ("ids", "key", "length", "names", "parent", "rest", "root", "tenant")

    def __init__(self, tenant: bytes, key: bytes, length: int, ids: Sequence[int], parent: "Entry | None") -> None:
        self.tenant = tenant
        self.key = key
        self.length = length
        """Characters of the whole text."""
        self.ids = array.array("I", ids)
        """What the text has after `parent`'s."""
        self.parent = parent
        self.root = Namespace(b"")
        self.names: list[BlockName] = []
        """Blocks under `root` that become full by `ids`."""
        self.rest = b""

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.ids) * self.ids.itemsize + len(self.ids) // BLOCK_TOKENS * NAME_COST

    def chain(self) -> "Iterator[Entry]":
        """This entry, then the ones it stands on."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.parent

    def whole(self) -> "array.array[int]":
        """Ids of the whole text."""
        found = array.array("I")
        for entry in reversed(list(self.chain())):
            found.extend(entry.ids)
        return found

    def name_chain(self, root: Namespace) -> NameChain:
        """Names of the whole text's blocks; only what no entry before has named is hashed."""
        chain = NameChain(root)
        for entry in reversed(list(self.chain())):
            if entry.root != root:
                names = chain.extend(entry.ids)
                # The root last: another thread may look, and would find the same.
                entry.names, entry.rest, entry.root = names, chain.rest, root
            else:
                chain.follow(entry.names, entry.rest)
        return chain


class KnownTexts:
    """Thread-safe. A tenant never sees what another one's texts were: its name is part of every digest."""

    def __init__(self, tokenizer: Tokenizer, limit_bytes: int) -> None:
        """`limit_bytes` 0: keep nothing."""
        self._tokenizer = tokenizer
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._lengths: dict[bytes, Counter[int]] = {}
        """Per tenant, how many entries have a length: the only places of a text worth a digest."""
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def encode(self, tenant: bytes, text: str) -> tuple["array.array[int]", Entry | None]:
        """Ids of `text`, and the entry to `extend` with the answer (None: it is not kept). Raises InputError for text
        that is not valid Unicode."""
        base, state = self._longest(tenant, text) if self._limit else (None, None)
        if base is None:
            ids = array.array("I", self._tokenizer.encode(text))
            return ids, self._add(tenant, text, None, text, ids)
        if base.length == len(text):
            return base.whole(), base
        rest = text[base.length :]
        added = array.array("I", self._tokenizer.encode(rest))
        return base.whole() + added, self._add(tenant, text, base, rest, added, state)

    def extend(self, base: Entry, text: str, rest_ids: Sequence[int]) -> Entry | None:
        """Remember `text`, which begins with the text of `base` and goes on with what `rest_ids` spell. None: it is not
        kept, because the ids spell something else, `base` is gone, or it is too large. A text that is known already
        keeps its ids."""
        return self._add(base.tenant, text, base, text[base.length :], rest_ids)

    def _longest(self, tenant: bytes, text: str) -> "tuple[Entry | None, hashlib._Hash | None]":
        """The longest known start of `text`, and the digest's state after it."""
        with self._lock:
            lengths = list(self._lengths.get(tenant, ()))
        places = sorted(n for n in lengths if n <= len(text) and self._tokenizer.is_border(text, n))
        states = _states(tenant, text, places)
        with self._lock:
            for state in reversed(states):
                entry = self._entries.get(state.digest())
                if entry is not None:
                    self._use(entry)
                    return entry, state
        return None, None

    def _add(
        self,
        tenant: bytes,
        text: str,
        base: Entry | None,
        rest: str,
        ids: Sequence[int],
        state: "hashlib._Hash | None" = None,
    ) -> Entry | None:
        """`state`: of the digest after what comes before `rest`, if it is known."""
        if not ids or self._tokenizer.decode(ids, skip_special=False) != rest:
            return None
        if state is None:
            state = _states(tenant, text, [len(text)])[0]
        else:
            state = state.copy()
            state.update(rest.encode("utf-8", "surrogatepass"))
        entry = Entry(tenant, state.digest(), len(text), ids, base)
        if entry.size * LARGEST_SHARE > self._limit:
            return None
        with self._lock:
            if base is not None and self._entries.get(base.key) is not base:
                return None
            known = self._entries.get(entry.key)
            if known is None:
                self._entries[entry.key] = known = entry
                self._lengths.setdefault(tenant, Counter())[entry.length] += 1
                self._bytes += entry.size
            self._use(known)
            while self._bytes > self._limit:
                self._forget(next(iter(self._entries.values())))
            return known if known.key in self._entries else None

    def _use(self, entry: Entry) -> None:
        # Its own place first: what it stands on is always more recently used than it is.
        for one in entry.chain():
            self._entries.move_to_end(one.key)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._bytes -= entry.size
        lengths = self._lengths[entry.tenant]
        lengths[entry.length] -= 1
        if not lengths[entry.length]:
            del lengths[entry.length]
        if not lengths:
            del self._lengths[entry.tenant]


def _states(tenant: bytes, text: str, places: Sequence[int]) -> "list[hashlib._Hash]":
    """State of the digest of the text before each of `places` (ascending)."""
    state = hashlib.sha256(len(tenant).to_bytes(4, "little") + tenant)
    found, at = [], 0
    for place in places:
        state.update(text[at:place].encode("utf-8", "surrogatepass"))
        found.append(state.copy())
        at = place
    return found


def spelled(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[str, list[int]]:
    """The longest start of `text` that generated `ids` spell and that a longer text may be cut after, with its ids.

    `text` is what a client or a template makes of the answer: white space stripped, a stop string cut, more after it.
    Whole tokens are taken as long as they agree. If they end inside a token, at a border of the text, the piece up to
    there is tokenised; otherwise the start ends after the last added token that was taken."""
    data = text.encode("utf-8", "surrogatepass")
    at, taken, split = 0, (0, 0), b""
    closed = (0, 0)
    for count, token in enumerate(ids, 1):
        piece = tokenizer.bytes_of(token)
        if not piece or not data.startswith(piece, at):
            split = piece
            break
        at += len(piece)
        if _starts_character(data, at):
            taken = (count, at)
            if tokenizer.is_added(token):
                closed = taken
    while split and not data.startswith(split, at):
        split = split[:-1]
    end = at + len(split)
    while not _starts_character(data, end):
        end -= 1
    if not tokenizer.is_border(text, len(data[:end].decode("utf-8", "surrogatepass"))):
        count, end = closed
        return data[:end].decode(), list(ids[:count])
    count, whole = taken
    return data[:end].decode(), [*ids[:count], *tokenizer.encode(data[whole:end].decode())]


def _starts_character(data: bytes, at: int) -> bool:
    return at == len(data) or data[at] & 0xC0 != 0x80
