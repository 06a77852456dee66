"""Launcher `process`: every box is a child process of the supervisor on this host. Knows nothing of Ray.

`launch` must be called from a thread that lives as long as the boxes: the kernel ties a child's parent-death signal to
the thread that forked it.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from headrace.deploy.base import BoxHandle, BoxSpec
from headrace.deploy.rundir import RUN_MARK
from headrace.deploy.runner import STOP_SLACK_S, import_path, log_path
from headrace.deploy.wire import context_to_plain, receive_frame, send_frame
from headrace.errors import RankLost, from_wire
from headrace.ids import Incarnation

_STOP_MARGIN_S = 0.5


class ProcessHandle:
    """One child and its control socket."""

    def __init__(self, spec: BoxSpec, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.incarnation = Incarnation("")
        self.pid = process.pid
        self._spec = spec
        self._process = process
        self._control = control
        self._ids = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._ended = False
        threading.Thread(target=self._read, name=f"control-{spec.context.name}", daemon=True).start()

    def start(self, timeout_s: float) -> dict[str, str]:
        """Raises what the box reported, or RankLost when it ended or did not answer in time."""
        fields = {"entry": self._spec.entry, "context": context_to_plain(self._spec.context)}
        endpoints: dict[str, str] = self._call("start", timeout_s, **fields)
        self.incarnation = Incarnation(str(self.status(10.0).get("incarnation", "")))
        return endpoints

    def status(self, timeout_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("status", timeout_s)
        return answer

    def stop(self, grace_s: float) -> None:
        with contextlib.suppress(RankLost):
            self._send("stop", grace_s=grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s + STOP_SLACK_S + _STOP_MARGIN_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the child and whatever it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def alive(self) -> bool:
        return self._process.poll() is None

    def _call(self, method: str, timeout_s: float, **fields: Any) -> Any:
        future = self._send(method, **fields)
        try:
            answer = future.result(timeout_s)
        except FutureTimeout:
            raise RankLost(f"{self._name}: no answer to {method} within {timeout_s:g} s") from None
        if "error" in answer:
            raise from_wire(*answer["error"])
        return answer["ok"]

    def _send(self, method: str, **fields: Any) -> "Future[Any]":
        number, future = next(self._ids), Future[Any]()
        with self._sending:
            self._waiting[number] = future
            try:
                send_frame(self._control, {"id": number, "method": method, **fields})
            except OSError:
                self._ended = True
            if self._ended:
                self._waiting.pop(number, None)
                raise RankLost(self._obituary())
        return future

    def _read(self) -> None:
        while (answer := receive_frame(self._control)) is not None:
            future = self._waiting.pop(answer["id"], None) if answer["id"] else None
            if future is not None:
                future.set_result(answer)
        with self._sending:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        self._control.close()
        for future in waiting.values():
            future.set_exception(RankLost(self._obituary()))

    @property
    def _name(self) -> str:
        return self._spec.context.name

    def _obituary(self) -> str:
        deadline = time.monotonic() + 2.0
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        how = "closed its control socket" if code is None else f"ended with code {code}"
        return f"{self._name} (process {self.pid}) {how}"


class ProcessLauncher:
    """Starts children; owns nothing else. With GPUs, box after box gets the next device."""

    def __init__(self, run_dir: str, gpus: int = 0) -> None:
        self._run_dir = run_dir
        self._gpus = gpus
        self._device_of: dict[str, int] = {}

    def launch(self, spec: BoxSpec) -> BoxHandle:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "headrace.deploy.shell"]
        command += ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
        try:
            with log_path(self._run_dir, spec.context.name).open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._run_dir,
                    env={**os.environ, **self._environment(spec)},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ProcessHandle(spec, process, ours)

    def close(self) -> None:
        """Nothing of its own is running."""

    def _environment(self, spec: BoxSpec) -> dict[str, str]:
        extra = {"PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1", RUN_MARK: self._run_dir}
        if spec.gpus and self._gpus:
            index = self._device_of.setdefault(spec.context.name, len(self._device_of) % self._gpus)
            extra |= {"CUDA_VISIBLE_DEVICES": str(index), "HIP_VISIBLE_DEVICES": str(index)}
        return extra
