"""Launchers by name. Ray is imported only when it is asked for."""

from collections.abc import Callable

from headrace.config import Config
from headrace.deploy.base import Launcher
from headrace.errors import ConfigError


def _process(config: Config, run_dir: str, cpus: float, gpus: int) -> Launcher:
    from headrace.deploy.launchers.process import ProcessLauncher

    return ProcessLauncher(run_dir, gpus)


def _ray(config: Config, run_dir: str, cpus: float, gpus: int) -> Launcher:
    from headrace.deploy.launchers.ray import RayLauncher

    return RayLauncher(run_dir, config.deploy.ray_address, cpus, gpus)


LAUNCHERS: dict[str, Callable[[Config, str, float, int], Launcher]] = {"process": _process, "ray": _ray}


def make_launcher(config: Config, run_dir: str, cpus: float, gpus: int) -> Launcher:
    """The launcher `deploy.launcher` names, for boxes that need `cpus` and `gpus` in all. Raises ConfigError."""
    make = LAUNCHERS.get(config.deploy.launcher)
    if make is None:
        raise ConfigError(f"deploy.launcher: {config.deploy.launcher!r} is not one of {', '.join(LAUNCHERS)}")
    return make(config, run_dir, cpus, gpus)
