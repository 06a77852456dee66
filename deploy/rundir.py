"""The private directory of one run, and what a killed run left behind.

The directory's name is the run's id. A run holds a lock on its directory while its supervisor lives, so that a later
start can tell a dead run from a living one. Whatever a box creates outside the directory (shared memory) carries the id
at the front of its name, and every process of the run has the directory in its environment under `RUN_MARK`.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from headrace.deploy.runner import import_path, log_path
from headrace.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "headrace-"
ENDPOINTS_FILE = "endpoints.json"
RUN_MARK = "HEADRACE_RUN_DIR"
"""Only a mark to recognise a run's processes by; nothing reads it as a setting."""
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
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"deploy.run_dir: cannot create {self.path}: {error.strerror}") from error
        else:
            parent = _runs_parent()
            remove_stale(parent, self._shm_dir)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
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
            _end_processes(self.path)
            _remove_shared(self._shm_dir, self.path.name)
        self._sentinel, self._pipe = _start_sentinel(self.path, self._shm_dir)

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
            _remove_all_but_logs(self.path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._sentinel.wait(2.0)
        os.close(self._lock)


def remove_stale(parent: Path, shm_dir: Path) -> list[str]:
    """Remove what dead runs left under `parent` and in `shm_dir`; the ids of the runs removed."""
    removed = []
    for path in parent.glob(f"{PREFIX}*"):
        if is_run(path) and path.stat().st_uid == os.getuid() and remove_run(path, shm_dir):
            removed.append(path.name)
            log.info("removed what a dead run left: %s", path)
    return removed


def living_runs() -> list[Path]:
    """Directories of this user's running services, unless `deploy.run_dir` put them elsewhere."""
    found = []
    for path in sorted(_runs_parent().glob(f"{PREFIX}*")):
        if is_run(path) and path.stat().st_uid == os.getuid():
            lock = _try_lock(path)
            if lock is None:
                found.append(path)
            else:
                os.close(lock)
    return found


def _runs_parent() -> Path:
    """The system's temp directory, or /tmp where sockets would not fit into that."""
    temp = Path(tempfile.gettempdir())
    return temp if len(os.fsencode(temp)) + len(PREFIX) + 10 <= _MAX_PATH_BYTES else Path("/tmp")


def is_run(path: Path) -> bool:
    """Whether the directory is that of a run that did not end in order."""
    return (path / _LOCK_FILE).is_file()


def remove_run(path: Path, shm_dir: Path) -> bool:
    """End the processes of a dead run and remove its files. False: it is alive, or somebody else is at it."""
    lock = _try_lock(path)
    if lock is None:
        return False
    _end_processes(path)
    _remove_shared(shm_dir, path.name)
    if path.name.startswith(PREFIX):
        shutil.rmtree(path, ignore_errors=True)
    else:
        _remove_all_but_logs(path)
    os.close(lock)
    return True


def marked_processes(run_dir: Path) -> list[psutil.Process]:
    """Processes that were started for the run, whoever is their parent now."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_marked(process, run_dir)]


def _is_marked(process: psutil.Process, run_dir: Path) -> bool:
    try:
        if process.environ().get(RUN_MARK) == str(run_dir):
            return True
        # Ray's Python processes write their title over their environment, but still stand where they were started.
        title = (process.cmdline() or [""])[0]
        return title.startswith("ray::") and process.cwd() == str(run_dir)
    except (psutil.Error, OSError):
        return False


def _end_processes(run_dir: Path) -> None:
    processes = marked_processes(run_dir)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, 2.0)


def _start_sentinel(path: Path, shm_dir: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the descriptor whose closing tells it that this process ended."""
    theirs, ours = os.pipe()
    command = [sys.executable, "-P", "-m", "headrace.deploy.sentinel", "--pipe", str(theirs)]
    command += ["--run-dir", str(path), "--shm-dir", str(shm_dir)]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs,),
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    finally:
        os.close(theirs)
    return process, ours


def _remove_all_but_logs(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.suffix != ".log":
            entry.unlink(missing_ok=True)


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
