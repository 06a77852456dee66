"""`headrace lab inspect`: what a trace holds, as text, JSON or a figure."""

import argparse
import json

from headrace.lab.analysis.summary import inspect
from headrace.lab.analysis.text import render
from headrace.lab.commands.source import add_trace_arguments, load_trace

HELP = "Sessions, lengths, ideal hit rates, reuse distances and working set of a trace"
EXAMPLE = "headrace lab inspect lab/data/mooncake_conversation.jsonl.gz --figure conversation.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--figure", default="", metavar="FILE", help="also draw to FILE (.svg, .png, .pdf)")


def run(args: argparse.Namespace) -> int:
    facts = inspect(load_trace(args))
    if args.figure:
        from headrace.lab.analysis.figure import draw  # needs matplotlib

        draw(facts, args.figure)
    print(json.dumps(facts) if args.json else render(facts))
    return 0
