"""A coding agent's session: every turn adds a source file of this repository and a question, and sends all of it again.

Shows per turn how many prompt tokens were not computed again and which tier gave them. From the second turn on, hits
should reach the floor 64 * ((L + A - 1) // 64) of the turn before (prompt L, answer A), as far as the client sends that
turn back token for token.

    python examples/agent_session.py --base-url http://127.0.0.1:8000/v1 --turns 6
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

ROOT = Path(__file__).resolve().parent.parent
BLOCK_TOKENS = 64
ASKS = (
    "What does this module do?",
    "Which function here would you test first, and why?",
    "Write a test for it.",
    "Where could this fail under load?",
    "Suggest a clearer name for the longest function.",
    "Summarise what has changed in our understanding.",
)


@dataclasses.dataclass
class Turn:
    """What one turn measured. Times in seconds, rates in tokens a second."""

    turn: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = dataclasses.field(default_factory=dict)
    floor_tokens: int = 0
    first_token_s: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def next_floor(self) -> int:
        """Tokens the next turn should find: the last sampled token has no KV yet, and blocks are whole."""
        return BLOCK_TOKENS * max(0, (self.prompt_tokens + self.completion_tokens - 1) // BLOCK_TOKENS)


def source_files(count: int) -> list[Path]:
    """Source files of this repository, in a fixed order, the longer ones first: real code of real size."""
    folders = ("src/headrace", "kvstore", "model", "prefill", "decode", "router", "deploy", "kernels")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.resolve() == path]
    ordered = sorted(found, key=lambda path: (-path.stat().st_size, str(path)))
    return [ordered[i % len(ordered)] for i in range(count)]


def question(path: Path, turn: int, chars: int) -> str:
    text = path.read_text()[:chars]
    return f"Here is `{path.relative_to(ROOT)}`:\n\n```python\n{text}\n```\n\n{ASKS[turn % len(ASKS)]}"


def ask(
    client: OpenAI, model: str, messages: list[dict[str, str]], args: argparse.Namespace, turn: Turn
) -> dict[str, str]:
    """Stream one answer into `turn`; the assistant message to send back."""
    began = time.perf_counter()
    first = last = 0.0
    content, reasoning = "", ""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"enable_thinking": args.thinking}},
    )
    for chunk in stream:
        if chunk.choices:
            delta: Any = chunk.choices[0].delta
            piece, thought = delta.content or "", getattr(delta, "reasoning_content", None) or ""
            if piece or thought:
                last = time.perf_counter()
                first = first or last
            content, reasoning = content + piece, reasoning + thought
        if chunk.usage is not None:
            read_usage(turn, chunk.usage)
    turn.first_token_s = (first or time.perf_counter()) - began
    if last > first and turn.completion_tokens > 1:
        turn.tokens_per_s = (turn.completion_tokens - 1) / (last - first)
    answer = {"role": "assistant", "content": content}
    return answer | ({"reasoning_content": reasoning} if reasoning else {})


def read_usage(turn: Turn, usage: Any) -> None:
    turn.prompt_tokens, turn.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    details = usage.prompt_tokens_details
    if details is not None:
        turn.cached_tokens = details.cached_tokens or 0
        turn.cached_by_tier = dict(getattr(details, "cached_tokens_by_tier", None) or {})


def run(args: argparse.Namespace) -> list[Turn]:
    """All turns. Raises OpenAIError when one fails."""
    client = OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=args.timeout_s)
    model = args.model or client.models.list().data[0].id
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a careful Python engineer."}]
    turns: list[Turn] = []
    for number, path in enumerate(source_files(args.turns), start=1):
        turn = Turn(number, floor_tokens=turns[-1].next_floor if turns else 0)
        messages.append({"role": "user", "content": question(path, number - 1, args.chars)})
        messages.append(ask(client, model, messages, args, turn))
        turns.append(turn)
        if not args.json:
            print(line(turn), flush=True)
        if not turn.prompt_tokens:
            raise OpenAIError(f"turn {number}: the stream ended without usage")
    return turns


HEAD = "turn  prompt     hit  by tier                    expected  first token   tokens/s"


def line(turn: Turn) -> str:
    tiers = ", ".join(f"{tier} {count}" for tier, count in sorted(turn.cached_by_tier.items())) or "-"
    verdict = "" if turn.cached_tokens >= turn.floor_tokens else "  below"
    return (
        f"{turn.turn:4}  {turn.prompt_tokens:6}  {turn.cached_tokens:6}  {tiers:26} {turn.floor_tokens:8}"
        f"  {turn.first_token_s:9.2f} s  {turn.tokens_per_s:9.1f}{verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="", help="default: the first the service lists")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48, help="answer length of a turn")
    parser.add_argument("--chars", type=int, default=6000, help="most characters of a source file")
    parser.add_argument("--thinking", action="store_true", help="let the template switch reasoning on")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    args = parser.parse_args()
    if not args.json:
        print(HEAD)
    try:
        turns = run(args)
    except OpenAIError as error:
        print(f"agent_session: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([dataclasses.asdict(turn) for turn in turns], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
