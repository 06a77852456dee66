"""Starts a whole service, watches it, restarts what dies, and leaves nothing behind.

Order of start: node daemon, then prefill and decode groups side by side, then the router. Order of stop: the router
drains, then everything else at once. Use it from one long-lived thread; `request_stop` may come from a signal handler.
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.config import Config
from headrace.deploy.base import Launcher
from headrace.deploy.facts import ModelFacts, gpu_count, read_facts, resolve
from headrace.deploy.launchers import make_launcher
from headrace.deploy.plan import ROUTER, Entries, Shared, box_specs, plan_units, total_cpus
from headrace.deploy.rundir import RunDir
from headrace.deploy.unit import Unit, UnitState, merge_endpoints
from headrace.errors import Cancelled, HeadraceError

log = logging.getLogger(__name__)

TICK_S = 0.1
REST_GRACE_S = 1.0
"""Grace of the boxes behind the router, once it has drained."""


class Supervisor:
    """`start`, `watch` until a stop is requested, `close` in any case."""

    def __init__(
        self,
        config: Config,
        *,
        entries: Entries | None = None,
        facts: Callable[[Config], ModelFacts] = read_facts,
    ) -> None:
        self._config = resolve(config)
        self._entries = entries or Entries()
        self._facts = facts
        self._stop_requested = False
        self._launcher: Launcher | None = None
        self._run_dir: RunDir | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._shared: Shared | None = None
        self._router_endpoint: dict[str, str] = {}
        self.units: dict[str, Unit] = {}
        self.after_launcher: Callable[[], None] = lambda: None
        """Called once the launcher is up: Ray replaces signal handlers."""

    @property
    def run_dir(self) -> str:
        return str(self._run_dir.path) if self._run_dir else ""

    @property
    def endpoints(self) -> dict[str, str]:
        """What is served now, by name."""
        return merge_endpoints(self.units)

    def request_stop(self) -> None:
        self._stop_requested = True  # a plain flag: an Event's lock could deadlock with a signal handler

    def start(self) -> dict[str, str]:
        """Start everything; the endpoints. Raises HeadraceError with the end of the log of the box at fault, or
        Cancelled when a stop was requested meanwhile."""
        facts = self._facts(self._config)
        deploy = self._config.deploy
        run_dir = self._run_dir = RunDir(deploy.run_dir, self._config.store.shm_dir)
        gpus = gpu_count(self._config)
        plans = plan_units(self._config, self._entries, gpus)
        self._launcher = make_launcher(self._config, self.run_dir, total_cpus(plans), gpus)
        self.after_launcher()
        self._pool = ThreadPoolExecutor(4 * sum(plan.world for plan in plans), thread_name_prefix="supervise")
        self._shared = Shared(
            config=self._config,
            run_dir=self.run_dir,
            token=secrets.token_urlsafe(24),
            layout=facts.layout,
            fingerprint=facts.fingerprint,
        )
        self.units = {plan.name: Unit(plan, self._launcher, self._pool) for plan in plans}
        while not self._all_ready():
            for unit in self.units.values():
                if unit.state is UnitState.IDLE and all(self._is_ready(name) for name in unit.plan.after):
                    self._begin(unit)
                if (error := unit.poll()) is not None:
                    tail = run_dir.log_tail(unit.lost_box)
                    raise type(error)(f"{error}\n--- end of {unit.lost_box}.log ---\n{tail}") from error
            self._pause()
            if self._stop_requested:
                raise Cancelled("stopped while starting")
        self._publish()
        return self.endpoints

    def watch(self) -> int:
        """Until a stop is requested: 0. When something died and `deploy.restart` is off: 1."""
        while not self._stop_requested:
            for unit in self.units.values():
                if not self._watch_unit(unit):
                    return 1
            self._pause()
        return 0

    def close(self, grace_s: float | None = None) -> None:
        """Drain the router for `grace_s` (None: deploy.grace_s), stop everything, remove every trace."""
        grace = self._config.deploy.grace_s if grace_s is None else grace_s
        units = dict(self.units)
        router = units.pop(ROUTER, None)
        if router is not None:
            router.stop(grace)
        stoppers = [threading.Thread(target=unit.stop, args=(REST_GRACE_S,)) for unit in units.values()]
        for thread in stoppers:
            thread.start()
        for thread in stoppers:
            thread.join()
        if self._launcher is not None:
            self._launcher.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        if self._run_dir is not None:
            self._run_dir.close()
        self.units, self._launcher, self._pool, self._run_dir = {}, None, None, None

    def kill_now(self) -> None:
        """No grace: SIGKILL to every box, then remove what they left. For a second Ctrl-C."""
        for unit in self.units.values():
            for pid in unit.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.close()
        if self._run_dir is not None:
            self._run_dir.close()

    def _watch_unit(self, unit: Unit) -> bool:
        was = unit.state
        error = unit.poll()
        if error is not None:
            self._log_loss(unit, error)
            self._publish()
            if not self._config.deploy.restart:
                return False
        elif unit.state is UnitState.READY and was is UnitState.STARTING:
            log.info("%s is back: %s", unit.plan.name, unit.endpoints)
            self._publish()
        if unit.state is UnitState.IDLE and time.monotonic() >= unit.not_before_s:
            unit.restarts += 1
            self._begin(unit)
        return True

    def _log_loss(self, unit: Unit, error: HeadraceError) -> None:
        assert self._run_dir is not None
        tail = self._run_dir.log_tail(unit.lost_box, 5)
        log.error("%s; %s goes down as a whole. End of the log:\n%s", error, unit.plan.name, tail)

    def _begin(self, unit: Unit) -> None:
        assert self._shared is not None
        known = self._router_endpoint | self.endpoints
        log.info("starting %s", unit.plan.name)
        unit.begin(box_specs(unit.plan, self._shared, known), self._config.deploy.start_timeout_s)

    def _publish(self) -> None:
        assert self._run_dir is not None
        endpoints = self.endpoints
        if ROUTER in endpoints:
            self._router_endpoint = {ROUTER: endpoints[ROUTER]}
        self._run_dir.write_endpoints(endpoints)

    def _is_ready(self, name: str) -> bool:
        return self.units[name].state is UnitState.READY

    def _all_ready(self) -> bool:
        return all(unit.state is UnitState.READY for unit in self.units.values())

    def _pause(self) -> None:
        time.sleep(TICK_S)


def install_signals(supervisor: Supervisor) -> None:
    """SIGTERM and SIGINT stop the service; the second of them kills it at once."""
    seen = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            supervisor.request_stop()
            return
        try:
            supervisor.kill_now()
        finally:
            os._exit(128 + number)

    def install() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

    install()
    supervisor.after_launcher = install
