"""Two node daemons in two processes: one computes, the other serves its blocks, whoever dies."""

import socket
import time

import pytest

from headrace.ids import Tier
from headrace.kvstore.checksum import digest
from headrace.kvstore.testing import LAYOUT, DaemonFixture, content, put


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture
def nodes(tmp_path):
    ports = {name: free_port() for name in ("node-a", "node-b")}
    made = []
    for name, port in ports.items():
        home = tmp_path / name
        home.mkdir()
        peers = ",".join(f"{other}=127.0.0.1:{at}" for other, at in ports.items())
        lines = [f"store.peer_listen=127.0.0.1:{port}", f"store.peers=[{peers}]", "store.peer_token=secret"]
        made.append(DaemonFixture(home, slots=64, name=name, settings=[*lines, "store.peer_timeout_s=1.0"]))
    yield made
    for node in made:
        node.close()


def bring(client, names, wanted, timeout_s=15.0):
    """Promote until `wanted` leading blocks are readable."""
    end = time.monotonic() + timeout_s
    while (ready := client.promote(names).ready) < wanted:
        assert time.monotonic() < end, f"{ready} of {wanted}"
        time.sleep(0.01)


def check(client, names):
    leases = client.lease(names)
    for depth, lease in enumerate(leases):
        view = client.slot_view(lease.slot)[: LAYOUT.payload_bytes]
        assert view == content(depth)
        assert digest(view) == lease.digest
    client.release(names)
    return {lease.tier for lease in leases}


def test_blocks_of_one_node_are_served_by_the_other(nodes, names):
    first, second = (node.client("prefill-0", "prefill") for node in nodes)
    put(first, names, 0, 50)
    bring(second, names[:60], 50)
    assert check(second, names[:50]) == {Tier.PEER}
    assert check(second, names[:50]) == {Tier.HOST}
    put(second, names[100:], 0, 5)
    bring(first, names[100:105], 5)
    assert check(first, names[100:105]) == {Tier.PEER}
    nodes[0].settle(lambda: first.stats()["host_leased"] == first.stats()["peer_out_tickets"] == 0)
    assert second.stats()["peer_blocks_total{peer=node-a}"] == 50
    assert first.stats()["peer_out_bytes_total"] == 50 * LAYOUT.payload_bytes


def test_an_owner_that_is_killed_while_it_sends_costs_nothing_but_the_hit(nodes, names):
    first, second = (node.client("prefill-0", "prefill") for node in nodes)
    for round_ in range(3):
        part = names[round_ * 50 : round_ * 50 + 40]
        put(first, part)
        nodes[1].settle(lambda: second.stats()["peer_known_blocks{peer=node-a}"] >= 40, 10.0)
        assert second.promote(part).coming
        nodes[0].kill()
        end = time.monotonic() + 10
        while second.promote(part).coming:
            assert time.monotonic() < end, "a dead node is waited for"
            time.sleep(0.01)
        ready = second.promote(part).ready
        check(second, part[:ready])
        nodes[1].settle(lambda: second.stats()["host_writing"] == second.stats()["host_quarantined"] == 0)
        nodes[0].start()
        first.reconnect()
        second.drop(part)
    put(first, names[200:], 0, 10)
    bring(second, names[200:210], 10)
    check(second, names[200:210])
    stats = second.stats()
    assert stats["peer_checksum_failures_total{peer=node-a}"] == 0
    assert stats["host_free"] + stats["host_ready"] == 64


def test_a_reader_that_is_killed_leaves_no_lease_at_the_owner(nodes, names):
    first, second = (node.client("prefill-0", "prefill") for node in nodes)
    put(first, names, 0, 60)
    nodes[1].settle(lambda: second.stats()["peer_known_blocks{peer=node-a}"] >= 60, 10.0)
    second.promote(names[:60])
    nodes[1].kill()
    nodes[0].settle(lambda: first.stats()["peer_out_tickets"] == first.stats()["host_leased"] == 0, 10.0)
    nodes[1].start()
