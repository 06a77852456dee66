"""Runs one box inside its own process: what the `process` shell and the Ray actor have in common.

Knows neither sockets nor Ray. All answers are plain values: {"ok": ...} or {"error": [kind, text]}.
"""

import faulthandler
import importlib
import logging
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
from headrace import logs
from headrace.deploy.base import Box
from headrace.deploy.wire import context_from_plain
from headrace.errors import ConfigError, HeadraceError
from headrace.ids import new_incarnation

log = logging.getLogger(__name__)

STOP_SLACK_S = 1.5
"""A box that has not stopped this long after its grace period is ended by `_exit`, even if it holds the GIL."""


def log_path(run_dir: str, name: str) -> Path:
    return Path(run_dir) / f"{name}.log"


def redirect_output(path: Path) -> None:
    """Standard output and error of this process, C code included, go to the end of `path`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def load_entry(entry: str) -> Callable[..., Box]:
    """`package.module:Class` -> the class. Raises ConfigError."""
    module_name, _, class_name = entry.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load box {entry!r}: {error}") from error


class BoxRunner:
    """One box from start to stop. `start` and `stop` come from one thread, `status` from any."""

    def __init__(self) -> None:
        self.incarnation = new_incarnation()
        self._box: Box | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, entry: str, plain: dict[str, Any]) -> dict[str, Any]:
        """Construct and start the box."""

        def work() -> dict[str, str]:
            context = context_from_plain(plain)
            logs.setup(context.name)
            box = load_entry(entry)(context)
            self._box = box
            return dict(box.start())

        return guarded(work)

    def status(self) -> dict[str, Any]:
        box = self._box
        if box is None:
            return {"ok": {"ready": False, "incarnation": self.incarnation}}
        return guarded(lambda: {"incarnation": self.incarnation, **box.status()})

    def stop(self, grace_s: float) -> dict[str, Any]:
        """Stop the box once; later calls do nothing."""
        with self._lock:
            if self._stopped or self._box is None:
                self._stopped = True
                return {"ok": None}
            self._stopped = True
        arm_exit(grace_s + STOP_SLACK_S)
        box = self._box
        return guarded(lambda: box.stop(grace_s))


def guarded(work: Callable[[], Any]) -> dict[str, Any]:
    """Run `work`; an exception becomes a plain value, and an unexpected one is also logged with its traceback."""
    try:
        return {"ok": work()}
    except HeadraceError as error:
        log.error("%s: %s", error.kind, error)
        return {"error": [error.kind, str(error)]}
    except Exception as error:
        traceback.print_exc()
        return {"error": ["EngineError", f"{type(error).__name__}: {error}"]}


def arm_exit(after_s: float) -> None:
    """End this process after `after_s`, from a C thread that needs no GIL, and leave the stacks in the log."""
    faulthandler.dump_traceback_later(max(after_s, 0.1), exit=True)


def import_path() -> str:
    """PYTHONPATH for a child whose working directory is elsewhere: where this Headrace is, then what was set here."""
    here = str(Path(headrace.__file__).absolute().parent.parent)
    given = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return os.pathsep.join(dict.fromkeys([here, *given]))
