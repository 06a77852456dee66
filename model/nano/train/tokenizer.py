"""The tokenizer: a byte-level BPE trained on the corpus, with GLM's added tokens in GLM's order after the base ids.

Knows text and ids, nothing about the model. Both files it writes load with `tokenizers` and with `transformers`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headrace.model.nano.train.corpus import Package
from headrace.model.nano.train.shape import NanoShape

# Position i is id base_vocab_size + i. The order is GLM's, so offsets between them match GLM-5.2's.
CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
)
# Added but not "special": decoding with skip_special_tokens keeps them, because parsers need to see them.
MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
ADDED_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
# English contractions, words with one leading symbol, up to three digits, symbol runs, line ends, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A package gives at most this much text to the merges, so that no single one shapes the vocabulary.
PACKAGE_SAMPLE_BYTES = 1_500_000


def _sample(packages: list[Package]) -> Iterator[str]:
    for package in packages:
        stride = max(1, package.text_bytes // PACKAGE_SAMPLE_BYTES)
        for _, text in package.documents[::stride]:
            yield text


def train_tokenizer(packages: list[Package], shape: NanoShape) -> Tokenizer:
    """Byte-level BPE with `base_vocab_size` entries, then the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=shape.base_vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(packages), trainer)
    for token in ADDED_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token in CONTROL_TOKENS, normalized=False)])
    if tokenizer.get_vocab_size() != shape.used_vocab_size:
        raise RuntimeError(f"tokenizer has {tokenizer.get_vocab_size()} ids, the shape says {shape.used_vocab_size}")
    return tokenizer


def tokenizer_config_json(shape: NanoShape) -> dict[str, object]:
    """Content of `tokenizer_config.json`. The chat template lies in its own file beside it."""
    return {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "extra_special_tokens": list(CONTROL_TOKENS[1:]),
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": shape.max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "TokenizersBackend",
    }


def write_tokenizer(tokenizer: Tokenizer, shape: NanoShape, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config_json(shape), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n")
