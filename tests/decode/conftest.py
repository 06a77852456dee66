import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.decode.assemble import make_rank
from headrace.decode.base import DecodeOptions
from headrace.decode.fake import FakePrefill, ListSink, MemoryStore
from headrace.kvstore.pool import DevicePool
from headrace.messages import SamplingParams
from headrace.model.mono import MonoEngine
from headrace.model.testing import tiny_model, tiny_spec


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class House:
    """A tiny model, a store, and one rank alone with a poisoned pool."""

    def __init__(self, model: Any, *, slots: int = 48, store: MemoryStore | None = None, **options: Any) -> None:
        self.model = model
        self.layout = model.spec.slab_layout(model.fmt.name)
        self.store = store or MemoryStore(self.layout.slot_bytes)
        self.pool = DevicePool(self.layout, slots, "cpu")
        self.pool.latent.fill_(0xFF)  # e4m3 NaN: what is not written must not be read
        self.pool.index.fill_(0xFF)
        fields: dict[str, Any] = {"max_running": 8, "max_queued": 8, "draft_tokens": 4, "context_tokens": 4096}
        self.options = DecodeOptions(**(fields | options))
        # A model is not thread-safe and the rank steps in its own thread, while `prefill` computes in the test's.
        mine = copy.deepcopy(model)
        self.rank = make_rank(model=mine, pool=self.pool, client=self.store, options=self.options)
        self.prefill = FakePrefill(model, self.store)
        self.sink = ListSink()
        self.stream = self.rank.open_stream(self.sink)
        self.rank.start()

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, **changes: Any) -> None:
        self.rank.submit(self.stream, self.prefill.request(request_id, prompt, params, **changes))

    def finish(self, *ids: str) -> None:
        self.sink.wait(lambda: all(self.sink.finish_reason(i) for i in ids), 60)

    def idle(self) -> bool:
        status = self.rank.status()
        return status["running"] == status["queued"] == 0 and status["device_free_blocks"] == status["device_blocks"]

    def close(self) -> None:
        self.rank.stop(2.0)
        assert self.rank.failure is None
        index = self.rank._scheduler.index
        assert index.check_integrity() == []
        assert index.held_count == 0
        assert +self.store.leases == {}
        assert self.rank.status()["prompt_rows_computed_total"] == 0


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="session")
def agreeing_model() -> Any:
    """Three real tokens only, so that random drafts are often accepted."""
    return tiny_model(tiny_spec(used_vocab_size=3))


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    built: list[House] = []

    def build(model: Any, **options: Any) -> House:
        built.append(House(model, **options))
        return built[-1]

    yield build
    for one in built:
        one.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(1, 500) for _ in range(length)]


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., list[int]]:
    return prompt_of


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    """Tokens after the first one, as the mono engine gives them."""

    def run(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
        return MonoEngine(model).generate(prompt, params, 4).tokens[1:]

    return run
