"""Blocks of another node: found, fetched and checked; every failure means recompute, never wrong bytes and never a slot
or a lease that stays behind."""

import asyncio
import socket
import threading

import pytest

from headrace.errors import ConfigError
from headrace.ids import Tier
from headrace.kvstore.daemon.neighbours import make_peers
from headrace.kvstore.faults import Fault
from headrace.kvstore.peer.control import MAX_TICKET_BLOCKS
from headrace.kvstore.peer.stream import WINDOW, SocketPipe, read_opening, receive_slabs, send_slabs
from headrace.kvstore.peer.tickets import UNUSED_S, Tickets
from headrace.kvstore.testing_lower import LowerSettings, payload_of
from headrace.kvstore.testing_peer import PeerPair

ROOMY = LowerSettings(host_slots=100, disk_slots=100, write_policy="back")


async def opened(tmp_path, **settings):
    pair = PeerPair(tmp_path, **{"owner": ROOMY, "reader": ROOMY, **settings})
    await pair.open()
    return pair


async def idle_owner(pair):
    """Nothing of the owner's is held for a reader any more."""
    await pair.reader.settle(lambda: len(pair.service.tickets) == 0 and pair.owner.host.stats()["leased"] == 0)


async def test_a_node_fetches_what_another_one_has(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 80)
    await pair.known(80)
    assert pair.reader.lower.promote(names[:90], urgent=True) == (0, 80)
    assert await pair.reader.bring(names[:90]) == 80
    came = pair.reader.lower.leased(names[:80])
    assert set(came.values()) == {Tier.PEER}
    assert [pair.reader.read(name) for name in names[:80]] == [payload_of(name) for name in names[:80]]
    assert pair.reader.host.find(names[3:4])[0].meta.parent == names[2]
    assert pair.service.streams == -(-80 // MAX_TICKET_BLOCKS)
    await idle_owner(pair)
    await pair.close()


async def test_own_blocks_and_own_disk_go_before_another_node(tmp_path, names):
    pair = await opened(tmp_path, reader=LowerSettings(host_slots=100, disk_slots=100))
    pair.owner.put(names, 0, 6)
    pair.reader.put(names, 0, 4)
    await pair.reader.settle()
    pair.reader.evict_host()
    pair.reader.put(names, 0, 2)
    await pair.known(6)
    assert await pair.reader.bring(names[:6]) == 6
    assert pair.reader.lower.values()["promoted_total{from=disk}"] == 2
    assert pair.reader.lower.values()["promoted_total{from=peer}"] == 2
    await pair.close()


async def test_blocks_on_the_owners_disk_come_too(tmp_path, names):
    pair = await opened(tmp_path, owner=LowerSettings(host_slots=8, disk_slots=50))
    pair.owner.put(names, 0, 6)
    await pair.owner.settle()
    pair.owner.evict_host()
    await pair.known(6)
    assert pair.owner.host.names() == []
    assert await pair.reader.bring(names[:6]) == 6
    assert pair.reader.read(names[5]) == payload_of(names[5])
    await idle_owner(pair)
    await pair.close()


async def test_a_block_the_owner_has_lost_meanwhile_is_given_up_at_once(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 4)
    await pair.known(4)
    pair.owner.host.drop(names[2:4])
    assert await pair.reader.bring(names[:4]) == 2
    assert pair.peer.totals.failures == 0
    await pair.close()


async def test_the_owner_cannot_evict_what_it_is_sending(tmp_path, names):
    pair = await opened(tmp_path, owner=LowerSettings(host_slots=4, write_policy="back"))
    pair.owner.put(names, 0, 4)
    await pair.known(4)
    pair.plan.add("peer.send", Fault.SLOW, seconds=0.7, times=1)
    assert pair.reader.lower.promote(names[:4], urgent=True).coming == 4
    await pair.reader.settle_until(lambda: len(pair.service.tickets) == 1)
    assert pair.owner.put(names, 50, 54) == []
    assert await pair.reader.bring(names[:4]) == 4
    assert [pair.reader.read(name) for name in names[:4]] == [payload_of(name) for name in names[:4]]
    await idle_owner(pair)
    assert len(pair.owner.put(names, 50, 54)) == 4
    await pair.close()


@pytest.mark.parametrize("leg", ["peer.send", "peer.receive"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.TORN, Fault.CORRUPT])
async def test_a_fetch_that_fails_serves_nothing_wrong_and_leaves_nothing_behind(tmp_path, names, leg, fault):
    """Rule 5 for peers: without the check of the digest torn and corrupt slabs would be served."""
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 4)
    await pair.known(4)
    pair.plan.add(leg, fault, times=1)
    assert await pair.reader.bring(names[:4]) < 4
    await pair.reader.settle(lambda: pair.peer.idle)
    for name in names[:4]:
        assert pair.reader.read(name) in (None, payload_of(name))
    assert pair.peer.totals.checksum_failures == (fault in (Fault.TORN, Fault.CORRUPT))
    assert pair.reader.host.stats()["writing"] == pair.reader.host.stats()["quarantined"] == 0
    # The owner was asked to look at its own copy, which is fine.
    assert pair.service.wrong == 0
    await idle_owner(pair)
    await asyncio.sleep(1.05)
    pair.tick()
    assert await pair.reader.bring(names[:4]) == 4
    await pair.close()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.LATE])
async def test_an_owner_that_stops_sending_costs_the_reader_its_deadline_only(tmp_path, names, fault):
    pair = await opened(tmp_path, timeout_s=0.8)
    pair.owner.put(names, 0, 4)
    await pair.known(4)
    pair.plan.add("peer.send", fault, seconds=2.0, times=1)
    assert await pair.reader.bring(names[:4]) == 0
    await pair.reader.settle(lambda: pair.peer.idle)
    assert pair.peer.totals.failures == 1
    assert pair.reader.host.stats()["writing"] == 0
    pair.plan.clear()
    await idle_owner(pair)
    await pair.close()


