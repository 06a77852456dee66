"""Metrics, health and tokenising endpoints."""

import httpx

from headrace.router.testing import running_stack


async def test_metrics_count_what_happened() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        body = {"model": "nano", "prompt": list(range(5, 205)), "max_tokens": 12, "ignore_eos": True}
        for _ in range(2):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values["headrace_prompt_tokens_total"]) == 400
        assert float(values['headrace_cached_tokens_total{tier="host"}']) == 192
        assert float(values["headrace_generation_tokens_total"]) == 24
        assert float(values['headrace_requests_total{outcome="ok"}']) == 2
        assert float(values["headrace_time_to_first_token_seconds_count"]) == 2
        assert float(values["headrace_inter_token_latency_seconds_count"]) == 22
        assert float(values['headrace_box_up{box="prefill-0"}']) == 1
        assert float(values['headrace_box_device_blocks{box="decode-0.1"}']) == 1024
        assert 'headrace_box_cached_tokens_total{box="prefill-0",tier="host"}' in values
        assert "# TYPE headrace_box_cached_tokens_total counter" in text
        await stack.decode[0].stop()
        text = (await client.get("/metrics")).text
        assert 'headrace_box_up{box="decode-0.0"} 0.0' in text


async def test_health_generates_a_token() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health_generate")).status_code == 200
        assert stack.prefill[0].seen[-1].sampling.max_tokens == 1
        await stack.idle()


async def test_tokenize_and_back() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        made = (await client.post("/tokenize", json={"prompt": "def f(): 日本"})).json()
        assert made["count"] == len(made["tokens"])
        back = (await client.post("/detokenize", json={"tokens": made["tokens"]})).json()
        assert back["prompt"] == "def f(): 日本"
        chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.json()["count"] > 4
        assert (await client.post("/tokenize", json={})).status_code == 400


async def test_small_answers_do_not_wait_for_acknowledgements() -> None:
    async with running_stack() as stack, httpx.AsyncClient(base_url=stack.url) as client:
        seconds = []
        for _ in range(15):
            response = await client.post("/tokenize", json={"prompt": "x"})
            seconds.append(response.elapsed.total_seconds())
        assert sorted(seconds)[7] < 0.03  # 0.04 with Nagle's algorithm on
