"""uvicorn on the running event loop, without its signal handlers: the box decides when to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from headrace.config import RouterConfig
from headrace.errors import ConfigError
from headrace.router.http.connection import GuardedProtocol

STOP_S = 2.0
"""Connections that are still open this long after the last response are cut."""


class HttpServer:
    def __init__(self, app: FastAPI, config: RouterConfig) -> None:
        self._config = config
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=GuardedProtocol,
            ws="none",
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=int(STOP_S),
            server_header=False,
        )
        self._server = _Server(settings)
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> str:
        """Listen; returns the URL. Raises ConfigError when the port is taken."""
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        # Named explicitly: asyncio switches Nagle's algorithm off (40 ms a response) only for sockets that say TCP.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self._config.host, self._config.port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"router.host {self._config.host}, router.port {self._config.port}: {error.strerror}"
            ) from error
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http server")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        port = self._socket.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._config.host, self._config.host)
        return f"http://{shown}:{port}"

    async def stop(self) -> None:
        """Close the port and every connection, within a few seconds. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
