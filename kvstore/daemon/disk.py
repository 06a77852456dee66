"""A node's disk tier from its settings."""

from pathlib import Path

from headrace.config import StoreConfig
from headrace.errors import ConfigError
from headrace.kvstore.daemon.lower import DiskSide
from headrace.kvstore.disk.base import SlabFile
from headrace.kvstore.disk.file import SUFFIX, open_file, slots_in
from headrace.kvstore.disk.store import DiskStore
from headrace.kvstore.disk.tier import DiskTier
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.policies import make_policy
from headrace.kvstore.policies.write import make_write_policy


def make_disk_side(store: StoreConfig, node: str, fingerprint: bytes, layout: SlabLayout) -> DiskSide | None:
    """The disk tier, opened and recovered; None when none is configured. A disk that does not work gives a tier that is
    off. Raises ConfigError."""
    if not store.disk_bytes:
        return None
    if not store.disk_dir:
        raise ConfigError("store.disk_dir: a disk tier (store.disk_bytes > 0) needs a directory that outlives the run")
    policy = make_write_policy(store.disk_write_policy)
    path = Path(store.disk_dir) / f"{node}{SUFFIX}"
    slots = slots_in(store.disk_bytes, layout.slot_bytes)

    def opened() -> SlabFile:
        return open_file(path, fingerprint=fingerprint, disk_bytes=store.disk_bytes, slot_bytes=layout.slot_bytes)

    disk = DiskStore(
        DiskTier(slots=slots, slot_bytes=layout.slot_bytes, policy=make_policy(store.disk_policy, slots)),
        opened,
        payload_bytes=layout.payload_bytes,
        threads=store.disk_depth,
        timeout_s=store.disk_timeout_s,
        retry_s=store.disk_retry_s,
    )
    disk.open()
    return DiskSide(store=disk, policy=policy, admit_uses=store.disk_admit_uses, depth=store.disk_depth)
