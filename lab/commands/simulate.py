"""`headrace lab simulate`: hit rates of a trace under sizes and policies, without a service."""

import argparse
import dataclasses
import datetime
import os
import shlex
import sys

from headrace.errors import InputError
from headrace.lab.commands.source import add_trace_arguments, load_trace
from headrace.lab.report.files import save, to_csv, to_json, to_text
from headrace.lab.report.page import hit_chart, page, pareto_chart
from headrace.lab.simulate.costs import load as load_costs
from headrace.lab.simulate.driver import service_case
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.simulate.settings import PoolSettings, describe_fields, parse_settings, parse_sweep
from headrace.lab.simulate.sweep import Row, pool_case, progress_bar, run_sweep, with_bound
from headrace.lab.traces.form import Trace

HELP = "Simulate one pool of blocks (hit rate by policy and size, with the clairvoyant bound) or a whole service"
EXAMPLE = (
    "headrace lab simulate conversation.jsonl.gz --sweep capacity=1M,5M,15M --sweep policy=lru,s3fifo --bound "
    "--html report.html"
)
_SERVICE_COLUMNS = (
    "hit", "hit_device", "hit_host", "hit_disk", "ttft_p50_s", "ttft_p90_s", "total_p90_s", "queue_s", "refused",
    "prefill_busy", "dram_gb",
)  # fmt: skip
_COLUMNS = (
    "policy", "capacity", "capacity_blocks", "block_weighted", "token_weighted", "request_mean", "evicted_blocks",
    "seconds",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_sweep_arguments(parser)
    parser.add_argument("--service", action="store_true", help="simulate a whole service in time, not one pool")
    parser.add_argument("--costs", default="", metavar="FILE", help="prefill cost table: JSON [[new, cached, seconds]]")
    parser.add_argument("--fields", action="store_true", help="list the fields of --set and --sweep and stop")
    parser.add_argument("--bound", action="store_true", help="add the clairvoyant bound at every size")


def run(args: argparse.Namespace) -> int:
    if args.fields:
        print(describe_fields(ServiceSettings if args.service else PoolSettings))
        return 0
    trace = load_trace(args)
    if args.service:
        rows = run_sweep(trace, _service_cases(args), service_case, args.jobs, progress_bar())
        publish(args, trace, rows, _swept(args) + _SERVICE_COLUMNS)
        return 0
    cases = parse_sweep(parse_settings(PoolSettings, args.set), args.sweep)
    if args.bound:
        cases = with_bound(cases)
    rows = run_sweep(trace, cases, pool_case, args.jobs, progress_bar())
    publish(args, trace, rows, _COLUMNS)
    return 0


def _service_cases(args: argparse.Namespace) -> list[ServiceSettings]:
    if args.bound:
        raise InputError("--bound is for a single pool: leave out --service")
    base = parse_settings(ServiceSettings, args.set)
    if args.costs:
        base = dataclasses.replace(base, **dataclasses.asdict(load_costs(args.costs)))
    return parse_sweep(base, args.sweep)


def _swept(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(text.partition("=")[0] for text in args.sweep)


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set one field")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="FIELD=A,B,C", help="run every combination of these values"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: all cores")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", default="", metavar="FILE", help="write CSV")
    parser.add_argument("--figure", default="", metavar="FILE.svg", help="write the main chart alone")
    parser.add_argument("--html", default="", metavar="FILE", help="write a self-contained HTML page")


def publish(args: argparse.Namespace, trace: Trace, rows: list[Row], columns: tuple[str, ...]) -> None:
    """Print and write what was asked for."""
    facts = [
        f"Trace {trace.name}: {sum(1 for _ in trace.requests()):,} requests, blocks of {trace.block_tokens} tokens.",
        f"Run on {datetime.date.today().isoformat()}: {shlex.join(['headrace', *sys.argv[1:]])}",
    ]
    if args.csv:
        save(args.csv, to_csv(rows))
    if args.figure:
        save(args.figure, hit_chart(rows) or pareto_chart(rows))
    if args.html:
        save(args.html, page(f"{trace.name}: simulated", facts, rows))
    print(to_json(rows, facts) if args.json else to_text(rows, columns))
