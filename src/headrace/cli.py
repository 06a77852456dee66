"""The command line: `headrace <command>`. Knows the names of the commands; each lives in its own module, loaded only
when it is called, so help is instant and nothing here imports an engine.

A command module has HELP, EXAMPLE, `add_arguments(parser)` and `run(args) -> int`. `args.config` is the loaded Config.
"""

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from headrace import __version__
from headrace.errors import HeadraceError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "serve": "start the whole service",
    "config": "print every setting with its documentation",
    "doctor": "what this machine has, and what would stop a start",
    "status": "ask a running service how it is",
    "store": "look into a running service's KV store: stats, blocks, digests, quotas, pins",
    "explain": "what became of a request, and why it did or did not hit",
    "generate": "complete a prompt in one process, without the service",
    "kernels": "which kernels run here and why; check, measure, tune, compile them",
    "model": "plan a model's memory over the ranks of a deployment",
    "lab": "inspect a trace, simulate caches and the service, replay, benchmark",
    "version": "versions of Headrace and what it runs on",
}


def module_of(command: str) -> str:
    """Import name of a command's module. A text: nothing here imports the deploy room."""
    return f"headrace.deploy.commands.{command}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"headrace {__version__}")
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"headrace: no command {args[0]!r}{hint} (known: {', '.join(COMMANDS)})", file=sys.stderr)
        return EXIT_ERROR
    return run_command(args[0], args[1:])


def run_command(name: str, argv: Sequence[str]) -> int:
    """Parse and run one command. A HeadraceError becomes one line (or one JSON object) on standard error and exit 2."""
    module = importlib.import_module(module_of(name))
    args = build_parser(name, module).parse_args(argv)
    try:
        from headrace.config import load_config

        args.config = load_config(args.config, args.overrides)
        code: int = module.run(args)
    except HeadraceError as error:
        if args.json:
            print(json.dumps({"error": {"kind": error.kind, "message": str(error)}}), file=sys.stderr)
        else:
            print(f"headrace {name}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_ERROR
    return code


def build_parser(name: str, module: Any) -> argparse.ArgumentParser:
    """The parser of one command, with what all commands share."""
    parser = argparse.ArgumentParser(
        prog=f"headrace {name}",
        description=module.HELP,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings (see `headrace config`)")
    parser.add_argument(
        "--set",
        metavar="A.B=C",
        dest="overrides",
        action="append",
        default=[],
        help="change one setting; may be repeated, and wins over the file",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    module.add_arguments(parser)
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headrace <command> [options]",
            "",
            "Serves GLM-5.2-class models with prefill and decode around a tiered KV cache.",
            "",
            "commands:",
            *lines,
            "",
            "example:",
            "  headrace serve --set router.port=8000      then: headrace <command> --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
