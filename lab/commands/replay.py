"""`headrace lab replay`: a trace against a running service, and how far the simulation was off."""

import argparse
import dataclasses
import json

from headrace.lab.commands.live import add_live_arguments, run_live
from headrace.lab.commands.source import add_trace_arguments, load_trace
from headrace.lab.live.figures import compare, figures
from headrace.lab.live.http import Client
from headrace.lab.live.replay import ReplaySettings
from headrace.lab.report.files import save, to_csv, to_json, to_text
from headrace.lab.simulate.costs import load as load_costs
from headrace.lab.simulate.driver import service_case
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.simulate.settings import parse_settings
from headrace.lab.traces.form import Trace
from headrace.lab.traces.shrink import shrink

HELP = "Replay a trace against a running service over HTTP; --compare sets the simulation beside it"
EXAMPLE = (
    "headrace lab replay weka.jsonl.gz --sessions 4 --shrink 64 --time-scale 50 --compare --set prefill_size=1024b"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_live_arguments(parser)
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="divide all lengths by N, keeping what is shared"
    )
    parser.add_argument("--loop", default="closed", choices=["closed", "open"])
    parser.add_argument("--time-scale", type=float, default=1.0, help="2: recorded pauses pass twice as fast")
    parser.add_argument("--concurrency", type=int, default=0, help="most sessions at once; 0: no limit")
    parser.add_argument("--max-output", type=int, default=0, help="cut answers to so many tokens; 0: as recorded")
    parser.add_argument("--compare", action="store_true", help="also simulate, with --set for sizes and speeds")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the simulation")
    parser.add_argument("--costs", default="", metavar="FILE", help="prefill cost table of the simulation")
    parser.add_argument(
        "--save-costs", default="", metavar="FILE", help="write a cost table from this run: one request at a time"
    )


def run(args: argparse.Namespace) -> int:
    trace = load_trace(args)
    if args.shrink > 1 or trace.block_tokens != 64:
        trace = shrink(trace, args.shrink)
    if args.max_output:
        trace = cut_answers(trace, args.max_output)
    settings = ReplaySettings(
        model=args.model, loop=args.loop, time_scale=args.time_scale, concurrency=args.concurrency,
        in_flight=1 if args.save_costs else 0,
    )  # fmt: skip
    results = run_live(Client(args.url, args.api_key), trace, settings, flush=not args.keep_cache)
    if args.save_costs:
        points = [[r.prompt_tokens - r.cached_tokens, r.cached_tokens, r.ttft_s] for r in results if not r.error]
        save(args.save_costs, json.dumps(points))
    measured = figures(results)
    rows = [measured]
    columns: tuple[str, ...] = (
        "requests",
        "hit",
        "hit_device",
        "hit_host",
        "ttft_p50_s",
        "ttft_p90_s",
        "requests_per_s",
        "failed",
    )
    if args.compare:
        rows = compare(measured, service_case(trace, _simulated(args)))
        columns = ("figure", "measured", "simulated", "error")
    if args.csv:
        save(args.csv, to_csv(rows))
    print(to_json(rows, [f"{trace.name} against {args.url}"]) if args.json else to_text(rows, columns))
    return 0


def cut_answers(trace: Trace, most: int) -> Trace:
    """The same trace with answers of at most `most` tokens."""
    sessions = tuple(
        dataclasses.replace(
            session,
            requests=tuple(dataclasses.replace(r, output_tokens=min(r.output_tokens, most)) for r in session.requests),
        )
        for session in trace.sessions
    )
    return dataclasses.replace(trace, sessions=sessions)


def _simulated(args: argparse.Namespace) -> ServiceSettings:
    """What was replayed, with sizes and speeds as the user gives them. Live prompts never hold earlier answers."""
    driven = [f"loop={args.loop}", f"time_scale={args.time_scale}", f"concurrency={args.concurrency}"]
    settings = parse_settings(ServiceSettings, ["publish_answers=false", *args.set, *driven])
    return dataclasses.replace(settings, **dataclasses.asdict(load_costs(args.costs))) if args.costs else settings
