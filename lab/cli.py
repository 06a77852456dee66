"""`headrace lab`: the command line of the lab. Each sub-command is a module in `lab/commands/` with HELP, EXAMPLE,
add_arguments(parser) and run(args) -> exit code."""

import argparse
import importlib

HELP = "Cache tuning: inspect a trace, simulate tiers and policies, replay against a running service"
EXAMPLE = "headrace lab inspect conversation.jsonl.gz"
_COMMANDS = ("inspect", "simulate", "advise", "replay", "bench", "convert")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nested = parser.add_subparsers(dest="lab_command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        module = importlib.import_module(f"headrace.lab.commands.{name}")
        child = nested.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(child)
        child.set_defaults(lab_run=module.run)


def run(args: argparse.Namespace) -> int:
    code: int = args.lab_run(args)
    return code


def main(argv: list[str] | None = None) -> int:
    """The lab alone, without the rest of the command line: `python -m headrace.lab.cli`."""
    parser = argparse.ArgumentParser(prog="headrace lab", description=HELP)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
