"""A node's dealings with other nodes, from its settings."""

from collections.abc import Callable

from headrace.errors import ConfigError
from headrace.kvstore.daemon.core import StoreCore
from headrace.kvstore.daemon.node import NodeSettings
from headrace.kvstore.peer.owner import PeerOwner
from headrace.kvstore.peer.reader import PeerNode, PeerSettings


def make_peers(settings: NodeSettings) -> list[PeerNode]:
    """The other nodes of `store.peers`, not opened. The entry of this node itself is passed over, so that all nodes can
    have one list. Raises ConfigError."""
    store, peers = settings.store, []
    wanted = PeerSettings(
        fingerprint=settings.fingerprint,
        token=token_of(settings),
        payload_bytes=settings.layout.payload_bytes,
        depth=store.peer_depth,
        timeout_s=store.peer_timeout_s,
        retry_s=store.peer_retry_s,
    )
    for entry in store.peers:
        name, equals, address = entry.partition("=")
        host, _, port = address.rpartition(":")
        if not (name and equals and host and port.isdigit()):
            raise ConfigError(f"store.peers: {entry!r} is not <node>=<host>:<port>")
        if name != settings.name:
            peers.append(PeerNode(name, address, wanted))
    return peers


def make_owner(settings: NodeSettings, core: StoreCore, slot_view: Callable[[int], memoryview]) -> PeerOwner:
    """What serves this node's blocks to others, not started. Raises ConfigError."""
    store = settings.store
    host, _, port = store.peer_listen.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"store.peer_listen: {store.peer_listen!r} is not <host>:<port>")
    return PeerOwner(
        core, slot_view, listen=store.peer_listen, token=token_of(settings), timeout_s=store.peer_timeout_s
    )


def token_of(settings: NodeSettings) -> str:
    token = settings.store.peer_token or settings.peer_token
    if not token:
        raise ConfigError("store.peer_token: nodes that exchange blocks need a shared secret")
    return token
