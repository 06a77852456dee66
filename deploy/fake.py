"""A box without an engine, for tests of launchers and supervision: it serves a TCP port and owns a shared-memory file,
so that whatever is not released can be found. Its behaviour is steered by files in the run directory."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from headrace.deploy.base import BoxContext
from headrace.errors import CheckpointError
from headrace.ids import new_incarnation


class FakeBox:
    """`<run_dir>/<name>.fail` makes the start fail with the file's text, `<name>.hang` makes it hang, `<name>.deaf`
    makes `stop` hang, `<name>.sick` makes the status not ready."""

    def __init__(self, context: BoxContext) -> None:
        self.context = context
        self.incarnation = new_incarnation()
        self._socket = socket.socket()
        run_id = Path(context.run_dir).name
        self._shared = Path(context.config.store.shm_dir) / f"{run_id}-{context.name}"

    def start(self) -> dict[str, str]:
        self._flag("hang", wait=True)
        if (text := self._flag("fail")) is not None:
            raise CheckpointError(text)
        self._shared.write_bytes(b"x" * 4096)
        port = self.context.config.router.port if self.context.name == "router" else 0
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        host, port = self._socket.getsockname()
        prefix = "http://" if self.context.name == "router" else ""
        if self.context.group.startswith("prefill") and self.context.rank:
            return {}
        name = self.context.group if self.context.group.startswith("prefill") else self.context.name
        print("fake box", self.context.name, "serves", port, flush=True)
        return {name: f"{prefix}{host}:{port}"}

    def status(self) -> dict[str, Any]:
        import_of_kernels = "headrace.kernels" if _is_ours("kernels") else "elsewhere"
        return {
            "ready": self._flag("sick") is None,
            "incarnation": self.incarnation,
            "generation": self.context.generation,
            "endpoints": self.context.endpoints,
            "kernels": import_of_kernels,
            "cwd": os.getcwd(),
            "home": os.environ.get("HOME", ""),
        }

    def stop(self, grace_s: float) -> None:
        self._flag("deaf", wait=True)
        self._socket.close()
        self._shared.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.sendall(self.context.name.encode())
            connection.close()

    def _flag(self, kind: str, *, wait: bool = False) -> str | None:
        path = Path(self.context.run_dir) / f"{self.context.name}.{kind}"
        if not path.exists():
            return None
        while wait and path.exists():
            time.sleep(0.05)
        return path.read_text() if path.exists() else None


def _is_ours(module: str) -> bool:
    """Whether `import <module>` would find a package of ours here (it must not: Hugging Face has a `kernels` too)."""
    import importlib.util

    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and "headrace" in spec.origin
