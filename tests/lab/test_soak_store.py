"""The soak of the store, short in the normal suite, as long as the promise in the slow one."""

import pytest

from headrace.lab.soak_store import main, soak


def test_a_short_soak_ends_balanced_and_without_a_wrong_byte(tmp_path):
    report = soak(6.0, seed=3, home=tmp_path)
    assert report["problems"] == []
    assert report["puts"] > 0
    assert report["blocks checked at the end"] > 0
    assert report.get("clients killed", 0) + report.get("daemons killed", 0) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_minutes_of_kills_end_balanced_and_without_a_wrong_byte(tmp_path):
    assert main(["--seconds", "1200", "--directory", str(tmp_path)]) == 0
