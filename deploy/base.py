"""Contracts of deploy: a box is one process of the service, a launcher places boxes and watches them.

A box class is a thin shell around plain objects that are tested without it. It is constructed in its own process as
`BoxClass(context)`, then `start()` is called once. The same classes run under every launcher.
"""

import dataclasses
from typing import Any, Protocol

from headrace.config import Config
from headrace.ids import Incarnation
from headrace.kvstore.layout import SlabLayout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoxContext:
    """Everything a box is told. Must survive msgpack: plain values only, the config as its dict form on the wire."""

    config: Config
    name: str
    """"node-0", "prefill-0.1" (group 0, rank 1), "decode-0.0", "router"."""
    run_dir: str
    """Directory of this run on this host: Unix sockets, rendezvous files, logs."""
    group: str = ""
    """"prefill-0"; empty for boxes that are not in a group."""
    rank: int = 0
    world: int = 1
    generation: str = ""
    """Differs at each (re)start of a group, so that a late rank of the old one cannot join the new one."""
    rendezvous: str = ""
    """torch.distributed init method of the group: file://... on one host, tcp://... between hosts."""
    layout: SlabLayout | None = None
    """Slab layout of the served model: the supervisor derives it once, for boxes that do not read the checkpoint."""
    fingerprint: bytes = b""
    """`kvstore.names.fingerprint` of this deployment: peers that differ refuse each other."""
    token: str = ""
    """Shared secret of this deployment: gRPC metadata "authorization"."""
    endpoints: dict[str, str] = dataclasses.field(default_factory=dict)
    """Addresses of boxes started earlier: "node-0" -> "unix:/...", "prefill-0" -> "127.0.0.1:40123" (the group's
    leader), "decode-0.1" -> "127.0.0.1:40124", "router" -> "http://127.0.0.1:8000"."""


class Box(Protocol):
    """One process of the service."""

    def __init__(self, context: BoxContext) -> None: ...

    def start(self) -> dict[str, str]:
        """Become ready and return the endpoints this box serves, by name. Raises HeadraceError with the reason."""
        ...

    def status(self) -> dict[str, Any]:
        """Small plain dict: at least {"ready": bool, "incarnation": str}. Must answer within a second."""
        ...

    def stop(self, grace_s: float) -> None:
        """Finish or abort what runs within `grace_s`, release every resource (threads, sockets, shared memory)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    entry: str
    """"headrace.prefill.box:PrefillRankBox\""""
    context: BoxContext
    cpus: float = 1.0
    gpus: float = 0.0


class BoxHandle(Protocol):
    """The launcher's side of one box."""

    incarnation: Incarnation
    pid: int

    def start(self, timeout_s: float) -> dict[str, str]: ...

    def status(self, timeout_s: float) -> dict[str, Any]: ...

    def stop(self, grace_s: float) -> None:
        """Ask it to stop, then make sure its process is gone."""
        ...

    def kill(self) -> None:
        """SIGKILL, at once."""
        ...

    def alive(self) -> bool: ...


class Launcher(Protocol):
    """`ray` or `process`; the registry is `deploy/launchers/__init__.py`."""

    def launch(self, spec: BoxSpec) -> BoxHandle: ...

    def close(self) -> None:
        """Stop whatever the launcher itself started (a local Ray cluster)."""
        ...
