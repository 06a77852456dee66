"""A link that can be cut, for test suites: forwards TCP or Unix connections to a Unix socket, byte by byte."""

import contextlib
import selectors
import socket
import threading
from pathlib import Path


class Link:
    """Listens at `path` (Unix) or on a free TCP port of 127.0.0.1 (`path` None: see `port`). While cut, connections are
    taken but nothing gets through, as behind a switch that lost its uplink; `heal` ends those, and later ones work."""

    def __init__(self, target: Path, path: Path | None = None) -> None:
        self._target = target
        self._path = path
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.port: int = self._listener.getsockname()[1]
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(path))
            self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peer: dict[socket.socket, socket.socket] = {}
        self._stranded: list[socket.socket] = []
        self._cut = threading.Event()
        self._closed = threading.Event()
        self.carried_bytes = 0
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def heal(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)
        for one in [*self._peer, *self._stranded, self._listener]:
            one.close()
        self._selector.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        was_cut = False
        while not self._closed.is_set():
            cut = self._cut.is_set()
            if was_cut and not cut:
                for one in [*self._peer, *self._stranded]:
                    self._end(one)
                self._stranded.clear()
            was_cut = cut
            for key, _ in self._selector.select(0.02):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    self._accept(cut)
                elif cut:
                    self._selector.unregister(source)  # read by nobody until the link is healed
                else:
                    self._forward(source)

    def _accept(self, cut: bool) -> None:
        near, _ = self._listener.accept()
        if cut:
            self._stranded.append(near)
            return
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.connect(str(self._target))
        except OSError:
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peer[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                self._peer[source].sendall(data)
                self.carried_bytes += len(data)
                return
        except OSError:
            pass  # One side is gone: the other is told by the end of its connection.
        self._end(source)

    def _end(self, one: socket.socket) -> None:
        for each in (one, self._peer.pop(one, None)):
            if each is not None:
                self._peer.pop(each, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(each)
                each.close()
