"""What is served: name, context length, end-of-sequence ids, sampling defaults, tokenizer and template of a checkpoint.

Read once at start from the checkpoint's JSON files. Knows no tensors and no requests.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import CheckpointError
from headrace.model.grammar import Grammars
from headrace.model.nano import checkpoint_path
from headrace.router.tokens.template import ChatTemplate
from headrace.router.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    path: Path
    context_tokens: int
    """Longest prompt + answer."""
    vocabulary: int
    """Ids below this may appear in a prompt."""
    eos_ids: tuple[int, ...]
    defaults: dict[str, float]
    """`temperature`, `top_p`, `top_k` of generation_config.json, where it has them."""
    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: Callable[[], Grammars]
    """Made at the first call (a second for a large vocabulary), so call it on a worker thread."""


def load_served_model(config: Config) -> ServedModel:
    """Raises CheckpointError naming the file that is missing or wrong."""
    nano = config.model.path == "nano"
    path = checkpoint_path() if nano else Path(config.model.path)
    shape = _read_json(path / "config.json", required=True)
    generation = _read_json(path / "generation_config.json", required=False)
    tokenizer = Tokenizer(path)
    allowed = int(shape.get("max_position_embeddings", 0))
    if allowed < 2:
        raise CheckpointError(f"{path / 'config.json'}: max_position_embeddings is {allowed}")
    if config.router.max_context > allowed:
        raise CheckpointError(f"router.max_context {config.router.max_context} exceeds the model's {allowed} tokens")
    eos = generation.get("eos_token_id", shape.get("eos_token_id", ()))
    eos_ids = tuple(eos) if isinstance(eos, list) else (int(eos),)
    vocabulary = int(shape.get("vocab_size", tokenizer.size))
    return ServedModel(
        name=config.model.name or path.name if not nano else config.model.name or "nano",
        path=path,
        context_tokens=config.router.max_context or allowed,
        vocabulary=min(tokenizer.size, vocabulary),
        eos_ids=eos_ids,
        defaults={k: float(generation[k]) for k in ("temperature", "top_p", "top_k") if k in generation},
        tokenizer=tokenizer,
        template=ChatTemplate(path),
        grammars=functools.cache(lambda: Grammars(path, vocabulary, eos_ids)),
    )


def _read_json(file: Path, *, required: bool) -> dict[str, Any]:
    if not file.exists() and not required:
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return raw
