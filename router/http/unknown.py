"""Fields of a request that this service does not know: refused, as the original APIs refuse them, so that a misspelt
setting is not silently without effect. What is known and changes nothing here is ignored; what other servers offer and
this one does not is ignored only as long as it asks for nothing."""

from collections.abc import Iterable
from typing import Any

from headrace.errors import InputError

_OPENAI = (
    "metadata prediction prompt_cache_key prompt_cache_retention prompt_cache_options safety_identifier service_tier "
    "store user verbosity"
)
_ANTHROPIC = "cache_control container inference_geo betas"
_SERVERS = (
    "add_special_tokens bootstrap_host bootstrap_port bootstrap_room cache_salt data_parallel_rank documents extra_key "
    "include_reasoning kv_transfer_params nvext request_id return_cached_tokens_details rid separate_reasoning "
    "session_params spaces_between_special_tokens stream_reasoning tool_stream return_tokens_as_token_ids "
    "user_agent vllm_xargs"
)
IGNORED = frozenset(f"{_OPENAI} {_ANTHROPIC} {_SERVERS}".split())

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "context_management": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Field -> values that ask for nothing, beside null."""


def check_unknown(raw: dict[str, Any], known: Iterable[str], *, anthropic: bool = False) -> None:
    """Raises InputError naming the first field that is not known."""
    names = set(known)
    for name, value in raw.items():
        if name in names or value is None or (name in IGNORED and name not in NEUTRAL):
            continue
        if name in NEUTRAL:
            if value in NEUTRAL[name]:
                continue
            raise InputError(f"{name}: {str(value)[:60]!r} is not supported", name)
        shown = name[:100]
        text = f"{shown}: Extra inputs are not permitted" if anthropic else f"Unrecognized request argument: {shown}"
        raise InputError(text, shown)
