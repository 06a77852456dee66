"""Processes that end without a word: clients get the tokens of an undisturbed run, and nothing stays held."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

BOXES = {"prefill-0.0", "prefill-0.1", "decode-0.0", "decode-0.1", "node-0", "router"}


def pids(service) -> dict[str, int]:
    """Process of each box: the one whose output is the box's log."""
    found = {}
    for child in psutil.Process(service.process.pid).children(recursive=True):
        try:
            found[Path(os.readlink(f"/proc/{child.pid}/fd/1")).stem] = child.pid
        except OSError:
            continue
    return {name: pid for name, pid in found.items() if name in BOXES}


def kill(service, box: str) -> None:
    os.kill(pids(service)[box], signal.SIGKILL)


def wait_all_back(service, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            info = httpx.get(f"{service.url}/get_server_info", timeout=5.0, trust_env=False).json()
            if not info["down"] and set(pids(service)) == BOXES and all(b["ready"] for b in info["boxes"].values()):
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "not every box came back"
        time.sleep(0.1)


def stream_and_kill(service, prompt: list[int], box: str, max_tokens: int, **fields) -> list[int]:
    """The token ids of a stream during which `box` is killed, once a few tokens are out."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, **fields}
    ids: list[int] = []
    killed = False
    with (
        httpx.Client(base_url=service.url, timeout=120.0, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            ids += [token for choice in event["choices"] for token in choice["token_ids"]]
            if ids and not killed:
                killed = True
                kill(service, box)
    return ids


@pytest.fixture(scope="module")
def victim(serve):
    with serve("deploy.launcher=process") as made:
        yield made


def test_a_node_daemon_that_dies_makes_nothing_wrong(victim, complete, code_tokens) -> None:
    """Every rank must find the new daemon's memory, the prefill followers too: they make no call of their own."""
    prompts = [code_tokens[i * 40 : i * 40 + 330] for i in range(4)]
    expected = [complete(victim.url, prompt)[0] for prompt in prompts]
    kill(victim, "node-0")
    again = [complete(victim.url, prompt)[0] for prompt in prompts]
    assert again == expected
    wait_all_back(victim)
    fresh = [complete(victim.url, prompt)[0] for prompt in prompts]
    assert fresh == expected


@pytest.mark.parametrize("box", ["node-0", "decode-0.0", "decode-0.1"])
def test_a_stream_goes_on_when_a_box_behind_it_dies(victim, complete, code_tokens, box) -> None:
    expected, _ = complete(victim.url, code_tokens[:300], max_tokens=80)
    assert stream_and_kill(victim, code_tokens[:300], box, 80) == expected
    wait_all_back(victim)
    assert complete(victim.url, code_tokens[:300], max_tokens=80)[0] == expected


def test_an_answer_with_a_form_and_penalties_goes_on_in_its_form(victim, complete, code_tokens) -> None:
    fields = {"guided_regex": "([a-f]{4}-){16}[a-f]{4}", "frequency_penalty": 0.5, "temperature": 1, "seed": 11}
    expected, _ = complete(victim.url, code_tokens[:300], max_tokens=200, **fields)
    assert stream_and_kill(victim, code_tokens[:300], "decode-0.0", 200, **fields) == expected
    wait_all_back(victim)


def test_a_router_that_dies_under_load_fails_only_what_was_in_its_sockets(victim, complete, code_tokens) -> None:
    prompt = code_tokens[:320]
    expected, usage = complete(victim.url, prompt)
    _, usage = complete(victim.url, prompt)
    hits = usage["prompt_tokens_details"]["cached_tokens"]
    assert hits >= 256
    over, broken, statuses = threading.Event(), [], []

    def client() -> None:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        while not over.is_set():
            try:
                answer = httpx.post(f"{victim.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
                statuses.append(answer.status_code)
            except httpx.TransportError as error:
                broken.append(error)
                time.sleep(0.05)

    clients = [threading.Thread(target=client) for _ in range(3)]
    for one in clients:
        one.start()
    time.sleep(1.0)
    kill(victim, "router")
    wait_all_back(victim)
    back = time.monotonic()
    while True:
        answer, usage = complete(victim.url, prompt)
        assert answer == expected
        if usage["prompt_tokens_details"]["cached_tokens"] == hits:
            break
        assert time.monotonic() - back < 5.0, "the new router does not know what the old one knew"
    over.set()
    for one in clients:
        one.join(90)
    assert broken
    assert set(statuses) == {200}


@pytest.mark.parametrize("box", ["prefill-0.0", "prefill-0.1", "router"])
def test_a_box_that_dies_idle_comes_back(victim, complete, code_tokens, box) -> None:
    expected, _ = complete(victim.url, code_tokens[:300])
    before = pids(victim)[box]
    kill(victim, box)
    deadline = time.monotonic() + 10.0
    while pids(victim).get(box, before) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    wait_all_back(victim)
    assert complete(victim.url, code_tokens[:300])[0] == expected
