import socket
import struct

import pytest

from headrace.config import load_config
from headrace.deploy.base import BoxContext
from headrace.deploy.wire import (
    MAX_FRAME_BYTES,
    context_from_plain,
    context_to_plain,
    pack,
    receive_frame,
    send_frame,
    unpack,
)
from headrace.errors import EngineError
from headrace.kvstore.layout import SlabLayout


def test_context_survives_msgpack() -> None:
    context = BoxContext(
        config=load_config(None, ["router.api_keys=[a, b=t]", "decode.dp=3"]),
        name="decode-0.1",
        run_dir="/run",
        group="decode-0",
        rank=1,
        world=3,
        generation="g",
        rendezvous="file:///run/r",
        layout=SlabLayout(6, (0, 2), True, "tile656"),
        fingerprint=b"\x00\xff" * 16,
        token="secret",
        endpoints={"node-0": "unix:/run/node"},
    )
    assert context_from_plain(unpack(pack(context_to_plain(context)))) == context


def test_context_without_layout_survives_msgpack() -> None:
    context = BoxContext(config=load_config(), name="router", run_dir="/run")
    assert context_from_plain(unpack(pack(context_to_plain(context)))) == context


def test_frames_arrive_whole_and_in_order() -> None:
    left, right = socket.socketpair()
    with left, right:
        send_frame(left, {"a": 1})
        send_frame(left, [b"\x00" * 100_000])
        assert receive_frame(right) == {"a": 1}
        assert receive_frame(right) == [b"\x00" * 100_000]


def test_a_stream_that_ends_inside_a_frame_is_the_end() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(struct.pack("<I", 100) + b"short")
        left.close()
        assert receive_frame(right) is None


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        with pytest.raises(EngineError, match=str(MAX_FRAME_BYTES)):
            receive_frame(right)
