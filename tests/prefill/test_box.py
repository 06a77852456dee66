"""The box's life in one process: start, serve a prompt over gRPC, status, stop. Its store client is the fake one."""

import asyncio
import types

import pytest
import torch

from headrace.config import load_config
from headrace.messages import PrefillDone
from headrace.model.spec import ModelSpec
from headrace.model.testing import tiny_spec, write_config
from headrace.prefill.fake import MemoryStore
from headrace.prefill.service import SERVICE
from headrace.prefill.testing import make_request, random_prompt
from headrace.rpc import Channel

box = pytest.importorskip("headrace.prefill.box", exc_type=ImportError)


def make_context(directory):
    spec = ModelSpec.from_dir(directory)
    settings = [f"model.path={directory}", "model.load_format=dummy", "prefill.device_blocks=16"]
    return types.SimpleNamespace(
        config=load_config(overrides=settings),
        name="prefill-0.0",
        group="prefill-0",
        rank=0,
        world=1,
        rendezvous="",
        token="secret",
        endpoints={"node-0": "unix:/nowhere"},
        run_dir=str(directory),
        layout=spec.slab_layout("tile656"),
        fingerprint=b"f" * 32,
    )


async def one_prompt(address):
    channel = Channel(address, SERVICE, "secret")
    call = channel.server_stream("Run", make_request(random_prompt(70)))
    answer = await call.read()
    call.cancel()
    await channel.close()
    return answer


def test_a_box_serves_and_stops(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    context = make_context(write_config(tiny_spec(), tmp_path / "model"))
    stores = []

    def fake_client(endpoint, hello, layout, watcher):
        assert (endpoint, hello.name, layout) == ("unix:/nowhere", "prefill-0", context.layout)
        stores.append(MemoryStore(32, context.layout.slot_bytes))
        return stores[0]

    monkeypatch.setattr(box, "NodeClient", fake_client)
    one = box.PrefillRankBox(context)
    assert not one.status()["ready"]
    endpoints = one.start()
    assert set(endpoints) == {"prefill-0"}
    assert one.status()["ready"]
    assert isinstance(asyncio.run(one_prompt(endpoints["prefill-0"])), PrefillDone)
    assert one.status()["values"]["computed_tokens_total"] == 70
    one.stop(2.0)
    assert not one.status()["ready"]
    assert stores[0].idle
