"""The router's side of the node daemons: the directory that says who holds which block, and each node's status."""

from collections.abc import Mapping

from headrace.config import DirectoryConfig
from headrace.kvstore.base import Directory
from headrace.router.fleet import Box


def open_directory(config: DirectoryConfig, nodes: Mapping[str, str], token: str) -> Directory:
    """The directory that the configuration asks for (not started). `nodes`: node name -> control socket."""
    from headrace.kvstore.directory import make_directory

    directory: Directory = make_directory(config, nodes, token)
    return directory


def open_nodes(nodes: Mapping[str, str], token: str) -> dict[str, Box]:
    """Status and flush of the node daemons."""
    return {}
