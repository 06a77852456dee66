"""`headrace lab convert`: any trace as a Headrace recording, which holds lengths, times and anonymous block ids but no
text: what one can give away."""

import argparse

from headrace.lab.commands.source import add_trace_arguments, load_trace
from headrace.lab.report.files import save
from headrace.lab.traces.recorded import write

HELP = "Write a trace without its text: lengths, times and anonymous block ids"
EXAMPLE = "headrace lab convert requests.jsonl anonymous.jsonl --tokenizer tokenizer.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    parser.add_argument("out", help="file to write (JSON lines)")


def run(args: argparse.Namespace) -> int:
    trace = load_trace(args)
    save(args.out, "".join(write(trace)))
    print(f"{args.out}: {sum(1 for _ in trace.requests()):,} requests")
    return 0
