"""`headrace generate`: text from a prompt, by the one-process reference engine."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, InputError

HELP = "Generate text in this process with the reference engine (no router, store or pools)"
EXAMPLE = 'headrace generate --mono --prompt "def fibonacci(n):" --max-tokens 64 --temperature 0'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mono", action="store_true", help="the one-process engine; the only one of this command")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path)
    prompt.add_argument("--token-ids", metavar="ID,ID,...", help="skip the tokenizer")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="0: no speculation")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")


def run(args: argparse.Namespace) -> int:
    if not args.mono:
        raise ConfigError("only `generate --mono` exists; a served model answers over HTTP (`headrace serve`)")
    from headrace.messages import SamplingParams
    from headrace.model.choose import load_from_config
    from headrace.model.mono import MonoEngine
    from headrace.model.spec import ModelSpec, resolve_path

    config = args.config
    spec = ModelSpec.from_dir(config.model.path)
    tokenizer = _tokenizer(resolve_path(config.model.path) / "tokenizer.json")
    tokens = _prompt_tokens(args, tokenizer)
    started = time.perf_counter()
    model = load_from_config(config, spec)
    load_s = time.perf_counter() - started
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop_token_ids=() if args.ignore_eos else spec.eos_token_ids,
    )
    result = MonoEngine(model, prefill_chunk=config.prefill.chunk_tokens).generate(tokens, params, args.draft_tokens)
    decoded = len(result.tokens) - 1
    stats = {
        "prompt_tokens": len(tokens),
        "completion_tokens": len(result.tokens),
        "finish_reason": result.finish_reason,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "tokens_per_step": round(decoded / result.steps, 3) if result.steps else None,
        "load_s": round(load_s, 3),
        "prefill_tokens_per_s": round(len(tokens) / result.prefill_s, 1),
        "decode_tokens_per_s": round(decoded / result.decode_s, 1) if decoded else None,
    }
    _show(args, tokenizer, result.tokens, stats)
    return 0


def _tokenizer(path: Path) -> Any:
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _prompt_tokens(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    if args.token_ids is not None:
        try:
            return [int(item) for item in args.token_ids.split(",")]
        except ValueError as error:
            raise InputError(f"--token-ids: {error}; expected integers separated by commas") from error
    if tokenizer is None:
        raise InputError("the checkpoint has no tokenizer.json; use --token-ids")
    text = args.prompt if args.prompt is not None else args.prompt_file.read_text()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _show(args: argparse.Namespace, tokenizer: Any, tokens: list[int], stats: dict[str, Any]) -> None:
    text = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer is not None else None
    if args.json:
        print(json.dumps({"text": text, "tokens": tokens, **stats}))
        return
    print(text if text is not None else " ".join(map(str, tokens)))
    print(", ".join(f"{name} {value}" for name, value in stats.items()), file=sys.stderr)
