"""Messages that cross a process border, and their msgpack form.

A message is a frozen dataclass registered with `@message`. On the wire it is the msgpack array
`[class name, {field: value}]`; nested messages have the same form. `decode` checks every field's type against the
annotation and refuses unknown classes, unknown fields and missing fields with `IncompatiblePeer`, so a peer of another
build fails at once instead of half-working. Tensors travel as `bytes` with their shape and dtype stated in the field's
docstring. Nothing here is pickle.
"""

import dataclasses
import types
import typing
from typing import Any, TypeVar

import msgpack

from headrace.errors import IncompatiblePeer
from headrace.ids import BlockName, Incarnation, Namespace, RequestId

T = TypeVar("T")
_registry: dict[str, type[Any]] = {}
_hints: dict[type[Any], dict[str, Any]] = {}


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def message(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted, keyword-only dataclass that `encode` and `decode` know by its name."""
    made = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls)
    if made.__name__ in _registry:
        raise TypeError(f"two messages are called {made.__name__}")
    _registry[made.__name__] = made
    return made


def encode(value: Any) -> bytes:
    """Pack a registered message."""
    packed: bytes = msgpack.packb(value, default=_pack_default, use_bin_type=True)
    return packed


def decode(data: bytes) -> Any:
    """Unpack one message. Raises IncompatiblePeer on anything that is not exactly a known message."""
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except Exception as error:
        raise IncompatiblePeer(f"not a message: {error}") from error
    return _build(raw)


def _pack_default(value: Any) -> Any:
    if type(value).__name__ in _registry and dataclasses.is_dataclass(value):
        return [type(value).__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}]
    raise TypeError(f"{type(value).__name__} is not a message and cannot cross a process")


def _build(raw: Any) -> Any:
    if not (isinstance(raw, list) and len(raw) == 2 and isinstance(raw[0], str) and isinstance(raw[1], dict)):
        raise IncompatiblePeer("expected [class name, fields]")
    cls = _registry.get(raw[0])
    if cls is None:
        raise IncompatiblePeer(f"unknown message {raw[0]!r}; known: {', '.join(sorted(_registry))}")
    if cls not in _hints:
        _hints[cls] = typing.get_type_hints(cls)
    hints, fields = _hints[cls], raw[1]
    unknown = set(fields) - set(hints)
    if unknown:
        raise IncompatiblePeer(f"{raw[0]} has no field {', '.join(sorted(map(str, unknown)))}")
    try:
        return cls(**{name: _check(f"{raw[0]}.{name}", value, hints[name]) for name, value in fields.items()})
    except TypeError as error:
        raise IncompatiblePeer(f"{raw[0]}: {error}") from error


def _check(where: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type (lists become tuples where the annotation says so) or raise."""
    if hasattr(hint, "__supertype__"):
        return _check(where, value, hint.__supertype__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _check_union(where, value, args)
    if origin is tuple and isinstance(value, list):
        inner = args[:1] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(inner) == len(value):
            return tuple(_check(f"{where}[{i}]", item, arg) for i, (item, arg) in enumerate(zip(value, inner)))
    elif origin is dict and isinstance(value, dict):
        return {_check(f"{where} key", k, args[0]): _check(f"{where}[{k!r}]", v, args[1]) for k, v in value.items()}
    elif isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            built = _build(value)
            if isinstance(built, hint):
                return built
        elif hint is float and type(value) in (int, float):
            return float(value)
        elif type(value) is hint:
            return value
    raise IncompatiblePeer(f"{where}: expected {hint}, got {type(value).__name__}")


def _check_union(where: str, value: Any, args: tuple[Any, ...]) -> Any:
    if value is None and type(None) in args:
        return None
    problem: IncompatiblePeer | None = None
    for arg in args:
        if arg is type(None):
            continue
        try:
            return _check(where, value, arg)
        except IncompatiblePeer as error:
            problem = error
    raise problem if problem else IncompatiblePeer(f"{where}: unexpected None")


# --- greeting ------------------------------------------------------------------------------------------------------


@message
class Hello:
    """First message on every connection. A peer whose `fingerprint` differs is refused with IncompatiblePeer."""

    name: str
    role: str
    incarnation: Incarnation
    fingerprint: bytes
    """`kvstore.names.fingerprint`: naming test vector + weight version + slab layout, 32 bytes."""


@message
class ErrorInfo:
    """A HeadraceError on the wire."""

    kind: str
    text: str


# --- sampling ------------------------------------------------------------------------------------------------------


@message
class SamplingParams:
    """How one sequence is sampled. `temperature == 0` is greedy. Everything is applied to the target's logits."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """64-bit; the router draws one when the client gives none."""
    choice: int = 0
    """Index among the `n` choices of the client's request; part of the noise key."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer; includes the model's end-of-sequence ids unless the client asked to ignore them."""
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    top_logprobs: int = -1
    """-1: no logprobs; k >= 0: the chosen token's logprob and those of the k best."""
    grammar: str = ""
    """Empty, or what the whole answer must match, in the Lark form of `model/grammar.py`. Tokens outside it are never
    drawn; the answer ends where nothing may follow."""


@message
class TokenLogprob:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first."""


# --- router -> prefill ---------------------------------------------------------------------------------------------


@message
class PrefillRequest:
    """Compute a prompt. The gRPC stream that carries it is also its lifetime: cancelling the stream aborts, and the
    prefill side keeps the published blocks pinned until the router closes the stream (after the decode rank has
    answered `Accepted`)."""

    request_id: RequestId
    tokens: bytes
    """The prompt, little-endian u32."""
    block_names: tuple[BlockName, ...]
    """Chained names of the full blocks of the prompt, floor(L / 64) of them."""
    sampling: SamplingParams
    output_index: int = 0
    """Index of the first token to sample within the answer; > 0 when an interrupted stream is resumed and `tokens`
    holds what was already sent."""
    want_handover: bool = True
    """False: only compute, publish and sample one token (used by `max_tokens == 1` and by warm-up)."""
    prompt_logprobs: int = -1
    """k >= 0: also the logprob of each prompt token after the first and those of the k best. Only for rows that are
    computed: whoever asks gives block names that nobody else has."""
    publish: bool = True
    tenant: bytes = b""
    """Whom the store counts the blocks for (`kvstore.names.tenant_id`); empty: nobody."""


@message
class Handover:
    """What a decode rank needs beside the named blocks to go on where prefill stopped.

    With L prompt tokens, the KV of rows 0..L-1 is in blocks; the sampled token t_L has no KV yet.
    """

    private_name: BlockName
    """Request-private name, in the host tier, of block floor(L / 64): target rows 64*floor(L/64)..L-1 and MTP rows up
    to and including row L. Always present, also when L % 64 == 0."""
    draft_tokens: tuple[int, ...]
    """Greedy drafts for positions L+1, L+2, ...; may be shorter than the configured length, or empty."""
    mtp_hidden: bytes
    """[hidden] fp32 little-endian: MTP output (after shared_head.norm) at MTP position L-1."""
    index_seed: bytes
    """[<= index_topk] int32 little-endian, request-relative MTP cache rows the MTP row at position L-1 selected;
    empty when the model does not share the index across draft steps."""


@message
class PrefillDone:
    """The prompt is computed, its blocks are published, the first token is sampled."""

    request_id: RequestId
    first_token: int
    logprob: TokenLogprob | None
    finish_reason: str | None
    """None: goes on in decode. "stop" or "length": the first token ended the answer, no handover."""
    cached_tokens: dict[str, int]
    """Prompt tokens nobody computed for this request, by tier ("device", "host", ...). Their sum is
    min(hit, L - 1)."""
    handover: Handover | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of prompt tokens 1..L-1, when they were asked for."""
    queue_s: float = 0.0
    restore_s: float = 0.0
    compute_s: float = 0.0


@message
class PrefillFailed:
    request_id: RequestId
    error: ErrorInfo


# --- router <-> decode rank: one long-lived bidirectional stream per (router, rank) ---------------------------------


@message
class DecodeRequest:
    """Continue a prompt whose KV is in the store. The rank never computes a prompt position: if a block is missing it
    answers `Refused(BlockMiss)` before it takes a slot."""

    request_id: RequestId
    tokens: bytes
    """Prompt, little-endian u32, L tokens."""
    block_names: tuple[BlockName, ...]
    first_token: int
    output_index: int
    """Index within the answer of the first token this rank will sample (1 normally)."""
    sampling: SamplingParams
    """`max_tokens` counts the whole answer, including the tokens before `output_index`."""
    handover: Handover
    namespace: Namespace = Namespace(b"")
    """Root of the chain of names. Empty: the answer of a prompt shorter than one block cannot be named, so its blocks
    are not published."""
    publish: bool = True
    """False: full blocks of the answer are not published (private requests)."""


@message
class AbortRequest:
    request_id: RequestId


@message
class Accepted:
    """The rank holds copies of all blocks; the router may close the prefill stream."""

    request_id: RequestId
    restored_tokens: dict[str, int]
    """Prompt tokens by the tier this rank took them from ("device": it already had them)."""


@message
class Refused:
    request_id: RequestId
    error: ErrorInfo


@message
class SequenceTokens:
    """New tokens of one sequence in one step."""

    request_id: RequestId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per token."""
    finish_reason: str | None = None
    """None, "stop" or "length". After a reason the rank has released everything of this request."""
    drafted: int = 0
    accepted: int = 0
    """Draft tokens verified and accepted in this step."""


@message
class StepTokens:
    """All sequences of this stream that produced tokens in one step."""

    step: int
    sequences: tuple[SequenceTokens, ...]


@message
class Aborted:
    """Answer to AbortRequest, also when the id was unknown: everything of it is released."""

    request_id: RequestId


@message
class SequenceFailed:
    request_id: RequestId
    error: ErrorInfo


# --- any box: state for health, metrics, doctor and tests -----------------------------------------------------------


@message
class StatusRequest:
    pass


@message
class BoxStatus:
    """Gauges and counters of one box, flat: "name" or "name{label=value}" -> number."""

    name: str
    incarnation: Incarnation
    ready: bool
    values: dict[str, float]


@message
class FlushRequest:
    """Drop every cached block that nothing holds."""


@message
class FlushDone:
    blocks: int
