"""Eviction policies by name. Others may add theirs under the entry point group `headrace.eviction_policies`."""

import importlib
from importlib.metadata import entry_points
from typing import cast

from headrace.errors import ConfigError
from headrace.kvstore.base import EvictionPolicy

ENTRY_POINT_GROUP = "headrace.eviction_policies"
_BUILT_IN = {
    "lru": "headrace.kvstore.policies.lru:LruPolicy",
    "lfu": "headrace.kvstore.policies.lfu:LfuPolicy",
    "s3fifo": "headrace.kvstore.policies.s3fifo:S3FifoPolicy",
    "arc": "headrace.kvstore.policies.arc:ArcPolicy",
    "gdsf": "headrace.kvstore.policies.gdsf:GdsfPolicy",
    "density": "headrace.kvstore.policies.density:DensityPolicy",
    "ttl": "headrace.kvstore.policies.ttl:TtlPolicy",
}


def policy_names() -> list[str]:
    """Names that `make_policy` knows now, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A fresh policy for a tier of `capacity_blocks` slots. `name` may carry one argument: "ttl:300". A policy class is
    called with (capacity_blocks, argument text). Raises ConfigError listing the known names."""
    kind, _, argument = name.partition(":")
    target = _BUILT_IN.get(kind)
    if target is not None:
        module, _, attribute = target.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        found = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == kind]
        if not found:
            raise ConfigError(f"eviction policy {kind!r} is not known; known: {', '.join(policy_names())}")
        try:
            factory = found[0].load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"eviction policy {kind!r} cannot be loaded: {error}") from error
    return cast(EvictionPolicy, factory(capacity_blocks, argument))
