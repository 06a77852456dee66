"""The whole configuration: one frozen tree. Every default is here and nowhere else; `headrace config` prints it.

There are no environment switches. `load.load_config` builds a tree from defaults, a YAML file and `--set a.b=c`.
"""

import dataclasses

from headrace.config.fields import section, setting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served and with which arithmetic."""

    path: str = setting("nano", "Checkpoint directory, or `nano` for the checkpoint that ships with Headrace")
    name: str = setting("", "Name clients use; empty: the last part of the path")
    load_format: str = setting(
        "safetensors", "`dummy` fills random weights of the config's shapes", choices=("safetensors", "dummy")
    )
    dummy_seed: int = setting(0, "Seed of `load_format: dummy`")
    device: str = setting("auto", "Where ranks compute; `auto`: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    deterministic: str = setting(
        "auto",
        "A row's result depends on that row alone (docs/architecture.md). `auto`: on for CPU, off for GPUs",
        choices=("auto", "on", "off"),
    )
    threads: int = setting(1, "CPU threads of one rank; part of the determinism contract", minimum=1, maximum=256)
    kernels: str = setting(
        "auto",
        "Kernel backend, or a mapping of ops to backends; `auto` picks per op, device, dtype and shape. One name: that "
        "backend for every op that has it. A forced backend that cannot is an error (see `headrace kernels list`)",
        choices=("auto", "reference", "triton", "gluon", "cuda", "aiter"),
        names=(
            "norm",
            "rope",
            "latent_rows",
            "index_keys",
            "index_topk",
            "sparse_mla",
            "linear",
            "router",
            "experts",
            "quantise",
            "sampling",
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """Bytes of a cached row. Part of the namespace: ranks that differ here never share a block."""

    row_format: str = setting(
        "auto",
        "Latent row format; `auto`: tile656 on CUDA and CPU, plain576 on ROCm; bf16 is the parity and baseline format",
        choices=("auto", "tile656", "plain576", "bf16"),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The prefill pool."""

    groups: int = setting(1, "Prefill groups", minimum=1, maximum=1024)
    cp: int = setting(2, "Context-parallel ranks of one group", minimum=1, maximum=64)
    device_blocks: int = setting(1024, "Device tier of a rank", unit="blocks of 64 tokens", minimum=8)
    chunk_tokens: int = setting(
        512, "Most prompt rows of one step, over all prompts in it; a multiple of 64", unit="tokens", minimum=64
    )
    restore_groups: int = setting(
        1,
        "Groups of layers a restore from the host tier comes in on a GPU: the first layers compute while later ones "
        "are still copied; 1: whole blocks",
        minimum=1,
        maximum=128,
    )
    shard_restores: str = setting(
        "auto",
        "Deal restores over the ranks of a group, each over its own host link, and exchange the bytes; `auto`: in "
        "groups on GPUs",
        choices=("auto", "on", "off"),
    )
    max_running: int = setting(16, "Prompts that interleave their chunks", minimum=1)
    max_queued: int = setting(256, "Prompts waiting beyond that; more are refused with 429", minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The decode pool."""

    groups: int = setting(1, "Decode groups", minimum=1, maximum=1024)
    dp: int = setting(2, "Ranks of a group: requests are data-parallel over them, experts sharded", minimum=1)
    device_blocks: int = setting(1024, "Device tier of a rank", unit="blocks of 64 tokens", minimum=8)
    draft_tokens: int = setting(4, "Draft tokens per step; 0 switches speculation off", minimum=0, maximum=8)
    adaptive_drafts: bool = setting(True, "Draft fewer than draft_tokens when measured acceptance and load say it pays")
    admission: str = setting(
        "predicted",
        "What a request reserves: the answer it is expected to give (who then finds no room is parked in the host "
        "tier), or its whole lifetime",
        choices=("predicted", "strict"),
    )
    max_running: int = setting(16, "Requests one rank steps together", minimum=1)
    max_queued: int = setting(256, "Handed-over requests waiting on one rank; more are refused with 429", minimum=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The node daemon and its tiers."""

    host_bytes: int = setting(1 << 30, "Host tier of a node (shared memory)", unit="bytes", minimum=1 << 20)
    shm_dir: str = setting(
        "/dev/shm", "Memory file system that holds the host tier; huge pages are used if it is mounted with huge=advise"
    )
    numa: str = setting(
        "auto", "NUMA nodes the host tier's pages are dealt over, as `0-1`; `auto`: all that have memory"
    )
    host_policy: str = setting("lru", "Eviction policy of the host tier (names: `headrace config --choices`)")
    tenant_share: float = setting(
        1.0,
        "Most of the host tier that one tenant may fill, 1: all of it; `headrace store quota` sets it for one tenant",
        unit="0..1",
        minimum=0.0,
        maximum=1.0,
    )
    device_policy: str = setting("lru", "Eviction policy of the ranks' device tiers")
    write_policy: str = setting("through", "When a device block goes to the host tier", choices=("through",))
    event_log: str = setting(
        "", "File for what the store did, one JSON object a line; `headrace lab` replays it; empty: none is written"
    )
    event_log_bytes: int = setting(1 << 30, "Where the event log ends", unit="bytes", minimum=1 << 10)
    disk_bytes: int = setting(0, "Disk tier of a node; 0: none", unit="bytes", minimum=0)
    disk_dir: str = setting(
        "", "Directory of the disk tier's file `<node>.slabs`, which outlives the service; needed with disk_bytes"
    )
    disk_policy: str = setting("lru", "Eviction policy of the disk tier")
    disk_write_policy: str = setting(
        "through",
        "When a host block goes to disk. `through`: as soon as the filter admits it; `through_selective:<n>`: after n "
        "hits; `back`: when the host tier needs its slot",
    )
    disk_admit_uses: int = setting(
        2, "Blocks used (put or hit) less often never go to disk; 1: no filter", minimum=1, maximum=255
    )
    disk_depth: int = setting(4, "Transfers to or from the disk at once", minimum=1, maximum=64)
    disk_timeout_s: float = setting(
        2.0, "A transfer that takes longer is given up: the request recomputes", unit="seconds", minimum=0.01
    )
    disk_retry_s: float = setting(
        5.0, "Pause between probes of a disk tier that was switched off", unit="seconds", minimum=0.05
    )
    peer_listen: str = setting(
        "", "`host:port` where other nodes reach this node's blocks (gRPC; slabs use a free port); empty: they cannot"
    )
    peers: tuple[str, ...] = setting(
        (), "Other nodes to fetch blocks from, as `node=host:port` of their peer_listen; this node's own is passed over"
    )
    peer_token: str = setting("", "Secret that the nodes share; empty: the one of this run")
    peer_depth: int = setting(2, "Data connections to one other node at once", minimum=1, maximum=64)
    peer_timeout_s: float = setting(
        2.0, "Deadline of each step of a fetch; past it the request recomputes", unit="seconds", minimum=0.01
    )
    peer_retry_s: float = setting(
        5.0, "Pause before a node is asked again after failures", unit="seconds", minimum=0.05
    )
    promote_wait_s: float = setting(
        5.0, "Longest that a prompt waits for blocks from disk or from other nodes", unit="seconds", minimum=0.0
    )
    lease_s: float = setting(10.0, "Lifetime of a lease without heartbeat", unit="seconds", minimum=0.1)
    verify_share: float = setting(
        0.01, "Share of host loads whose digest is checked", unit="0..1", minimum=0.0, maximum=1.0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Who knows which node and tier holds which block."""

    url: str = setting("", "Empty: in-process. redis://host:port/db: through Redis")
    poll_s: float = setting(0.05, "How often a router asks a node for new events", unit="seconds", minimum=0.001)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The HTTP side."""

    host: str = setting("127.0.0.1", "Address the HTTP port binds")
    port: int = setting(8000, "HTTP port; 0 takes a free one", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = setting((), "Accepted keys as `key` or `key=tenant`; empty: no authentication")
    admin_key: str = setting("", "Key of the admin endpoints; empty: they answer on loopback only")
    max_body_bytes: int = setting(64 << 20, "Largest request body", unit="bytes", minimum=1024)
    max_context: int = setting(0, "Longest prompt + answer; 0: what the model allows", unit="tokens", minimum=0)
    max_inflight: int = setting(512, "Requests in the house; more get 429", minimum=1)
    default_max_tokens: int = setting(
        0, "Answer length when the client gives none; 0: what the context leaves", unit="tokens", minimum=0
    )
    request_timeout_s: float = setting(600.0, "Deadline of one request", unit="seconds", minimum=1)
    known_text_bytes: int = setting(
        128 << 20,
        "Memory for the token ids of texts that were prompts or answers, so that an answer sent back becomes the very "
        "ids it was generated as and a conversation is not tokenised again; least recently used ones go; 0: off",
        unit="bytes",
        minimum=0,
    )
    policy: str = setting(
        "predicted",
        "How a prefill group and a decode rank are chosen; the others are for comparison",
        choices=("predicted", "prefix_overlap", "round_robin", "least_loaded", "consistent_hash", "session"),
    )
    slo_ttft_s: float = setting(
        0.0,
        "Prompts that would surely take longer to their first token are refused while no group is idle; 0: none is",
        unit="seconds",
        minimum=0,
    )
    tenant_limits: tuple[str, ...] = setting(
        (),
        "Limits as `tenant:requests_per_s=5,tokens_per_s=20000,concurrency=8,weight=2,priority=1`, `*` for all others",
    )
    explain_bytes: int = setting(
        64 << 20, "Memory for the prompts that `/requests/{id}` compares with; 0: none", unit="bytes", minimum=0
    )
    unknown_fields: str = setting(
        "refuse",
        "Fields of a request that are neither known nor known to change nothing: `refuse` with 400 or `ignore`",
        choices=("refuse", "ignore"),
    )
    keep_alive_s: int = setting(900, "Idle HTTP connections are kept this long", unit="seconds", minimum=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """How processes are started and stopped."""

    launcher: str = setting("ray", "Who places the processes", choices=("ray", "process"))
    run_dir: str = setting("", "Sockets and logs of one run; empty: a new directory under the system's temp")
    ray_address: str = setting("", "Existing Ray cluster to join; empty: start a local one")
    start_timeout_s: float = setting(180.0, "A box must be ready within", unit="seconds", minimum=1)
    grace_s: float = setting(5.0, "Running streams may finish this long after SIGTERM", unit="seconds", minimum=0)
    restart: bool = setting(True, "Restart a group or daemon that died")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The root."""

    model: ModelConfig = section(ModelConfig, "What is served")
    kv: KvConfig = section(KvConfig, "Bytes of a cached row")
    prefill: PrefillConfig = section(PrefillConfig, "Prefill pool")
    decode: DecodeConfig = section(DecodeConfig, "Decode pool")
    store: StoreConfig = section(StoreConfig, "Tiered store")
    directory: DirectoryConfig = section(DirectoryConfig, "Block directory")
    router: RouterConfig = section(RouterConfig, "HTTP, placement, admission")
    deploy: DeployConfig = section(DeployConfig, "Processes")
