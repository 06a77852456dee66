"""`headrace explain ID`: what became of a request, and why it did or did not hit."""

import argparse
import json
import urllib.parse
from typing import Any

from headrace.deploy.commands.status import default_url, fetch
from headrace.errors import HeadraceError

HELP = "What became of a request: where it went and why, what it hit, how long each stage took, where it parted."
EXAMPLE = "headrace explain chatcmpl-5f0c2b7e9d3a1c4e6b8f0a2d"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", help="x-request-id of the response; without it: the latest requests")
    parser.add_argument("--url", help="where the router answers (default: router.host and router.port)")
    parser.add_argument("--key", default="", help="API key of the request's tenant, or the admin key")


def run(args: argparse.Namespace) -> int:
    url = (args.url or default_url(args.config)).rstrip("/")
    path = f"/requests/{urllib.parse.quote(args.id, safe='')}" if args.id else "/requests"
    code, body = fetch(url + path, args.key or args.config.router.admin_key)
    if code != 200:
        raise HeadraceError(f"{url}{path} answers {code}: {body[:300]}")
    found = json.loads(body)
    if args.json:
        print(json.dumps(found))
    elif args.id:
        print("\n".join(report(found)))
    else:
        for one in found["data"]:
            print(f"{one['id']}  {one['outcome']:10}  {one['prompt_tokens']:8} tokens  {one['path']}")
    return 0


def report(found: dict[str, Any]) -> list[str]:
    """Lines for a person."""
    lines = [
        f"{found['id']}  {found['path']}  {found['outcome']}",
        f"{found['prompt_tokens']} prompt tokens; ready {_ms(found['ready_s'])}, over {_ms(found['ended_s'])} later",
    ]
    for attempt in found["attempts"]:
        lines += _attempt(attempt)
    for prompt in found["prompts"]:
        lines += _prompt(prompt)
    return lines


def _attempt(attempt: dict[str, Any]) -> list[str]:
    placed = attempt["placed"]
    matched = ", ".join(f"{name} {count}" for name, count in placed["matched_blocks"].items())
    lines = [
        f"{attempt['sequence']}: placed after {_ms(attempt['at_s'])} on {placed['prefill']} and {placed['decode']}",
        f"  matched of {placed['prompt_blocks']} blocks: {matched}",
    ]
    for one in placed["groups"]:
        lines.append(
            f"  {one['name']:12} {_ms(one['seconds']):>10}: queue {_ms(one['queue_s'])}, {one['new_tokens']} new tokens"
            f", {one['cached_tokens']} cached, {one['restore_blocks']} blocks to restore"
        )
    for one in placed["ranks"]:
        lines.append(
            f"  {one['name']:12} {_ms(one['seconds']):>10}: {one['missing_blocks']} blocks to pull, "
            f"{one['sequences']} sequences"
        )
    prefill = attempt.get("prefill")
    if prefill is not None:
        tiers = ", ".join(f"{tier} {tokens}" for tier, tokens in prefill["cached_tokens"].items())
        lines.append(
            f"  queue {_ms(prefill['queue_s'])}, restore {_ms(prefill['restore_s'])}, "
            f"compute {_ms(prefill['compute_s'])} (predicted {_ms(placed['predicted_prefill_s'])} for both); "
            f"first token after {_ms(prefill['first_token_s'])}; hit tokens: {tiers}"
        )
    if "error" in attempt:
        lines.append(f"  failed: {attempt['error']}")
    return lines


def _prompt(prompt: dict[str, Any]) -> list[str]:
    lines = [f"{prompt['cached_tokens']} of {prompt['tokens']} tokens hit: {prompt['why']}"]
    parted = prompt.get("parted")
    if parted is not None:
        lines += [
            f"  nearest {prompt['nearest']}, {prompt['age_s']} s before, shares {prompt['shared_tokens']} tokens",
            f"  before:  {parted['before']!r}",
            f"  this:    {parted['this']!r}",
            f"  nearest: {parted['nearest']!r}",
        ]
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
