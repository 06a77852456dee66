"""What a checkpoint says of itself, damaged in every way: one typed error that names the field."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CheckpointError
from headrace.model.shards import ShardFile
from headrace.model.spec import ModelSpec, parse_config, resolve_path

BASE = json.loads((resolve_path("glm-5.2-fp8") / "config.json").read_text())
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_types", 5),
        ("indexer_types", "full"),
        ("indexer_types", {}),
        ("mlp_layer_types", 5),
        ("mlp_layer_types", ["dense", 1]),
        ("rope_parameters", [1]),
        ("rope_parameters", "x"),
        ("rope_parameters", {"rope_type": ["a"]}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1}),
        ("rope_parameters", {**YARN, "original_max_position_embeddings": math.nan}),
        ("rope_parameters", {**YARN, "original_max_position_embeddings": 10**400}),
        ("rope_parameters", {**YARN, "factor": -4}),
        ("quantization_config", "fp8"),
        ("quantization_config", {"weight_block_size": 128}),
        ("eos_token_id", "x"),
        ("eos_token_id", ["a"]),
        ("eos_token_id", [-1]),
        ("eos_token_id", True),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", math.nan),
        ("routed_scaling_factor", math.inf),
        ("norm_topk_prob", "false"),
        ("rope_interleave", 1),
        ("tie_word_embeddings", []),
    ],
)
def test_an_absurd_field_is_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json cannot be served(.|\n)*(factor|original|{key}|rope_theta)"):
        parse_config({**BASE, key: value}, {}, None, "here")


@pytest.mark.parametrize("value", [5, "text", [], {}, True, -1, math.nan, 10**400, [None], {"a": []}])
def test_any_field_of_any_type_is_taken_or_refused_in_words(value: Any) -> None:
    for key in [*BASE, "rope_scaling", "index_topk_pattern", "num_nextn_predict_layers", "attention_bias"]:
        with contextlib.suppress(CheckpointError):
            parse_config({**BASE, key: value}, {}, None, "here")


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"added_tokens": 5}',
        b'{"added_tokens": [{}]}',
        b'{"added_tokens": [{"id": "x"}]}',
        b'{"model": []}',
        b'{"model": {"vocab": {"a": "b"}}}',
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ModelSpec.from_dir(tmp_path)


def shard(folder: Path, header: Any, nbytes: int) -> Path:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "a.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(nbytes))
    return file


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "-1, -2"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            "a and b share bytes",
        ),
        (b"[" * 100_000, "not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "cut off"),
        ({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]}}, "not a safetensors file"),
        ([], "not a safetensors file"),
    ],
)
def test_a_shard_that_is_not_sound(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ShardFile(shard(tmp_path, header, 12))


def test_a_shard_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*directory"):
        ShardFile(tmp_path)
