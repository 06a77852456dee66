import pytest

from headrace.errors import IncompatiblePeer
from headrace.ids import BlockName, RequestId
from headrace.messages import SamplingParams, decode, encode
from headrace.prefill.plan import (
    ChunkPlan,
    RestorePlan,
    StepAck,
    StepPlan,
    StorePlan,
    TailPlan,
    pack_table,
    unpack_table,
    unpack_tokens,
)

NAME = BlockName(bytes(range(32)))


def test_a_plan_with_everything_in_it_survives_the_wire():
    chunk = ChunkPlan(
        request_id=RequestId("a"),
        table=pack_table([3, 70000, 1]),
        start=127,
        tokens=b"\1\0\0\0\xff\xff\1\0",
        query_only=True,
        carry=False,
        sampling=SamplingParams(max_tokens=4, logit_bias={7: -1.5}, stop_token_ids=(1, 2)),
        output_index=2,
        answered=b"\5\0\0\0",
    )
    plan = StepPlan(
        step=9,
        restores=(RestorePlan(name=NAME, host_slot=1, device_slot=2, digest=b"d" * 16),),
        zero=(4, 5),
        chunks=(chunk,),
        tails=(TailPlan(request_id=RequestId("b"), table=pack_table([1]), position=5, token=77, drafts=4),),
        stores=(StorePlan(name=NAME, device_slot=3, host_slot=8, rank=1),),
        forget=(RequestId("c"),),
    )
    assert decode(encode(plan)) == plan
    assert unpack_table(chunk.table).tolist() == [3, 70000, 1]
    assert unpack_tokens(chunk.tokens).tolist() == [1, 131071]


def test_an_ack_survives_the_wire():
    ack = StepAck(step=3, rank=1, digests={NAME: b"x" * 16}, bad=(NAME,))
    assert decode(encode(ack)) == ack


def test_a_plan_of_another_build_is_refused():
    with pytest.raises(IncompatiblePeer, match="no field"):
        decode(encode(StepPlan(step=1)).replace(b"forget", b"forgot"))
