"""What crosses between a supervisor and its boxes: length-framed msgpack over a socket, and contexts as plain values.

Knows nothing of processes or Ray; both shells use it.
"""

import dataclasses
import socket
import struct
import typing
from typing import Any

import msgpack

from headrace.config import from_dict, to_dict
from headrace.deploy.base import BoxContext
from headrace.errors import EngineError

MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def send_frame(sock: socket.socket, value: Any) -> None:
    """Raises OSError when the peer is gone."""
    body = pack(value)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket) -> Any:
    """The next frame, or None at the end of the stream (also when it breaks inside a frame)."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"control frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    body = _receive_exactly(sock, length)
    return None if body is None else unpack(body)


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def context_to_plain(context: BoxContext) -> dict[str, Any]:
    """The context as dicts, lists, scalars and bytes."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(context):
        value = getattr(context, field.name)
        if field.name == "config":
            value = to_dict(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        plain[field.name] = value
    return plain


def context_from_plain(plain: dict[str, Any]) -> BoxContext:
    """The inverse of `context_to_plain`."""
    hints = typing.get_type_hints(BoxContext)
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if name == "config":
            values[name] = from_dict(value)
        elif isinstance(value, dict) and (cls := _dataclass_of(hints[name])) is not None:
            values[name] = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        else:
            values[name] = value
    return BoxContext(**values)


def _dataclass_of(hint: Any) -> type[Any] | None:
    """The dataclass in `X` or `X | None`."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None
