"""Settings of a simulated service. Speeds are those of the machine in question: measure them (`headrace lab bench`) or
take published ones; the defaults stand for an eight-GPU prefill group of H200 class and are no measurement."""

import dataclasses

from headrace.config.fields import setting
from headrace.lab.simulate.settings import SLAB_BYTES

_SIZE_UNIT = "tokens, blocks with `b`, bytes with `GB`, `GiB`"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Prefill groups, decode ranks, one node's tiers, and how the trace is driven."""

    groups: int = setting(1, "Prefill groups", minimum=1)
    group_gpus: int = setting(8, "GPUs of one prefill group (context-parallel ranks)", minimum=1)
    prefill_size: str = setting("1M", "Device tier of a prefill group", unit=_SIZE_UNIT)
    decode_ranks: int = setting(8, "Decode ranks, a GPU each", minimum=1)
    decode_size: str = setting("2M", "Device tier of a decode rank", unit=_SIZE_UNIT)
    decode_running: int = setting(64, "Sequences of one decode rank", minimum=1)
    host_size: str = setting("8M", "Host tier; `0b`: none", unit=_SIZE_UNIT)
    disk_size: str = setting("0b", "Disk tier; `0b`: none", unit=_SIZE_UNIT)
    device_policy: str = setting("lru", "Eviction policy of the device tiers")
    host_policy: str = setting("lru", "Eviction policy of the host tier")
    disk_policy: str = setting("lru", "Eviction policy of the disk tier")
    slab_bytes: int = setting(SLAB_BYTES, "Bytes of a block of 64 tokens", unit="bytes", minimum=1)
    host_gbps: float = setting(200.0, "Restore speed of a group, all its links together", unit="GB/s", minimum=1e-6)
    disk_gbps: float = setting(10.0, "Read speed of the disk tier", unit="GB/s", minimum=1e-6)
    link_gbps: float = setting(40.0, "Handover speed into one decode rank", unit="GB/s", minimum=1e-6)
    fixed_s: float = setting(0.05, "Prefill seconds of a prompt with nothing to compute", unit="s", minimum=0)
    token_s: float = setting(5e-5, "Prefill seconds per new token", unit="s", minimum=0)
    context_s: float = setting(2.7e-11, "Prefill seconds per new token and token of context", unit="s", minimum=0)
    answer_token_s: float = setting(0.02, "Decode seconds per token of one sequence alone", unit="s", minimum=0)
    crowd_s: float = setting(0.0002, "Decode seconds per token more for each other sequence", unit="s", minimum=0)
    publish_answers: bool = setting(True, "Decode publishes full blocks of answers, so that the next turn hits them")
    loop: str = setting(
        "closed",
        "`closed`: a session's next request follows its last answer; `open`: recorded times",
        choices=("closed", "open"),
    )
    time_scale: float = setting(1.0, "2: recorded starts and pauses pass twice as fast", minimum=1e-6)
    starts: str = setting(
        "recorded", "When sessions start; `poisson`: at `sessions_per_s`", choices=("recorded", "poisson")
    )
    sessions_per_s: float = setting(0.1, "Rate of `starts=poisson`", unit="1/s", minimum=1e-9)
    concurrency: int = setting(0, "Most sessions at once, the next starts when one ends; 0: no limit", minimum=0)
    max_queued: int = setting(256, "Requests waiting for a decode reservation; more get 429", minimum=0)
    timeout_s: float = setting(600.0, "Deadline of a request's admission", unit="s", minimum=0)
    seed: int = setting(0, "Seed of everything random")
