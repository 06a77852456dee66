"""The configuration tree and its loader."""

from headrace.config.load import from_dict, load_config, to_dict
from headrace.config.tree import (
    Config,
    DecodeConfig,
    DeployConfig,
    DirectoryConfig,
    KvConfig,
    ModelConfig,
    PrefillConfig,
    RouterConfig,
    StoreConfig,
)

__all__ = [
    "Config",
    "DecodeConfig",
    "DeployConfig",
    "DirectoryConfig",
    "KvConfig",
    "ModelConfig",
    "PrefillConfig",
    "RouterConfig",
    "StoreConfig",
    "from_dict",
    "load_config",
    "to_dict",
]
