"""What the supervisor must know of the model and the machine before it starts boxes. Reads the checkpoint's
description, never its tensors; imports no torch of its own."""

import dataclasses
import re
from pathlib import Path

from headrace.config import Config
from headrace.kvstore.layout import SlabLayout


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    layout: SlabLayout | None
    fingerprint: bytes


def read_facts(config: Config) -> ModelFacts:
    """Layout and fingerprint of the configured model. Raises CheckpointError."""
    from headrace.kvstore.names import fingerprint
    from headrace.model.spec import ModelSpec
    from headrace.model.weights_version import weights_version

    layout = ModelSpec.from_dir(config.model.path).slab_layout(config.kv.row_format)
    version = weights_version(config.model.path, config.model.load_format, config.model.dummy_seed)
    return ModelFacts(layout, fingerprint(version, layout))


def resolve(config: Config) -> Config:
    """The configuration as boxes get it: paths absolute (their working directory differs), `auto` formats chosen."""
    model = config.model
    if Path(model.path).is_dir():
        model = dataclasses.replace(model, path=str(Path(model.path).absolute()))
    row_format = config.kv.row_format
    if row_format == "auto":
        row_format = "plain576" if model.device != "cpu" and amd_gpus() else "tile656"
    store = dataclasses.replace(config.store, shm_dir=str(Path(config.store.shm_dir).absolute()))
    return dataclasses.replace(
        config, model=model, kv=dataclasses.replace(config.kv, row_format=row_format), store=store
    )


def gpu_count(config: Config) -> int:
    """Devices that ranks may use, without loading a GPU library."""
    if config.model.device == "cpu":
        return 0
    return nvidia_gpus() or amd_gpus()


def nvidia_gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def amd_gpus() -> int:
    """KFD lists CPUs too; only GPUs have SIMD units."""
    found = 0
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        match = re.search(r"^simd_count (\d+)", path.read_text(), re.MULTILINE)
        found += bool(match and int(match[1]))
    return found
