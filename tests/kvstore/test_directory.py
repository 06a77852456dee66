"""One suite for every Directory, against real node daemons: the index equals the truth within seconds, whatever happens
to connections and daemons. And the pure index against a plain model."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import DirectoryConfig
from headrace.errors import ConfigError, DaemonUnavailable
from headrace.kvstore.base import Placement
from headrace.kvstore.daemon.events import HOST_PLACE, EventLog
from headrace.kvstore.directory import make_directory
from headrace.kvstore.directory.index import PlaceIndex
from headrace.kvstore.directory.stream import NodeStream
from headrace.kvstore.testing import FINGERPRINT, DaemonFixture, blocks_of, put
from headrace.kvstore.testing_redis import RedisFixture

EVENT_NAMES = [bytes([i]) * 32 for i in range(8)]


@pytest.fixture(params=["in-process", "redis"])
def url(request, tmp_path):
    if request.param == "in-process":
        yield ""
        return
    server = RedisFixture(tmp_path)
    yield server.url
    server.stop()


@pytest.fixture
def daemon(tmp_path, url):
    made = DaemonFixture(tmp_path, slots=32, redis_url=url)
    yield made
    made.close()


def directory(config, *daemons):
    nodes = {f"node-{i}": f"unix:{daemon.socket}" for i, daemon in enumerate(daemons)}
    return make_directory(config, nodes, FINGERPRINT)


@pytest.fixture
def config(url):
    return DirectoryConfig(url=url, poll_s=0.01)


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def run(scenario, *directories):
    """Run an async scenario with the directories started."""

    async def whole():
        for made in directories:
            await made.start()
        try:
            await scenario()
        finally:
            for made in directories:
                await made.close()

    asyncio.run(whole())


async def break_connections(made):
    if hasattr(made, "_redis"):
        await made._redis.connection_pool.disconnect()
        return
    for stream in made._streams.values():
        stream._writer.transport.abort()


def test_follows_host_and_device_tiers(daemon, names, config):
    made = directory(config, daemon)
    client, other = daemon.client("decode-0.0"), daemon.client("prefill-0", "prefill")

    async def scenario():
        put(client, names, 0, 4)
        client.announce(names[:6], [])
        other.announce(names[:2], [])
        want = Placement({"node-0": 4}, {"decode-0.0": 6, "prefill-0": 2})
        await until(lambda: made.lookup(names[:10]) == want)
        client.drop([names[2]])
        client.announce([], [names[0]])
        await until(lambda: made.lookup(names[:10]) == Placement({"node-0": 2}, {"prefill-0": 2}))
        other.close()
        await until(lambda: made.lookup(names[:10]) == Placement({"node-0": 2}, {}))

    run(scenario, made)


def test_private_blocks_and_unfinished_writes_are_never_listed(daemon, names, config):
    from headrace.kvstore.names import private_name

    made, client = directory(config, daemon), daemon.client()
    private = private_name()

    async def scenario():
        (slot,) = client.begin_put([(private, None, 0)])
        client.commit_put([(private, slot, b"d" * 16)], keep_lease=True)
        client.begin_put(blocks_of(names, 3, 5))
        put(client, names, 0, 1)
        await until(lambda: made.lookup(names[:1]).host_blocks == {"node-0": 1})
        assert made.lookup([private]) == made.lookup(names[3:5]) == Placement({}, {})

    run(scenario, made)


def test_flush_is_seen(daemon, names, config):
    made, client = directory(config, daemon), daemon.client()
    node = NodeStream(f"unix:{daemon.socket}", FINGERPRINT, role="tool")

    async def scenario():
        put(client, names, 0, 4)
        client.lease(names[:1])
        await until(lambda: made.lookup(names).host_blocks == {"node-0": 4})
        assert await node.flush(5.0) == 3
        await until(lambda: made.lookup(names).host_blocks == {"node-0": 1})
        assert (await node.status(5.0)).values["host_ready"] == 1
        await node.close()

    run(scenario, made)


def test_a_restarted_daemon_is_taken_from_scratch(daemon, names, config):
    made, client = directory(config, daemon), daemon.client()

    async def scenario():
        put(client, names, 0, 4)
        client.announce(names[:2], [])
        await until(lambda: made.lookup(names) == Placement({"node-0": 4}, {"decode-0.0": 2}))
        daemon.kill()
        await until(lambda: made.lookup(names) == Placement({}, {}))
        await asyncio.to_thread(daemon.start)
        with pytest.raises(DaemonUnavailable):
            client.match([])
        client.reconnect()
        put(client, names, 0, 1)
        await until(lambda: made.lookup(names) == Placement({"node-0": 1}, {"decode-0.0": 2}))

    run(scenario, made)


def test_a_broken_connection_is_dialled_again(daemon, names, config):
    made, client = directory(config, daemon), daemon.client()

    async def scenario():
        put(client, names, 0, 1)
        await until(lambda: made.lookup(names).host_blocks == {"node-0": 1})
        await break_connections(made)
        put(client, names, 1, 3)
        await until(lambda: made.lookup(names).host_blocks == {"node-0": 3})

    run(scenario, made)


def test_two_nodes_and_one_that_is_not_there(daemon, names, config, tmp_path):
    (tmp_path / "b").mkdir()
    second = DaemonFixture(tmp_path / "b", name="node-1", redis_url=config.url)
    (tmp_path / "c").mkdir()
    absent = type("Absent", (), {"socket": tmp_path / "c" / "node.sock"})
    made = directory(config, daemon, second, absent)
    first_client, second_client = daemon.client(), second.client("decode-0.1")

    async def scenario():
        put(first_client, names, 0, 3)
        put(second_client, names, 0, 5)
        await until(lambda: made.lookup(names).host_blocks == {"node-0": 3, "node-1": 5})
        assert made.stats()["nodes_followed"] == 2

    try:
        run(scenario, made)
    finally:
        second.close()


def test_a_node_with_other_weights_is_not_listened_to(daemon, names, config):
    fitting = directory(config, daemon)
    made = make_directory(config, {"node-0": f"unix:{daemon.socket}"}, b"\x07" * 32)
    client = daemon.client()

    async def scenario():
        put(client, names, 0, 1)
        await until(lambda: fitting.lookup(names).host_blocks)
        await asyncio.sleep(0.1)
        assert made.lookup(names) == Placement({}, {})
        assert made.stats()["nodes_followed"] == 0

    run(scenario, made, fitting)


def test_unknown_urls_are_refused():
    with pytest.raises(ConfigError, match=r"directory\.url"):
        make_directory(DirectoryConfig(url="etcd://x"), {})


# --- the event log and the index, pure ------------------------------------------------------------------------------


def test_the_log_answers_with_news_or_with_a_snapshot():
    log = EventLog("run1", max_names=4)
    log.change(HOST_PLACE, EVENT_NAMES[:2], [])
    log.change("decode-0.0", EVENT_NAMES[:1], [])
    assert not log.change(HOST_PLACE, EVENT_NAMES[:1], [EVENT_NAMES[7]])
    assert [c.place for c in log.since("run1", 1).changes] == ["decode-0.0"]
    assert log.since("run1", 2).changes == ()
    for known in (("run0", 2), ("run1", 3), ("", 0)):
        assert log.since(*known).snapshot
    log.change(HOST_PLACE, EVENT_NAMES[2:6], [])
    assert log.since("run1", 1).snapshot, "the log forgot event 2"
    assert not log.since("run1", 2).snapshot


actions = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "end", "pull", "restart"]),
        st.sampled_from([HOST_PLACE, "decode-0.0", "decode-0.1"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(actions)
@settings(max_examples=200, deadline=None)
def test_an_index_that_pulls_now_and_then_equals_the_truth(script):
    log, index, seen, truth, run_id = EventLog("run0", max_names=6), PlaceIndex(), ("", 0), {}, 0
    for action, place, i in [*script, ("pull", "", 0)]:
        if action == "add":
            log.change(place, EVENT_NAMES[: i + 1], [])
            truth.setdefault(place, set()).update(EVENT_NAMES[: i + 1])
        elif action == "remove":
            log.change(place, [], [EVENT_NAMES[i]])
            truth.setdefault(place, set()).discard(EVENT_NAMES[i])
        elif action == "end" and place != HOST_PLACE:
            log.end(place)
            truth.pop(place, None)
        elif action == "restart":
            run_id += 1
            log, truth = EventLog(f"run{run_id}", max_names=6), {}
        elif action == "pull":
            events = log.since(*seen)
            index.apply("node-0", events)
            seen = (events.incarnation, events.last)
            for known in (HOST_PLACE, "decode-0.0", "decode-0.1"):
                assert index.held(("node-0", known)) == truth.get(known, set())
            got = index.lookup(EVENT_NAMES)
            runs = {p: next((n for n, e in enumerate(EVENT_NAMES) if e not in held), 8) for p, held in truth.items()}
            assert got.host_blocks == ({"node-0": runs[HOST_PLACE]} if runs.get(HOST_PLACE) else {})
            assert got.device_blocks == {p: n for p, n in runs.items() if n and p != HOST_PLACE}


def test_lookups_are_fast():
    import time

    index, size = PlaceIndex(), 2048
    chain = [i.to_bytes(32, "little") for i in range(size)]
    for p in range(8):
        index.change(("node-0", f"decode-0.{p}"), chain[: size - 100 * p], [])
    start = time.perf_counter()
    for _ in range(20):
        index.lookup(chain)
    assert (time.perf_counter() - start) / 20 < 0.005
