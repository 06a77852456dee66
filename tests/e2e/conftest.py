"""The whole service as a client sees it: one `headrace serve` a session, checked for leftovers at its end."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headrace.messages import SamplingParams

SMALL = (
    "router.port=0",
    "model.device=cpu",
    "prefill.device_blocks=256",
    "decode.device_blocks=256",
    "store.host_bytes=134217728",
    "deploy.grace_s=2",
)
READY_WITHIN_S = 180.0
GONE_WITHIN_S = 10.0


class Service:
    """A running service: `url`, `endpoints`, `run_dir`."""

    def __init__(self, *overrides: str) -> None:
        command = [sys.executable, "-P", "-m", "headrace.cli", "serve", "--json"]
        for item in (*SMALL, *overrides):
            command += ["--set", item]
        self.shm_before = set(Path("/dev/shm").iterdir())
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"headrace serve ended with {self.process.wait()} before it was ready; see its output")
        ready: dict[str, Any] = json.loads(line)
        self.url: str = ready["url"]
        self.endpoints: dict[str, str] = ready["endpoints"]
        self.run_dir = Path(ready["run_dir"])

    def log(self, box: str) -> str:
        """What a box has logged, e.g. "decode-0.1"."""
        return (self.run_dir / f"{box}.log").read_text()

    def stop(self) -> None:
        """SIGTERM, then assert that within ten seconds nothing is left: process, shared memory, port, directory."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        began = time.monotonic()
        self.process.terminate()
        code = self.process.wait(GONE_WITHIN_S + 5.0)
        took = time.monotonic() - began
        assert code == 0, f"headrace serve ended with {code}"
        assert took < GONE_WITHIN_S, f"stopping took {took:.1f} s"
        _, alive = psutil.wait_procs(family, 1.0)
        assert alive == []
        assert not self.run_dir.exists()
        left = {path for path in set(Path("/dev/shm").iterdir()) - self.shm_before if self.run_dir.name in path.name}
        assert left == set()
        port = int(self.url.rpartition(":")[2])
        assert port not in {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def launchers() -> list[str]:
    return ["process", "ray"]


@pytest.fixture(scope="session", params=launchers())
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """The running service, under each launcher. Tests that only need any service take `quick_service`."""
    yield from _running(request.param)


@pytest.fixture(scope="session")
def quick_service() -> Iterator[Service]:
    """The running service under the launcher that starts fastest."""
    yield from _running("process")


@pytest.fixture(scope="session")
def service_class() -> type[Service]:
    """To start a service with other settings; the test stops it."""
    return Service


def _running(launcher: str) -> Iterator[Service]:
    made = Service(f"deploy.launcher={launcher}")
    try:
        yield made
    finally:
        made.stop()


class Reference:
    """The one-process engine on the nano model: what every other path must equal, token by token."""

    def __init__(self) -> None:
        import tokenizers

        from headrace.config import Config
        from headrace.model.choose import load_from_config
        from headrace.model.mono import MonoEngine
        from headrace.model.spec import ModelSpec, resolve_path

        self._engine = MonoEngine(load_from_config(Config(), ModelSpec.from_dir("nano")))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(resolve_path("nano") / "tokenizer.json"))
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer's tokens without speculation; computed once for each prompt and length."""
        key = (max_tokens, *prompt)
        if key not in self._answers:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            self._answers[key] = self._engine.generate(prompt, params, 0).tokens
        return self._answers[key]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def code_tokens(reference: Reference) -> list[int]:
    """Real code as the nano tokenizer cuts it: this repository's own."""
    root = Path(__file__).resolve().parents[2]
    return reference.tokenizer.encode((root / "kvstore/host_tier.py").read_text(), add_special_tokens=False).ids


def ask(url: str, prompt: list[int], max_tokens: int = 24, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """One greedy completion of token ids: (answer ids, usage). It never stops early."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    raw = answer.json()
    return raw["choices"][0]["token_ids"], raw["usage"]


@pytest.fixture(scope="session")
def complete() -> Callable[..., tuple[list[int], dict[str, Any]]]:
    return ask


def box_values(url: str) -> dict[str, dict[str, float]]:
    """Gauges and counters of every box, by box name."""
    info = httpx.get(f"{url}/get_server_info", timeout=30.0, trust_env=False).json()
    assert info["down"] == [], info["down"]
    return {name: box["values"] for name, box in info["boxes"].items()}


@pytest.fixture(scope="session")
def boxes() -> Callable[[str], dict[str, dict[str, float]]]:
    return box_values


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[Service]]:
    """A service with settings of one's own, stopped and checked for leftovers at the end of the `with`."""

    @contextmanager
    def start(*overrides: str) -> Iterator[Service]:
        made = Service(*overrides)
        try:
            yield made
        finally:
            made.stop()

    return start


@pytest.fixture(scope="session")
def flush() -> Callable[[str], None]:
    """Drop every cached block; the service must be idle."""

    def drop(url: str) -> None:
        answer = httpx.post(f"{url}/flush_cache", timeout=30.0, trust_env=False)
        assert answer.status_code == 200, answer.text

    return drop
