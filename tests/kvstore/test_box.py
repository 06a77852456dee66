"""The node daemon as a box, in this process: endpoints, status, an orderly end, a failed start that leaves nothing."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.config import Config, StoreConfig
from headrace.errors import ConfigError
from headrace.ids import new_incarnation
from headrace.kvstore.client import NodeClient
from headrace.kvstore.daemon.box import NodeDaemonBox
from headrace.kvstore.testing import FINGERPRINT, LAYOUT, put
from headrace.messages import Hello


def context(run_dir, **changes):
    values = {
        "config": dataclasses.replace(Config(), store=StoreConfig(host_bytes=1 << 20)),
        "name": "node-0",
        "run_dir": str(run_dir),
        "layout": LAYOUT,
        "fingerprint": FINGERPRINT,
        "token": "a-token",
    }
    return SimpleNamespace(**{**values, **changes})


def shared_files(run_dir):
    """What deploy looks for after a run."""
    return list(Path("/dev/shm").glob(f"{run_dir.name}-*"))


def test_life_of_a_box(tmp_path, names):
    box = NodeDaemonBox(context(tmp_path))
    assert box.status()["ready"] is False
    endpoints = box.start()
    assert endpoints == {"node-0": f"unix:{tmp_path}/node-0.sock"}
    assert len(shared_files(tmp_path)) == 1
    hello = Hello(name="decode-0.0", role="decode", incarnation=new_incarnation(), fingerprint=FINGERPRINT)
    client = NodeClient(endpoints["node-0"], hello, LAYOUT)
    put(client, names, 0, 2)
    status = box.status()
    assert status["ready"] is True
    assert status["incarnation"]
    assert status["values"]["host_ready"] == 2
    box.stop(1.0)
    client.close()
    assert shared_files(tmp_path) == list(tmp_path.iterdir()) == []
    assert box.status()["ready"] is False


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layout": None}, "no slab layout"),
        ({"fingerprint": b""}, "32-byte fingerprint"),
        ({"config": dataclasses.replace(Config(), store=StoreConfig(host_bytes=1 << 50))}, "host_bytes"),
        ({"config": dataclasses.replace(Config(), store=StoreConfig(host_policy="nope"))}, "known: arc, density, gdsf"),
        ({"name": "n" * 120}, "longer than 100 bytes"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(tmp_path, changes, match):
    with pytest.raises(ConfigError, match=match):
        NodeDaemonBox(context(tmp_path, **changes)).start()
    assert shared_files(tmp_path) == list(tmp_path.iterdir()) == []
