"""The checks behind `headrace doctor`. Each looks at one thing and reports it; none changes anything."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from headrace.config import Config
from headrace.deploy.facts import amd_gpus, nvidia_gpus, resolve
from headrace.errors import HeadraceError

REDIS_TIMEOUT_S = 3.0
_RANK_BYTES = 600 << 20
"""Memory of a CPU rank beside its weights and pools: Python, torch, buffers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    level: str
    """"ok", "warn" (it starts, but mind this) or "stop" (it will not start)."""
    check: str
    text: str


def diagnose(config: Config) -> list[Finding]:
    """Run every check; a check that fails by itself is a finding too."""
    findings = []
    for check in CHECKS:
        try:
            level, text = check(config)
        except Exception as error:
            level, text = "warn", f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(Finding(level, check.__name__.removeprefix("check_").replace("_", " "), text))
    return findings


def check_devices(config: Config) -> tuple[str, str]:
    nvidia, amd = nvidia_gpus(), amd_gpus()
    text = f"{os.cpu_count()} CPU cores, {nvidia} NVIDIA and {amd} AMD GPUs"
    if config.model.device == "cuda" and not nvidia + amd:
        return "stop", f"{text}, but model.device is cuda"
    return "ok", text


def check_libraries(config: Config) -> tuple[str, str]:
    needed = {
        "torch": "torch",
        "grpcio": "grpc",
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "tokenizers": "tokenizers",
    }
    if config.deploy.launcher == "ray":
        needed["ray"] = "ray"
    if config.directory.url:
        needed["redis"] = "redis"
    missing = [name for name, module in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        return "stop", f"not installed: {', '.join(missing)}"
    return "ok", f"{', '.join(f'{name} {importlib.metadata.version(name)}' for name in needed)}"


def check_shared_memory(config: Config) -> tuple[str, str]:
    directory, need = Path(config.store.shm_dir), config.store.host_bytes
    if not directory.is_dir():
        return "stop", f"store.shm_dir {directory} is not a directory"
    if not os.access(directory, os.W_OK):
        return "stop", f"store.shm_dir {directory} is not writable"
    free = shutil.disk_usage(directory).free
    text = f"{directory} has {_size(free)} free, store.host_bytes is {_size(need)}"
    return ("ok", text) if free >= need else ("stop", text)


def check_memory(config: Config) -> tuple[str, str]:
    import psutil

    free = psutil.virtual_memory().available
    ranks = config.prefill.groups * config.prefill.cp + config.decode.groups * config.decode.dp
    need = config.store.host_bytes + ranks * _RANK_BYTES
    text = f"{_size(free)} available; host tier and {ranks} ranks take {_size(need)} beside weights and device tiers"
    return ("ok", text) if free >= need else ("warn", text)


def check_pinned_memory(config: Config) -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"RLIMIT_MEMLOCK is {'unlimited' if soft == resource.RLIM_INFINITY else _size(soft)}"
    uses_gpu = config.model.device != "cpu" and bool(nvidia_gpus() + amd_gpus())
    if uses_gpu and soft != resource.RLIM_INFINITY and soft < config.store.host_bytes:
        return "warn", f"{text}, less than store.host_bytes {_size(config.store.host_bytes)}: raise it with ulimit -l"
    return "ok", text


def check_checkpoint(config: Config) -> tuple[str, str]:
    from headrace.model.spec import ModelSpec

    try:
        layout = ModelSpec.from_dir(config.model.path).slab_layout(resolve(config).kv.row_format)
    except HeadraceError as error:
        return "stop", str(error)
    return "ok", (
        f"{config.model.path}: {layout.num_layers} layers, slabs of {layout.payload_bytes} bytes in "
        f"{layout.row_format}; the host tier holds {config.store.host_bytes // layout.slot_bytes} blocks"
    )


def check_policies(config: Config) -> tuple[str, str]:
    from headrace.kvstore.policies import make_policy

    names = (config.store.host_policy, config.store.device_policy)
    try:
        for name in names:
            make_policy(name, config.decode.device_blocks)
    except HeadraceError as error:
        return "stop", str(error)
    return "ok", f"{names[0]} in the host tier, {names[1]} in device tiers"


def check_redis(config: Config) -> tuple[str, str]:
    if not config.directory.url:
        return "ok", "not used (directory.url is empty)"
    import redis

    try:
        client = redis.Redis.from_url(
            config.directory.url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
        with client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        return "warn", f"{config.directory.url} does not answer ({error}); the service would start without it"
    return "ok", f"{config.directory.url} answers"


def check_port(config: Config) -> tuple[str, str]:
    host, port = config.router.host, config.router.port
    if port == 0:
        return "ok", "router.port is 0: a free one is taken"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "stop", f"router {host}:{port}: {error.strerror}"
    return "ok", f"{host}:{port} is free"


def check_exposure(config: Config) -> tuple[str, str]:
    if config.router.host not in ("127.0.0.1", "::1", "localhost") and not config.router.api_keys:
        return "warn", f"{config.router.host} is reachable from outside and router.api_keys is empty"
    return "ok", f"binds {config.router.host}, {len(config.router.api_keys)} API key(s)"


def check_open_files(config: Config) -> tuple[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * config.router.max_inflight + 256
    text = f"RLIMIT_NOFILE is {soft}, {config.router.max_inflight} requests in flight need about {need}"
    return ("ok", text) if soft >= need else ("warn", text)


CHECKS: tuple[Callable[[Config], tuple[str, str]], ...] = (
    check_devices,
    check_libraries,
    check_memory,
    check_shared_memory,
    check_pinned_memory,
    check_open_files,
    check_checkpoint,
    check_policies,
    check_redis,
    check_port,
    check_exposure,
)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
