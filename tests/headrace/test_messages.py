"""Every registered message survives its wire form; anything else is refused."""

import types
import typing
from typing import Any

import msgpack
import pytest

from headrace import messages
from headrace.errors import HeadraceError, IncompatiblePeer, RankLost, from_wire
from headrace.messages import Accepted, Hello, SamplingParams, decode, encode

REGISTERED = sorted(messages._registry.items())


def example(hint: Any) -> Any:
    """Some value of an annotation."""
    if hasattr(hint, "__supertype__"):
        return example(hint.__supertype__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return example(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return (example(args[0]),) * 2 if len(args) == 2 and args[1] is Ellipsis else tuple(map(example, args))
    if origin is dict:
        return {example(args[0]): example(args[1])}
    if hint.__name__ in messages._registry:
        return filled(hint)
    return {int: 7, float: 0.5, str: "text", bytes: b"\x00\xff", bool: True}[hint]


def filled(cls: Any) -> Any:
    return cls(**{name: example(hint) for name, hint in typing.get_type_hints(cls).items()})


@pytest.mark.parametrize(("name", "cls"), REGISTERED)
def test_round_trip(name: str, cls: Any) -> None:
    value = filled(cls)
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xc1", "not a message"),
        (msgpack.packb(7), "expected"),
        (msgpack.packb(["Nothing", {}]), "unknown message 'Nothing'"),
        (msgpack.packb(["Accepted", {"request_id": "r"}]), "restored_tokens"),
        (msgpack.packb(["Accepted", {"request_id": "r", "restored_tokens": {}, "x": 1}]), "has no field x"),
        (msgpack.packb(["Accepted", {"request_id": 1, "restored_tokens": {}}]), "Accepted.request_id: expected"),
        (msgpack.packb(["Accepted", {"request_id": "r", "restored_tokens": {"host": "3"}}]), "restored_tokens"),
        (msgpack.packb(["SamplingParams", {"max_tokens": True}]), "max_tokens"),
    ],
)
def test_what_is_not_exactly_a_message_is_refused(raw: bytes, expected: str) -> None:
    with pytest.raises(IncompatiblePeer, match=expected):
        decode(raw)


def test_messages_are_frozen_and_equal_by_value() -> None:
    assert SamplingParams(max_tokens=3) == SamplingParams(max_tokens=3)
    with pytest.raises(AttributeError):
        SamplingParams(max_tokens=3).max_tokens = 4  # type: ignore[misc]
    assert Accepted.__name__ in dict(REGISTERED)
    assert Hello.__name__ in dict(REGISTERED)


def test_plain_objects_cannot_cross() -> None:
    with pytest.raises(TypeError, match="is not a message"):
        encode(object())


def test_errors_cross_by_kind() -> None:
    again = from_wire("RankLost", "rank 3")
    assert isinstance(again, RankLost)
    assert (again.http_status, str(again)) == (503, "rank 3")
    unknown = from_wire("FromTheFuture", "x")
    assert type(unknown) is HeadraceError
