import socket
import threading

import pytest

from headrace.errors import RankLost
from headrace.prefill.link import LeaderLink, connect
from headrace.prefill.plan import StepAck, StepPlan, StoppedPlan


def formed(followers=2):
    link = LeaderLink()
    streams = [connect(link.port, rank, link.nonce) for rank in range(1, followers + 1)]
    link.accept(followers, 5.0)
    return link, streams


def test_plans_go_down_and_acknowledgements_come_up():
    link, streams = formed()
    link.send(StepPlan(step=1, zero=(1, 2)))
    for rank, stream in enumerate(streams, 1):
        assert stream.receive() == StepPlan(step=1, zero=(1, 2))
        stream.send(StepAck(step=1, rank=rank, digests={}))
    assert sorted(ack.rank for ack in link.collect(1, 5.0)) == [1, 2]
    closing = threading.Thread(target=link.close, args=("done",))
    closing.start()
    for stream in streams:
        assert stream.receive() == StoppedPlan(reason="done")
        stream.close()
    closing.join(5.0)
    assert not closing.is_alive()


def test_strangers_are_turned_away():
    link = LeaderLink()
    strangers = [connect(link.port, 1, b"x" * 16), connect(link.port, 7, link.nonce)]
    silent = socket.create_connection(("127.0.0.1", link.port))
    silent.sendall(b"\xff" * 8)
    right = connect(link.port, 1, link.nonce)
    link.accept(1, 5.0)
    assert all(stream.receive() is None for stream in strangers)
    link.send(StepPlan(step=1))
    assert right.receive() == StepPlan(step=1)
    right.close()
    link.close("")
    silent.close()


def test_a_missing_follower_is_an_error_with_numbers():
    link = LeaderLink()
    with pytest.raises(RankLost, match="0 of 1 followers"):
        link.accept(1, 0.1)
    link.close("")


def test_a_stream_that_ends_is_a_lost_rank():
    link, streams = formed()
    streams[1].close()
    with pytest.raises(RankLost, match="rank 2 is lost: its stream ended"):
        link.collect(1, 5.0)
    assert link.lost is not None
    streams[0].close()
    link.close("")


def test_an_acknowledgement_of_another_step_is_a_lost_rank():
    link, streams = formed(1)
    streams[0].send(StepAck(step=3, rank=1, digests={}))
    with pytest.raises(RankLost, match="step 3, the group is at step 4"):
        link.collect(4, 5.0)
    with pytest.raises(RankLost, match=r"ranks \[1\] did not acknowledge step 5 within 0.1 s"):
        link.collect(5, 0.1)
    streams[0].close()
    link.close("")
