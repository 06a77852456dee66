"""`headrace store` against the running service: what a request left in the host tier, and whose it is."""

import json
import subprocess
import sys

import httpx


def store(service, *args: str) -> dict:
    command = [sys.executable, "-P", "-m", "headrace.cli", "store", *args, "--run-dir", str(service.run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["node-0"]


def test_blocks_of_a_request_are_listed_counted_for_a_tenant_and_sound(quick_service) -> None:
    with httpx.Client(base_url=quick_service.url, timeout=120.0, trust_env=False) as client:
        body = {"prompt": "import os\n" * 60, "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        metrics = client.get("/metrics").text
    values = store(quick_service, "stats")
    assert values["host_ready"] >= 2
    assert values["host_puts_total"] >= values["host_ready"]
    blocks = store(quick_service, "ls")
    assert len(blocks) == values["host_ready"]
    nobodys = [block["name"] for block in blocks if len(block["tenant"]) != 16]
    assert nobodys == [], "every block is counted for a tenant"
    verdict = store(quick_service, "verify")
    assert verdict["checked"] == len(blocks)
    assert verdict["corrupt"] == []
    assert "# TYPE headrace_box_host_puts_total counter" in metrics
    assert 'headrace_box_leg_bytes_total{box="prefill-0",leg="device_to_host"}' in metrics
