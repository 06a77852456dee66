"""Who holds which block, as a router sees it: implementations of `base.Directory` by kind of URL."""

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from headrace.config import DirectoryConfig
from headrace.errors import ConfigError
from headrace.kvstore.base import Directory


def _in_process(config: DirectoryConfig, nodes: Mapping[str, str], fingerprint: bytes) -> Directory:
    from headrace.kvstore.directory.memory import InProcessDirectory

    return InProcessDirectory(nodes, fingerprint, poll_s=config.poll_s)


def _through_redis(config: DirectoryConfig, nodes: Mapping[str, str], fingerprint: bytes) -> Directory:
    from headrace.kvstore.directory.through_redis import RedisDirectory

    return RedisDirectory(config.url, fingerprint, poll_s=config.poll_s)


_CREATORS: dict[str, Callable[[DirectoryConfig, Mapping[str, str], bytes], Directory]] = {
    "": _in_process,
    "redis": _through_redis,
    "rediss": _through_redis,
    "unix": _through_redis,
}


def make_directory(config: DirectoryConfig, nodes: Mapping[str, str], fingerprint: bytes = b"") -> Directory:
    """The directory that the configuration asks for, not started. `nodes`: node name -> "unix:/..." of its daemon
    (Redis knows them itself).
    `fingerprint`: `kvstore.names.fingerprint`; a daemon with another one is not listened to; empty: any."""
    scheme = urlsplit(config.url).scheme
    if scheme not in _CREATORS:
        raise ConfigError(f"directory.url: {config.url!r} has none of the schemes {', '.join(filter(None, _CREATORS))}")
    return _CREATORS[scheme](config, nodes, fingerprint)
