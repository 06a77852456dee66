"""What a sequence reserves on a decode rank. The queue is tested through the placer (test_placement.py)."""

import pytest

from headrace.errors import NeverFits
from headrace.router.admission import Admission, RankRoom, blocks_for


def test_a_reservation_is_the_expected_answer_and_never_more_than_the_longest():
    rooms = {"decode-0.0": RankRoom(blocks=100, sequences_limit=4)}
    hopeful, strict = (Admission(dict(rooms), queue_limit=1, strict=strict) for strict in (False, True))
    for admission in (hopeful, strict):
        assert admission.demand(1000, 4000) == blocks_for(1000, 4000), "nothing known yet"
        for _ in range(40):
            admission.lengths.add(100)
    assert hopeful.demand(1000, 4000) == blocks_for(1000, 100)
    assert hopeful.demand(1000, 20) == blocks_for(1000, 20)
    assert strict.demand(1000, 4000) == blocks_for(1000, 4000)
    with pytest.raises(NeverFits, match="largest decode rank has 100"):
        hopeful.demand(1000, 9000)
