"""Turns `auto` settings into what a rank runs: device, arithmetic, row format. One place, so ranks cannot disagree."""

from pathlib import Path

import torch

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.model.grammar import Grammars
from headrace.model.load import load_model
from headrace.model.nano import checkpoint_path
from headrace.model.placement import WHOLE, Placement
from headrace.model.progress import load_progress
from headrace.model.spec import ModelSpec
from headrace.model.transformer import Transformer


def device_of(config: Config, local_index: int = 0) -> torch.device:
    """`local_index`: which GPU of this host the rank has. Raises ConfigError if there is none."""
    wanted = config.model.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        count = torch.cuda.device_count()
        if local_index >= count:
            raise ConfigError(
                f"model.device: cuda, but this host has {count} GPUs and the rank wants number {local_index}"
            )
        return torch.device("cuda", local_index)
    return torch.device(wanted)


def deterministic_of(config: Config, device: torch.device) -> bool:
    if config.model.deterministic == "auto":
        return device.type == "cpu"
    return config.model.deterministic == "on"


def row_format_of(config: Config, device: torch.device) -> str:
    if config.kv.row_format != "auto":
        return config.kv.row_format
    return "plain576" if device.type == "cuda" and torch.version.hip else "tile656"


def load_from_config(
    config: Config, spec: ModelSpec, placement: Placement = WHOLE, *, local_index: int = 0
) -> Transformer:
    """The model of one rank, as the configuration says. Sets the thread count of this process: with more or fewer
    threads sums come out in another order, so it is part of the determinism contract."""
    torch.set_num_threads(config.model.threads)
    device = device_of(config, local_index)
    return load_model(
        spec,
        config.model.path,
        config.model.load_format,
        device,
        placement,
        row_format_of(config, device),
        deterministic_of(config, device),
        kernels=config.model.kernels,
        dummy_seed=config.model.dummy_seed,
        progress=load_progress(),
    )


def load_grammars(path: str, spec: ModelSpec) -> Grammars | None:
    """Over the checkpoint's tokenizer; None when it has none (dummy weights), where requests with grammars fail."""
    folder = checkpoint_path() if path == "nano" else Path(path)
    if not (folder / "tokenizer.json").exists():
        return None
    return Grammars(folder, spec.vocab_size, spec.eos_token_ids)
