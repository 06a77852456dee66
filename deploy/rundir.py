"""The private directory of one run, and what a killed run left behind.

The directory's name is the run's id. A run holds a lock on its directory while its supervisor lives, so that a later
start can tell a dead run from a living one. Whatever a box creates outside the directory (shared memory) carries the id
at the front of its name.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.deploy.runner import log_path
from headrace.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "headrace-"
ENDPOINTS_FILE = "endpoints.json"
_LOCK_FILE = "lock"
_MAX_PATH_BYTES = 80
"""Unix sockets live in the directory; the kernel's limit for their whole path is 107 bytes."""


class RunDir:
    """Create (and lock) with `RunDir(...)`, give back with `close`."""

    def __init__(self, configured: str, shm_dir: str) -> None:
        """`configured`: deploy.run_dir; a directory that the user named keeps its logs at the end."""
        self._shm_dir = Path(shm_dir)
        self._keep = bool(configured)
        if configured:
            self.path = Path(configured).absolute()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            remove_stale(Path(tempfile.gettempdir()), self._shm_dir)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ConfigError(
                f"deploy.run_dir: {self.path} has {len(os.fsencode(self.path))} bytes; sockets in it need at most "
                f"{_MAX_PATH_BYTES}"
            )
        lock = _try_lock(self.path)
        if lock is None:
            raise ConfigError(f"deploy.run_dir: {self.path} is in use by another run")
        self._lock = lock
        if configured:
            _remove_shared(self._shm_dir, self.path.name)

    def write_endpoints(self, endpoints: Mapping[str, str]) -> None:
        """Publish who is where: one JSON object, name -> address, replaced as a whole."""
        scratch = self.path / f"{ENDPOINTS_FILE}.new"
        scratch.write_text(json.dumps(dict(endpoints), indent=1, sort_keys=True) + "\n")
        scratch.rename(self.path / ENDPOINTS_FILE)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The end of a box's log."""
        try:
            text = log_path(str(self.path), name).read_text(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"

    def close(self) -> None:
        """Remove the directory (of a configured one: all but the logs) and the run's shared memory."""
        _remove_shared(self._shm_dir, self.path.name)
        if self._keep:
            for entry in self.path.iterdir():
                if entry.suffix == ".log":
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(parent: Path, shm_dir: Path) -> list[str]:
    """Remove what dead runs left under `parent` and in `shm_dir`; the ids of the runs removed."""
    removed = []
    for path in parent.glob(f"{PREFIX}*"):
        if not (path / _LOCK_FILE).is_file() or path.stat().st_uid != os.getuid():
            continue
        lock = _try_lock(path)
        if lock is None:
            continue
        _remove_shared(shm_dir, path.name)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        removed.append(path.name)
        log.info("removed what a dead run left: %s", path)
    return removed


def _try_lock(path: Path) -> int | None:
    fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove_shared(shm_dir: Path, run_id: str) -> None:
    for path in shm_dir.glob(f"{run_id}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
