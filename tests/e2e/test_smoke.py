"""One real completion through the whole house, under each launcher."""

import httpx


def test_a_completion_comes_back(service) -> None:
    with httpx.Client(base_url=service.url, timeout=120.0, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] in range(1, 9)
        assert answer.json()["choices"][0]["text"]
