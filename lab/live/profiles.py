"""Benchmark profiles as traces: prompts of one length with a shared prefix, one answer token.

`64k` and `128k` share 90% of the prompt and `1m` shares nothing, as the published studies run them. `nano-…` are the
same shapes 1/64 as long, for a CPU. Every case runs at a fixed number of requests in flight, with an empty cache.
"""

import dataclasses

from headrace.errors import InputError
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.lab.traces.form import Request, Session, Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    prompt_tokens: int
    shared: float
    """Share of the prompt that all requests have in common, in whole blocks."""
    requests_per_slot: int = 4
    """Requests of a case, as a multiple of its concurrency."""


PROFILES = {
    "64k": Profile(65_536, 0.9),
    "128k": Profile(131_072, 0.9),
    "1m": Profile(1_048_576, 0.0, 1),
    "nano-64k": Profile(1_024, 0.9),
    "nano-128k": Profile(2_048, 0.9),
    "nano-1m": Profile(16_384, 0.0, 1),
}
CONCURRENCIES = (1, 5, 10, 20, 50)


def profile_trace(name: str, concurrency: int, output_tokens: int = 1) -> Trace:
    """Sessions of one request each; run it closed loop with `concurrency`. Raises InputError."""
    if name not in PROFILES:
        raise InputError(f"profile {name!r} is not known; known: {', '.join(PROFILES)}")
    profile = PROFILES[name]
    blocks = profile.prompt_tokens // BLOCK_TOKENS
    common = int(blocks * profile.shared)
    own = blocks - common
    sessions = []
    for index in range(concurrency * profile.requests_per_slot):
        runs = tuple(run for run in ((0, common), (common + index * own, own)) if run[1])
        request = Request(0.0, None, profile.prompt_tokens, output_tokens, runs, index)
        sessions.append(Session(str(index), 0.0, (request,)))
    return Trace(name, BLOCK_TOKENS, common + own * len(sessions), tuple(sessions))
