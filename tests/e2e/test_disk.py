"""The disk tier under the whole service: a conversation is hit again after everything was stopped and started."""

import time

import httpx


def complete(client, model, prompt):
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_is_hit_on_disk_after_a_restart_and_answered_alike(service_class, tmp_path) -> None:
    settings = ["deploy.launcher=process", "store.disk_bytes=100000000", f"store.disk_dir={tmp_path}"]
    settings += ["store.disk_admit_uses=1", "store.promote_wait_s=60", "store.disk_timeout_s=30"]
    prompt = "\n".join(f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(60))
    seen = []
    for run in range(2):
        service = service_class(*settings)
        try:
            with httpx.Client(base_url=service.url, timeout=120.0, trust_env=False) as client:
                model = client.get("/v1/models").json()["data"][0]["id"]
                seen.append(complete(client, model, prompt))
                metrics = client.get("/metrics").text
                end = time.monotonic() + 30
                while run == 0 and not _on_disk(metrics) and time.monotonic() < end:
                    time.sleep(0.2)
                    metrics = client.get("/metrics").text
        finally:
            service.stop()
        assert (tmp_path / "node-0.slabs").exists()
    cold, warm = seen
    by_tier = warm["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert by_tier["disk"] >= 64 * 5, (by_tier, cold["usage"])
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def _on_disk(metrics: str) -> int:
    lines = [line for line in metrics.splitlines() if "disk_ready" in line and not line.startswith("#")]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)
