"""The arguments that say which trace, shared by all sub-commands."""

import argparse

from headrace.lab.traces import describe, format_names, read_trace
from headrace.lab.traces.form import Trace
from headrace.lab.traces.options import ReadOptions


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    formats = "; ".join(f"{name}: {describe(name)}" for name in format_names())
    parser.add_argument("trace", help="trace file, plain or gzip/xz/bz2")
    parser.add_argument("--format", default="auto", choices=["auto", *format_names()], help=formats)
    parser.add_argument("--tokenizer", default="", metavar="FILE", help="tokenizer.json, for traces that hold text")
    parser.add_argument("--sessions", type=int, default=0, metavar="N", help="only the first N sessions; 0: all")


def load_trace(args: argparse.Namespace) -> Trace:
    trace = read_trace(args.trace, args.format, ReadOptions(tokenizer=args.tokenizer))
    return trace.head(args.sessions) if args.sessions > 0 else trace