async def test_a_block_that_is_wrong_at_its_owner_is_dropped_there(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 2)
    await pair.known(2)
    slot = pair.owner.host.find(names[1:2])[0].slot
    pair.owner.view(slot)[7] ^= 1
    assert await pair.reader.bring(names[:2]) == 1
    await pair.reader.settle(lambda: pair.owner.host.find(names[1:2]) == [None])
    assert pair.service.wrong == 1
    await pair.close()


async def test_a_peer_that_fails_again_and_again_is_left_alone_for_a_while(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 8)
    await pair.known(8)
    pair.plan.add("peer.receive", Fault.ERROR, times=3)
    for i in range(3):
        assert await pair.reader.bring(names[i : i + 1]) == 0
        await pair.reader.settle(lambda: pair.peer.idle)
    assert not pair.peer.health.on
    assert pair.reader.lower.promote(names[4:8], urgent=True).coming == 0
    await pair.reader.settle(lambda: pair.tick() or pair.peer.health.on)
    assert await pair.reader.bring(names[4:8]) == 4
    await pair.close()


async def test_what_a_node_lacks_it_does_not_ask_others_for_on_a_peers_behalf(tmp_path, names):
    """Two nodes that each believe the other has a block must not send each other in circles."""
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 1)
    await pair.known(1)
    assert pair.reader.lower.promote(names[:1], urgent=True, here_only=True) == (0, 0)
    await pair.close()


@pytest.mark.parametrize("wrong", [{"token": "a guess"}, {"fingerprint": bytes(32)}])
async def test_a_node_with_another_secret_or_other_weights_gets_nothing(tmp_path, names, caplog, wrong):
    pair = await opened(tmp_path, **wrong)
    pair.owner.put(names, 0, 2)
    reason = "token" if "token" in wrong else "fingerprint"
    await pair.reader.settle_until(lambda: reason in caplog.text)
    assert pair.peer.leading(names[:2]) == 0
    await pair.close()


async def test_a_data_connection_needs_a_ticket_that_is_good_once(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 2)
    ticket, _ = pair.service.tickets.reserve(names[:2])
    address = ("127.0.0.1", pair.service._listener.getsockname()[1])

    def fetch(used):
        pipe = SocketPipe(socket.create_connection(address, 2.0), 2.0)
        into = memoryview(bytearray(4000))
        try:
            receive_slabs(pipe, used, [1], lambda index: into, lambda index: True)
        finally:
            pipe.close()
        return bytes(into)

    assert await asyncio.to_thread(fetch, ticket) == payload_of(names[1])
    await idle_owner(pair)
    for bad in (ticket, bytes(16)):
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(fetch, bad)
    noise = socket.create_connection(address)
    noise.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[:28].ljust(28))
    assert await asyncio.to_thread(noise.recv, 10) == b""
    noise.close()
    await pair.reader.settle_until(lambda: pair.service.failures == 3)
    await pair.close()


async def test_a_ticket_nobody_uses_is_over_after_a_while(tmp_path, names):
    pair = await opened(tmp_path)
    pair.owner.put(names, 0, 2)
    now = [0.0]
    tickets = Tickets(pair.owner.host, pair.owner.lower.owner, clock=lambda: now[0])
    ticket, run = tickets.reserve(names[:3])
    assert len(run) == 2
    assert pair.owner.host.stats()["leased"] == 2
    now[0] = UNUSED_S + 0.1
    assert tickets.claim(ticket) is None
    tickets.tick()
    assert pair.owner.host.stats()["leased"] == 0
    await pair.close()


def test_nothing_is_sent_without_credit_and_a_reader_may_stop_any_time():
    """Flow control and cancellation: of 50 slabs no more than the window is on the way at any moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    owner, reader = SocketPipe(ours, 5.0), SocketPipe(theirs, 5.0)
    sent, got, ended = [], [], []

    def own():
        _, wanted = read_opening(owner)

        def payload(index):
            assert len(sent) - len(got) < WINDOW
            sent.append(index)
            return memoryview(bytes([index]) * 100)

        try:
            send_slabs(owner, wanted, payload)
        except OSError as error:
            ended.append(error)
        owner.close()

    thread = threading.Thread(target=own)
    thread.start()
    into = memoryview(bytearray(100))

    def arrived(index):
        assert bytes(into) == bytes([index]) * 100
        got.append(index)
        return len(got) < 20

    receive_slabs(reader, bytes(16), range(0, 100, 2), lambda index: into, arrived)
    reader.close()
    thread.join(5.0)
    assert got == list(range(0, 40, 2))
    assert len(sent) < 20 + WINDOW
    assert ended


def test_settings_of_peers_are_checked_and_the_nodes_own_entry_is_passed_over(tmp_path):
    import dataclasses

    from headrace.config import StoreConfig
    from headrace.kvstore.daemon.node import NodeSettings
    from headrace.kvstore.testing import FINGERPRINT, LAYOUT

    def settings(*peers, token="x"):
        store = dataclasses.replace(StoreConfig(), peers=peers, peer_token=token)
        return NodeSettings(
            name="a", socket=tmp_path / "s", layout=LAYOUT, fingerprint=FINGERPRINT, store=store, arena_prefix="a"
        )

    assert [peer.name for peer in make_peers(settings("a=h:1", "b=h:2"))] == ["b"]
    with pytest.raises(ConfigError, match="<node>=<host>:<port>"):
        make_peers(settings("h:1"))
    with pytest.raises(ConfigError, match="shared secret"):
        make_peers(settings("b=h:2", token=""))
