"""`headrace lab`: hands over to the lab's own command line."""

import argparse

from headrace.lab import cli

HELP = cli.HELP
EXAMPLE = cli.EXAMPLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return cli.run(args)
