"""Launcher `ray`: every box is one Ray actor. Ray places, watches and kills; it never carries a tensor, and what an
actor's methods take and give is msgpack.

Without an address a cluster of its own is started: on loopback only, without dashboard and usage reports, with the
smallest object store Ray accepts, and with all its files in a directory that goes with it.
"""

import contextlib
import importlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from headrace.deploy.base import BoxHandle, BoxSpec
from headrace.deploy.rundir import RUN_MARK
from headrace.deploy.runner import STOP_SLACK_S, BoxRunner, import_path, log_path, redirect_output
from headrace.deploy.wire import context_to_plain, pack, unpack
from headrace.errors import ConfigError, RankLost, from_wire
from headrace.ids import Incarnation

OBJECT_STORE_BYTES = 80 << 20
"""Ray refuses less than 75 MiB; nothing of ours goes through it."""
_SESSION_PATH_BYTES = 72
"""What Ray appends for its longest socket: /session_<date>_<time>_<micros>_<pid>/sockets/plasma_store"""
_SOCKET_PATH_BYTES = 107
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off, Ray takes 127.0.0.1 for its own address and opens no port to the outside.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class BoxActor:
    """The thin shell inside Ray's worker. Arguments and results are msgpack bytes."""

    def __init__(self, log_file: str, home: str) -> None:
        redirect_output(Path(log_file))
        if home:
            os.environ["HOME"] = home
        self._runner = BoxRunner()

    def hold(self) -> None:
        """Never returns: the reference fails when this process ends, which is how the supervisor sees it."""
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()

    def start(self, request: bytes) -> bytes:
        entry, context = unpack(request)
        return pack(self._runner.start(entry, context))

    def status(self) -> bytes:
        return pack(self._runner.status())

    def stop(self, grace_s: float) -> bytes:
        return pack(self._runner.stop(grace_s))


class RayHandle:
    """One actor. `pid` is known once it runs; it is 0 for an actor on another host's cluster until then."""

    def __init__(self, ray: Any, spec: BoxSpec, actor: Any, *, local: bool) -> None:
        self.incarnation = Incarnation("")
        self.pid = 0
        self._ray = ray
        self._spec = spec
        self._actor = actor
        self._local = local
        self._life = actor.hold.remote()

    def start(self, timeout_s: float) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        self.pid = self._get(self._actor.pid.remote(), timeout_s, "be placed")
        body = pack([self._spec.entry, context_to_plain(self._spec.context)])
        endpoints: dict[str, str] = self._answer(
            self._actor.start.remote(body), max(deadline - time.monotonic(), 0.1), "start"
        )
        self.incarnation = Incarnation(str(self.status(10.0).get("incarnation", "")))
        return endpoints

    def status(self, timeout_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = self._answer(self._actor.status.remote(), timeout_s, "status")
        return answer

    def stop(self, grace_s: float) -> None:
        with contextlib.suppress(Exception):
            self._answer(self._actor.stop.remote(grace_s), grace_s + STOP_SLACK_S, "stop")
            self._ray.kill(self._actor, no_restart=True)
            if self._local:
                psutil.Process(self.pid).wait(1.0)  # gone in order, Ray does not report a crash
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)
        if self._local and self.pid:
            _kill_and_wait([self.pid], 5.0)

    def alive(self) -> bool:
        done, _ = self._ray.wait([self._life], timeout=0)
        return not done

    def _answer(self, reference: Any, timeout_s: float, what: str) -> Any:
        answer = unpack(self._get(reference, timeout_s, what))
        if "error" in answer:
            raise from_wire(*answer["error"])
        return answer["ok"]

    def _get(self, reference: Any, timeout_s: float, what: str) -> Any:
        name = self._spec.context.name
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise RankLost(f"{name}: did not {what} within {timeout_s:g} s") from None
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            raise RankLost(f"{name} (process {self.pid}) was lost at {what}: {first}") from None


class RayLauncher:
    """Owns the local cluster it started, or its connection to an existing one."""

    def __init__(self, run_dir: str, address: str, cpus: float, gpus: int) -> None:
        self._run_dir = run_dir
        self._local = not address
        self._temp_dir = ""
        self._home = ""
        self._cluster: list[psutil.Process] = []
        before = {child.pid for child in psutil.Process().children()}
        os.environ.update(_SETTINGS)  # read by Ray when it is imported
        self._ray = importlib.import_module("ray")
        if self._ray.is_initialized():
            raise ConfigError("deploy.launcher: this process is already connected to a Ray cluster")
        try:
            if self._local:
                self._start_cluster(cpus, gpus)
            else:
                self._ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="headrace")
        except BaseException:
            self._roots = _new_children(before)
            self.close()
            raise
        self._roots = _new_children(before)

    def launch(self, spec: BoxSpec) -> BoxHandle:
        options: dict[str, Any] = {"num_cpus": spec.cpus, "max_restarts": 0, "max_concurrency": 4}
        if spec.gpus:
            options["num_gpus"] = spec.gpus
        actor_class = self._ray.remote(**options)(BoxActor)
        actor = actor_class.remote(str(log_path(self._run_dir, spec.context.name)), self._home)
        return RayHandle(self._ray, spec, actor, local=self._local)

    def close(self) -> None:
        cluster = _with_descendants(self._roots)
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        if self._local:
            _, left = psutil.wait_procs(cluster, 2.0)
            _kill_and_wait([process.pid for process in left if process.is_running()], 2.0)
        if self._temp_dir:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _start_cluster(self, cpus: float, gpus: int) -> None:
        self._temp_dir = ray_temp_dir(self._run_dir)
        self._home = str(Path.home())
        # Ray's dashboard process otherwise asks the cloud's metadata service who provides this machine.
        Path(self._temp_dir, "ray_bootstrap_config.yaml").write_text("provider: {type: local}\n")
        environment = {"HOME": self._temp_dir, "PYTHONPATH": import_path(), "PYTHONSAFEPATH": "1"}
        environment[RUN_MARK] = self._run_dir
        # Workers import from the directory that the driver was in: never the repository.
        with _environment(environment), contextlib.chdir(self._run_dir):
            self._ray.init(
                address="local",
                num_cpus=max(1, round(cpus + 0.5)),
                num_gpus=gpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                namespace="headrace",
                _temp_dir=self._temp_dir,
            )


def ray_temp_dir(run_dir: str) -> str:
    """A directory for Ray's files whose socket paths stay below the kernel's 107 bytes."""
    inside = Path(run_dir) / "ray"
    if len(os.fsencode(inside)) + _SESSION_PATH_BYTES <= _SOCKET_PATH_BYTES:
        inside.mkdir(mode=0o700, exist_ok=True)
        return str(inside)
    return tempfile.mkdtemp(prefix="headrace-ray-", dir="/tmp")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside; then put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _new_children(before: set[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in before]


def _with_descendants(roots: list[psutil.Process]) -> list[psutil.Process]:
    found = list(roots)
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += root.children(recursive=True)
    return found


def _kill_and_wait(pids: list[int], timeout_s: float) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
            os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout_s)


__all__ = ["BoxActor", "RayHandle", "RayLauncher", "ray_temp_dir"]
