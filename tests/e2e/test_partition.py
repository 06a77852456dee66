"""The directory's Redis goes away for ten seconds in the middle of traffic: no request fails."""

import threading
import time

import httpx
import pytest

from headrace.kvstore.testing_link import Link
from headrace.kvstore.testing_redis import RedisFixture


@pytest.mark.slow
def test_no_request_fails_while_redis_cannot_be_reached(tmp_path, service_class) -> None:
    redis = RedisFixture(tmp_path)
    link = Link(redis.socket)
    service = service_class("deploy.launcher=process", f"directory.url=redis://127.0.0.1:{link.port}/0")
    answers: list[int] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=service.url, timeout=60.0, trust_env=False) as client:
            for turn in range(10_000):
                if ended.is_set():
                    return
                prompt = "def f(x):\n" * 40 + f"# {turn % 7}\n"
                body = {"model": "nano", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                answers.append(client.post("/v1/completions", json=body).status_code)

    asking = threading.Thread(target=ask)
    try:
        asking.start()
        time.sleep(3.0)
        before = len(answers)
        link.cut()
        time.sleep(10.0)
        during = len(answers)
        link.heal()
        time.sleep(5.0)
        ended.set()
        asking.join(90.0)
        assert during > before > 0
        assert len(answers) > during
        assert set(answers) == {200}
    finally:
        ended.set()
        asking.join(90.0)
        service.stop()
        link.close()
        redis.stop()
