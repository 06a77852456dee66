"""`headrace lab advise`: sizes, policy and prefill groups for a trace, with the simulations behind them."""

import argparse
import dataclasses
import json
import sys

from headrace.errors import ConfigError
from headrace.lab.commands.source import add_trace_arguments, load_trace
from headrace.lab.report.files import to_text
from headrace.lab.simulate.advise import Step, Wishes, advise
from headrace.lab.simulate.costs import load as load_costs
from headrace.lab.simulate.service_settings import ServiceSettings
from headrace.lab.simulate.settings import parse_settings, to_bytes

HELP = "Propose host memory, policy and prefill groups for a trace, with the predicted gain of each step"
EXAMPLE = "headrace lab advise conversation.jsonl.gz --ttft-p90 2 --max-host 4TB --max-groups 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    parser.add_argument("--ttft-p90", type=float, default=2.0, metavar="SECONDS", help="time to first token to meet")
    parser.add_argument("--max-host", default="2TB", metavar="SIZE", help="most host memory of a node")
    parser.add_argument("--max-groups", type=int, default=16, metavar="N", help="most prefill groups")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the service")
    parser.add_argument("--costs", default="", metavar="FILE", help="prefill cost table: JSON [[new, cached, seconds]]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    if args.max_groups < 1:
        raise ConfigError(f"--max-groups {args.max_groups}: at least 1")
    base = parse_settings(ServiceSettings, args.set)
    if args.costs:
        base = dataclasses.replace(base, **dataclasses.asdict(load_costs(args.costs)))
    wishes = Wishes(
        ttft_p90_s=args.ttft_p90, max_host_bytes=to_bytes(args.max_host), max_groups=args.max_groups
    )  # fmt: skip
    steps = advise(load_trace(args), base, wishes, _say if sys.stderr.isatty() else lambda _text: None)
    print(json.dumps([dataclasses.asdict(step) for step in steps]) if args.json else _render(steps))
    return 0


def _say(text: str) -> None:
    print(f"simulating {text} …", file=sys.stderr)


def _render(steps: list[Step]) -> str:
    parts = []
    for number, step in enumerate(steps, 1):
        table = "\n".join("    " + line for line in to_text(step.rows, tuple(step.rows[0])).splitlines())
        parts.append(f"{number}. {step.title}: {step.choice}\n   {step.reason}\n{table}")
    flags = " ".join(f"--set {step.assignment}" for step in steps)
    return "\n\n".join(parts) + f"\n\nheadrace serve {flags}"
