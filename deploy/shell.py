"""The thin shell of a box under the `process` launcher: `python -P -m headrace.deploy.shell --control FD --parent PID`.

The supervisor speaks length-framed msgpack over an inherited socket: {"id", "method": start|status|stop, ...}. The main
thread starts and stops the box, a reader thread answers `status`. The end of the stream means that the supervisor is
gone: the box stops at once, gracefully (so that shared memory goes too), and `_exit` follows if it does not.
"""

import argparse
import ctypes
import os
import queue
import signal
import socket
import threading
from typing import Any

from headrace.deploy.runner import BoxRunner, arm_exit
from headrace.deploy.wire import receive_frame, send_frame

_PR_SET_PDEATHSIG = 1
ORPHAN_GRACE_S = 0.5
ORPHAN_LIMIT_S = 2.5


class Shell:
    """Serves one control socket until `stop`, or until the other end closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._runner = BoxRunner()
        self._work: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def run(self) -> int:
        threading.Thread(target=self._read, name="control", daemon=True).start()
        while True:
            request = self._work.get()
            if request["method"] == "start":
                self._reply(request, self._runner.start(request["entry"], request["context"]))
                continue
            self._reply(request, self._runner.stop(request["grace_s"]))
            return 0

    def orphaned(self) -> None:
        """The supervisor is gone: stop, and make sure of it even if the main thread is busy."""
        arm_exit(ORPHAN_LIMIT_S)
        self._work.put({"method": "stop", "grace_s": ORPHAN_GRACE_S})

    def _read(self) -> None:
        while (request := receive_frame(self._control)) is not None:
            if request["method"] == "status":
                self._reply(request, self._runner.status())
            else:
                if request["method"] == "stop":
                    arm_exit(request["grace_s"] + ORPHAN_LIMIT_S)
                self._work.put(request)
        self.orphaned()

    def _reply(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        try:
            with self._sending:
                send_frame(self._control, {"id": request.get("id"), "pid": os.getpid(), **answer})
        except OSError:
            return  # the supervisor is gone; the reader thread has seen or will see it


def die_with(parent: int, on_death: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `on_death` to this process when its parent ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(on_death), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="headrace.deploy.shell")
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shell = Shell(socket.socket(fileno=args.control))
    signal.signal(signal.SIGTERM, lambda *_: shell.orphaned())
    die_with(args.parent)
    return shell.run()


if __name__ == "__main__":
    # Threads that a box left behind must not keep the process: what it owned is released by its `stop`.
    code = main()
    os._exit(code)
