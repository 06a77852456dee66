"""`headrace lab bench`: time to first token and throughput of a running service at fixed concurrencies."""

import argparse

from headrace.errors import InputError
from headrace.lab.commands.live import add_live_arguments, run_live
from headrace.lab.live.figures import figures
from headrace.lab.live.http import Client
from headrace.lab.live.profiles import CONCURRENCIES, PROFILES, profile_trace
from headrace.lab.live.replay import ReplaySettings
from headrace.lab.report.files import save, to_csv, to_json, to_text

HELP = "Benchmark a running service: prompts of one length with a shared prefix, at 1 to 50 requests in flight"
EXAMPLE = "headrace lab bench nano-64k --concurrency 1,4 --url http://127.0.0.1:8000"
_COLUMNS = (
    "profile", "concurrency", "requests", "failed", "hit", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s",
    "requests_per_s", "prompt_tokens_per_s",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", choices=list(PROFILES))
    parser.add_argument(
        "--concurrency",
        default=",".join(map(str, CONCURRENCIES)),
        metavar="A,B,C",
        help="requests in flight, case by case",
    )
    parser.add_argument("--output", type=int, default=1, help="answer tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    add_live_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        levels = [int(level) for level in args.concurrency.split(",")]
    except ValueError as error:
        raise InputError(f"--concurrency {args.concurrency!r}: expected whole numbers, like 1,5,10") from error
    client, rows = Client(args.url, args.api_key), []
    for level in levels:
        settings = ReplaySettings(model=args.model, concurrency=level, seed=args.seed)
        trace = profile_trace(args.profile, level, args.output)
        row = figures(run_live(client, trace, settings, flush=not args.keep_cache))
        rows.append({"profile": args.profile, "concurrency": level, **row})
    if args.csv:
        save(args.csv, to_csv(rows))
    print(to_json(rows, [f"{args.profile} against {args.url}"]) if args.json else to_text(rows, _COLUMNS))
    return 0
