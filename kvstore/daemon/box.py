"""The node daemon as a box: what a launcher starts. A thin shell around `node.Node`."""

from pathlib import Path
from typing import Any, Protocol

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.kvstore.daemon.node import Node, NodeSettings
from headrace.kvstore.layout import SlabLayout


class NodeContext(Protocol):
    """The fields of deploy's BoxContext that a node daemon reads."""

    @property
    def config(self) -> Config: ...

    @property
    def name(self) -> str: ...

    @property
    def run_dir(self) -> str: ...

    @property
    def layout(self) -> SlabLayout | None: ...

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def token(self) -> str: ...


class NodeDaemonBox:
    def __init__(self, context: NodeContext) -> None:
        if context.layout is None:
            raise ConfigError(f"{context.name}: the supervisor gave no slab layout")
        self._name = context.name
        self._socket = Path(context.run_dir) / f"{context.name}.sock"
        self._node = Node(
            NodeSettings(
                name=context.name,
                socket=self._socket,
                layout=context.layout,
                fingerprint=context.fingerprint,
                store=context.config.store,
                directory_url=context.config.directory.url,
                peer_token=context.token,
                arena_prefix=f"{Path(context.run_dir).name}-{context.name}",
            )
        )
        self._ready = False

    def start(self) -> dict[str, str]:
        """Raises ConfigError: no room for the arena, or another daemon at this socket."""
        self._node.start()
        self._ready = True
        return {self._name: f"unix:{self._socket}"}

    def status(self) -> dict[str, Any]:
        values = self._node.values() if self._ready else {}
        return {"ready": self._ready, "incarnation": self._node.incarnation, "values": values}

    def stop(self, grace_s: float) -> None:
        """Nothing runs here that could finish: clients see a closed connection and keep their device tiers."""
        self._ready = False
        self._node.stop()
